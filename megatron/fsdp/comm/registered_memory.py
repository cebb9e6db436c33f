"""Memory that is registered with NCCL (user buffers): its collectives use it without copies into their own buffers."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of


class NcclMemory:
    """A memory pool that is registered with the communicators that use what is allocated in it.

    Args:
        groups: Process groups over NCCL whose collectives will use the memory.
        device: CUDA device.
        symmetric: Register as windows of symmetric memory, which NCCL 2.27 and later can reduce in the network.

    Raises:
        ValueError: A group's backend is not NCCL.
    """

    def __init__(self, groups: list[dist.ProcessGroup], device: torch.device, symmetric: bool) -> None:
        for group in groups:
            if not (backend := backend_of(group, device)).registers_memory:
                raise ValueError(f"nccl_ub: expected NCCL as the backend; got {backend.name!r}.")
        # ProcessGroupNCCL, whose name exists only where torch was built with NCCL.
        self._backends: list[Any] = [group._get_backend(device) for group in groups]
        self._device = device
        self._symmetric = symmetric
        # All communicators of a process use the same allocator.
        self._pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        self._registered = 0

    def allocation(self) -> AbstractContextManager[Any]:
        """A context in which CUDA allocations of this thread come from the pool."""
        return torch.cuda.use_mem_pool(self._pool, device=self._device)

    def register(self, allocations: int) -> None:
        """Register all allocations, unless nothing was allocated since the last call.

        Args:
            allocations: How many allocations have been made in the pool.
        """
        if allocations == self._registered:
            return
        for backend in self._backends:
            if self._registered:
                backend.deregister_mem_pool(self._pool)
            if self._symmetric:
                backend.register_mem_pool(self._pool, symm=True)
            else:
                backend.register_mem_pool(self._pool)
        self._registered = allocations
