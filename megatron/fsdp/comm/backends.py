"""Capabilities of devices and of process groups' backends. No module outside this package compares their names."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

HOST = torch.device("cpu")
# The host of a simulated device. Tensors that are made there are on the CPU as all others.
SIMULATED_HOST = torch.device("cpu", 0)


@dataclass(frozen=True)
class Simulated:
    """The backend and device that CPU tensors and the fake backend stand for while a step is simulated.

    Attributes:
        backend: Name of the backend.
        runs_ahead: The host goes on while the device computes.
        stream: Returns the communication stream with a name.
    """

    backend: str
    runs_ahead: bool
    stream: Callable[[str], Any]


_simulated: list[Simulated] = []


@contextmanager
def simulate(what: Simulated) -> Iterator[None]:
    """Let process groups of the fake backend stand for others within the context."""
    _simulated.append(what)
    try:
        yield
    finally:
        _simulated.pop()


def simulation() -> Simulated | None:
    """The present simulation; None if there is none."""
    return _simulated[-1] if _simulated else None


@dataclass(frozen=True)
class Backend:
    """The backend that a process group uses for the tensors of one device.

    Attributes:
        name: Name in torch, such as ``"nccl"``.
        on_host: The tensors are in host memory. The host then waits for a collective, and such a wait can be ended.
    """

    name: str
    on_host: bool

    @property
    def moves_data(self) -> bool:
        """False for the fake backend, whose collectives do nothing."""
        return self.name != "fake"

    @property
    def can_average(self) -> bool:
        """True if a reduction can divide by the number of ranks."""
        return self.name != "gloo"

    @property
    def prefers_sends(self) -> bool:
        """True if collectives that are made of sends (:mod:`megatron.fsdp.comm.gloo`) are faster than its own."""
        return self.name == "gloo" and self.on_host

    @property
    def holds_tensors(self) -> bool:
        """True if its threads may hold a tensor for a moment after the collective that used it has ended."""
        return self.name == "gloo" or self.on_host

    @property
    def ends_process(self) -> bool:
        """True if it ends the process when a collective takes longer than the group's timeout."""
        return self.name == "nccl"

    @property
    def registers_memory(self) -> bool:
        """True if it can use memory that is registered with it without copies."""
        return self.name == "nccl"


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Backend:
    """The backend of ``group`` for tensors on ``device``; its name is empty if the group has none for them."""
    if _simulated:
        return Backend(_simulated[-1].backend, is_on_host(device))
    return Backend(_names(group).get(device.type, ""), is_on_host(device))


def moves_data(group: dist.ProcessGroup) -> bool:
    """False if collectives of the group do nothing."""
    return any(Backend(name, on_host=False).moves_data for name in _names(group).values())


def require_group(group: dist.ProcessGroup) -> None:
    """Raise a clear error if the group was destroyed: not every collective notices that."""
    _names(group)


def _names(group: dist.ProcessGroup) -> dict[str, str]:
    """Names of the group's backends by device type.

    ``dist.get_backend`` gives a single name. For a group with several backends, or with the default ones, that is
    neither: it may be the whole ``"cpu:gloo,cuda:nccl"``, or ``"undefined"``.
    """
    try:
        config = dist.get_backend_config(group)
    except (TypeError, ValueError) as error:
        raise RuntimeError(
            "The process group of a sharded model does not exist any more: destroy_process_group() was called. Save "
            "the model before that call. After the next init_process_group(), shard a new model and load into it."
        ) from error
    return {device: name for device, _, name in [pair.partition(":") for pair in config.split(",")]}


def is_communication_error(error: BaseException) -> bool:
    """True for errors of collectives. gloo's have no class that would tell."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def runs_ahead(device: torch.device) -> bool:
    """True if the host goes on while ``device`` computes."""
    return device.type == "cuda" or bool(_simulated and _simulated[-1].runs_ahead)


def pins_memory(device: torch.device) -> bool:
    """True if host memory that ``device`` reads has to be pinned, so that copies do not block the host."""
    return runs_ahead(device) and not _simulated


def offload_device() -> torch.device:
    """Where offloaded main weights are made."""
    return SIMULATED_HOST if _simulated and _simulated[-1].runs_ahead else HOST


def is_on_host(device: torch.device) -> bool:
    """True if tensors on ``device`` are in host memory."""
    return device.type == HOST.type and not runs_ahead(device)


def local_device(device: torch.device | str) -> torch.device:
    """The device itself, or this process's own if ``device`` is CUDA without a number.

    A process that has called ``torch.cuda.set_device`` computes on that device. Otherwise ``LOCAL_RANK``, which
    launchers set, says which one, so that the ranks of a machine do not all compute on the first device.
    """
    device = torch.device(device)
    if _simulated:
        return device
    if runs_ahead(device) and not torch.cuda.is_available():
        raise ValueError(f"device: got {str(device)!r}, but torch finds no CUDA device. Leave it out to use the CPU.")
    if not runs_ahead(device) or device.index is not None:
        return device
    # Device 0 is current if none was chosen. A launcher may also show each process a single device.
    current, local_rank = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    if current == 0 and 0 < local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        current = local_rank
    return torch.device(device.type, current)


def compute_device(module: torch.nn.Module, device: torch.device | str | None = None) -> torch.device:
    """Where a model computes: on ``device`` if it is given, or where the model is, or on this process's CUDA device."""
    if device is not None:
        return local_device(device)
    first = next(module.parameters(), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device
    return local_device("cuda" if torch.cuda.is_available() else "cpu")
