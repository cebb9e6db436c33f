"""Memory that is registered with NCCL (user buffers): its collectives use it without copies into their own buffers."""

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of
from megatron.fsdp.comm.streams import at_end, error_at_end

logger = logging.getLogger(__name__)

_REGISTERS_ALL = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def check_can_register(groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Check that memory can be registered with all groups.

    Args:
        groups: Process groups whose collectives will use the memory.
        device: Device of the memory.

    Raises:
        ValueError: A group's backend is not NCCL, or a setting of torch prevents it.
    """
    for group in groups:
        if not (backend := backend_of(group, device)).registers_memory:
            raise ValueError(f"nccl_ub: expected NCCL as the backend; got {backend.name!r}.")
    # Expandable segments need no check: torch uses them only outside of pools that have an allocator of their own, as
    # this one does (active_user_pool in c10/cuda/CUDACachingAllocator.cpp).
    if os.environ.get(_REGISTERS_ALL, "0").lower() in ("1", "y", "yes", "t", "true", "on"):
        # These registrations are not symmetric windows, and they would be undone as if they were.
        raise ValueError(f"nccl_ub: with {_REGISTERS_ALL} torch registers the memory, too. Unset it.")


def nccl_backends(groups: list[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """The ``ProcessGroupNCCL`` of each group. The name of that class exists only where torch was built with NCCL."""
    return [group._get_backend(device) for group in groups]


class NcclMemory:
    """A memory pool that is registered with the communicators that use what is allocated in it.

    Registering a symmetric window is a collective. torch registers each segment of the pool as one window, and its
    allocator chooses the segments and the offsets in them. Ranks therefore compare :meth:`places` first. Once a pool is
    registered, torch also registers every segment that is added to it, at once and on this rank alone. Nothing is
    therefore allocated in a registered pool: :meth:`allocate` begins a new one.

    NCCL's allocator needs a device with multicast (NVSwitch). On others, the pool takes torch's allocator, and no
    window is registered.

    The registration ends with this object, or before that with the process groups. Ranks should delete their models in
    the same order.

    Args:
        groups: Process groups over NCCL whose collectives will use the memory, in the same order on all ranks.
        device: CUDA device.

    Attributes:
        has_multicast: Whether the device can have symmetric windows.
    """

    def __init__(self, groups: list[dist.ProcessGroup], device: torch.device) -> None:
        self._backends = nccl_backends(groups, device)
        self._device = device
        self.has_multicast = all(backend.supports_tensor_alloc(device) for backend in self._backends)
        self._pool: Any = None
        self._end: weakref.finalize | None = None

    @property
    def registered(self) -> bool:
        """Whether a pool is registered."""
        return self._end is not None and self._end.alive

    def allocate(self, free: Callable[[], None], function: Callable[[], None]) -> None:
        """End the registration of the earlier pool, and call a function whose allocations come from a new pool.

        Args:
            free: Frees what the function had allocated before.
            function: Allocates.
        """
        # Tasks may still use what is freed.
        torch.cuda.synchronize(self._device)
        self.deregister()
        free()
        torch.cuda.empty_cache()  # while a pool is in use, torch gives back no memory for an allocation that fails
        # A pool belongs to the device that is current when it is made.
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.MemPool(self._backends[0].mem_allocator if self.has_multicast else None)
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            function()

    def places(self, addresses: list[int]) -> list[int]:
        """The sizes of the pool's segments, and the segment and the offset in it of each address, as ranks compare it.

        Args:
            addresses: Begins of allocations from the pool.
        """
        segments = [(each["address"], each["total_size"]) for each in self._pool.snapshot()]
        found = [size for _, size in segments]
        for address in addresses:
            for number, (begin, size) in enumerate(segments):
                if begin <= address < begin + size:
                    found += [number, address - begin]
        return found

    def register(self, symmetric: bool, any_failed: Callable[[bool], bool] = bool) -> None:
        """Register the pool with all communicators, which must exist: each has run a collective on the device.

        Args:
            symmetric: As windows of symmetric memory, which NCCL 2.27 and later can reduce in the network. A
                collective. Each collective must then find its buffers at the same offsets on all ranks.
            any_failed: Called after each communicator with whether it has failed on this rank; returns whether it has
                on any. All ranks must go on alike, because they would wait for each other in the next one.

        Raises:
            RuntimeError: A communicator cannot register the pool, which is then registered with none.
        """
        registered: list[Any] = []
        self._end = weakref.finalize(self, _deregister, self._pool, registered, self._device)
        # When the interpreter ends, deregister_all is called instead.
        self._end.atexit = False
        _registrations.append(self._end)
        at_end(deregister_all)
        for backend in self._backends:
            # Registering maps memory of other devices, for which no kernel may run that waits for another rank.
            torch.cuda.synchronize(self._device)
            failure: RuntimeError | None = None
            try:
                backend.register_mem_pool(self._pool, **({"symm": True} if symmetric else {}))
            except RuntimeError as error:
                failure = error
            if any_failed(failure is not None):
                torch.cuda.synchronize(self._device)
                with suppress(RuntimeError):  # it has registered the segments before the one that failed, or none
                    backend.deregister_mem_pool(self._pool)
                self.deregister()
                raise failure or RuntimeError("NCCL could not register memory on another rank.")
            registered.append(backend)

    def deregister(self) -> None:
        """End the registration, if there is one."""
        if self._end is not None:
            self._end()


_registrations: list[weakref.finalize] = []


def deregister_all() -> None:
    """End all registrations. Called when the process groups or the process end."""
    while _registrations:
        end = _registrations.pop(0)
        if error_at_end() is None:
            end()
        else:
            # A collective may hang, so there is no waiting for the device. The communicators end without it.
            end.detach()


def _deregister(pool: Any, backends: list[Any], device: torch.device) -> None:
    """Deregister ``pool`` from the backends, in the order in which it was registered."""
    try:
        torch.cuda.synchronize(device)
        for backend in backends:
            backend.deregister_mem_pool(pool)
    except RuntimeError as error:
        # The communicators have ended, which is harmless, or the device has failed, which is reported elsewhere.
        logger.warning("FSDP: memory could not be deregistered from NCCL: %s", error)
