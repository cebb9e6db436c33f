"""Helpers around torch's process groups."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import HOST, backend_of


def new_group(ranks: list[int], like: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a process group. Only its ranks call this, all of them.

    After ``init_process_group(device_id=...)``, torch makes the communicator of a new group by splitting that of all
    ranks (``_new_process_group_helper`` in torch/distributed/distributed_c10d.py). A split waits for all of them, also
    for those that do not call this. The new group therefore connects its ranks by itself, at its first collective.

    Args:
        ranks: The ranks.
        like: A group whose timeout the new one gets. torch would give it the default.
        name: Description for torch's own messages.
    """
    everyone = dist.distributed_c10d._get_default_group()
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout=timeout_of(like), use_local_synchronization=True, group_desc=name)
    finally:
        everyone.bound_device_id = bound


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of the group may take; None if its backend has none, as the fake one."""
    cuda = torch.device("cuda")
    device = cuda if backend_of(group, cuda).ends_process else HOST
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # the fake backend has none
        return None
    return timeout


class _Forked:
    """Whether this process was forked from a rank, whose threads and connections it does not have."""

    value = False

    @classmethod
    def note(cls) -> None:
        cls.value = dist.is_available() and dist.is_initialized()


os.register_at_fork(after_in_child=_Forked.note)


def refuse_forks() -> None:
    """Raise a RuntimeError if this process was forked from a rank."""
    if _Forked.value:
        raise RuntimeError(
            "This process was forked from a rank, as workers of a DataLoader are, and cannot communicate: the sharded "
            "model runs in the rank's own process only. Run it there, or give workers a copy of the full weights."
        )


def require_process_group() -> None:
    """Raise a clear error if this process cannot communicate.

    Raises:
        RuntimeError: There is no default process group, or the process was forked from a rank.
    """
    refuse_forks()
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() (under torchrun, or "
            "with world_size=1 for one process) before the model is sharded or run."
        )
