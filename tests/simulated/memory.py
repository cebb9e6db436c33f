"""Kinds of storages: memory of the simulated device, pinned memory of the host, or pageable memory."""

import weakref
from collections.abc import Callable
from enum import Enum

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.quantized.reference.base import ReferenceTensor
from tests.simulated.allocator import Allocator, Block
from tests.simulated.checker import HOST, Checker, Range
from tests.simulated.streams import Timeline


class Place(Enum):
    """Where memory is."""

    DEVICE = "device"
    PINNED = "pinned host memory"
    PAGEABLE = "host memory"


class FreedMemory(AssertionError):
    """A kernel uses a storage whose memory has been freed."""


class _Storage:
    """A storage, as long as it lives."""

    def __init__(self, place: Place, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.place = place
        self.reference = reference
        # The memory of a device's storage; None while ``resize_(0)`` has freed it.
        self.block: Block | None = None
        # The address of a host's storage. Host memory is never reused.
        self.address = 0


class Memory:
    """All storages. Those that it has not seen before are pageable memory of the host.

    Args:
        checker: Is told when the allocator has waited for streams.
        timeline: Says which stream is current.

    Attributes:
        allocator: The device's allocator.
        pool: The pool that it allocates from.
    """

    def __init__(self, checker: Checker, timeline: Timeline) -> None:
        self.allocator = Allocator(lambda block: checker.forget(block.reserved, block.recorded))
        self.pool = 0
        self._checker = checker
        self._timeline = timeline
        self._storages: dict[int, _Storage] = {}
        self._host_end = 0

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor is."""
        found = self._storages.get(_key(tensor))
        return Place.PAGEABLE if found is None else found.place

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the storage is that of an earlier tensor."""
        return _key(tensor) in self._storages

    def add(self, tensor: torch.Tensor, place: Place) -> None:
        """Note a new storage, which the current stream allocates."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        new = self._storages[key] = _Storage(place, weakref.ref(storage, self._freer(key)))
        if place is Place.DEVICE:
            self._allocate(new, storage.nbytes())
        else:
            new.address, self._host_end = self._host_end, self._host_end + storage.nbytes()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The memory of a tensor on the device."""
        found = self._storages.get(_key(tensor))
        return None if found is None else found.block

    def on_device(self) -> list[torch.UntypedStorage]:
        """The storages of the device that have memory."""
        found = [known.reference() for known in self._storages.values() if known.block is not None]
        return [storage for storage in found if storage is not None]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow ``resize_`` of a storage: 0 bytes free the memory, and others allocate it."""
        found = self._storages.get(storage._cdata)
        if found is not None and found.place is Place.DEVICE:
            self._free(found)
            self._allocate(found, storage.nbytes())

    def bytes_of(self, tensor: torch.Tensor) -> Range | None:
        """The bytes of a tensor from its first to its last element; None if it has none.

        Raises:
            FreedMemory: The storage's memory has been freed.
        """
        if not tensor.numel():
            return None
        size = tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * size
        end = begin + (last + 1) * size
        if end > tensor.untyped_storage().nbytes():
            raise FreedMemory(f"a tensor of shape {tuple(tensor.shape)} has no memory")
        if not self.knows(tensor):
            self.add(tensor, Place.PAGEABLE)
        storage = self._storages[_key(tensor)]
        if storage.block is None:
            return Range(HOST, storage.address + begin, storage.address + end)
        return Range(storage.block.space, storage.block.start + begin, storage.block.start + end)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Follow ``Tensor.record_stream``."""
        block = self._storages[_key(tensor)].block
        if block is not None:
            block.recorded.add(stream)

    def _allocate(self, storage: _Storage, nbytes: int) -> None:
        if nbytes:
            stream = self._timeline.current[-1].number
            storage.block = self.allocator.allocate(stream, nbytes, self._timeline.now, self.pool)

    def _free(self, storage: _Storage) -> None:
        if storage.block is not None:
            block = storage.block
            self._checker.free(block.reserved, block.stream, block.recorded)
            end = max((self._timeline.streams[n].end for n in block.recorded), default=0.0)
            self.allocator.free(storage.block, end)
            storage.block = None

    def _freer(self, key: int) -> Callable[[object], None]:
        storages, free = self._storages, self._free

        def freed(reference: object) -> None:
            # A later storage may have the same key.
            if key in storages and storages[key].reference is reference:
                free(storages.pop(key))

        return freed


def has_storage(tensor: torch.Tensor) -> bool:
    """False for meta tensors, sparse ones and others that this model leaves out."""
    is_made_of_others = isinstance(tensor, (DTensor, ReferenceTensor))
    return tensor.layout is torch.strided and not tensor.is_meta and not is_made_of_others


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
