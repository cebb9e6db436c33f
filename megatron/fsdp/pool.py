"""Where temporary buffers come from.

A gathered buffer keeps one ``UntypedStorage`` for life, and only that storage's memory comes and goes: autograd
saves views of weights in forward and reads them in backward, so weights gathered again must appear in the storage
that those views point to.
"""

from typing import Protocol

import torch


class Pool(Protocol):
    """Gives memory to storages and takes it back."""

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give ``storage`` ``nbytes`` of memory; its content is undefined."""

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage`` back; its views must not be read until it is filled again."""

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of undefined content, given back when the last reference to it is dropped."""


class AllocatorPool:
    """Takes memory from torch's own allocator and keeps none, so that nothing is held at rest.

    Memory is requested by tasks of the communication stream. On CUDA it therefore belongs to that stream's part of
    the caching allocator, and reuse follows the order of the stream.
    """

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """See :meth:`Pool.fill`."""
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """See :meth:`Pool.drain`."""
        if storage.nbytes():
            storage.resize_(0)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Pool.scratch`."""
        return torch.empty(numel, dtype=dtype, device=device)
