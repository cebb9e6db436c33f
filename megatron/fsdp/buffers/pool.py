"""Pools that provide the memory of temporary buffers.

A buffer of unsharded weights keeps one ``UntypedStorage`` for life. Autograd saves views of weights in forward and
reads them in backward, so weights that are unsharded again must appear in the storage that those views point to. Either
the storage stays and only its memory is allocated and freed (:class:`Pool`, and :class:`HostPool` on a CPU), or the
storage is one of a few that keep their memory and that units use in turn (:class:`FixedPool`).
"""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum
from itertools import accumulate, zip_longest
from typing import Any

import torch

from megatron.fsdp.comm.streams import is_capturing


class Writer(IntEnum):
    """The first to write a buffer; this one waits for no earlier use of its memory."""

    TASKS = 0
    COMPUTE = 1
    OUTER_TASKS = 2


# Dtype, device, and who is the first to write it.
_Kind = tuple[torch.dtype, torch.device, Writer]

# One buffer of a fixed pool, as numbers that ranks can exchange. A slot: 0, its place, 0, its bytes. Scratch memory: 1,
# the place of its dtype in _DTYPES, who is the first to write it, its elements.
Buffer = tuple[int, int, int, int]

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)

# Bytes. Collectives and vectorized kernels are fastest on buffers that are aligned to this.
BUFFER_ALIGNMENT = 256


class Pool:
    """Provides the memory of one unit's temporary buffers: here torch's allocator, and nothing is kept.

    Tasks of the communication stream allocate and free. On CUDA the memory therefore belongs to that stream's part of
    the caching allocator, and tasks that reuse it are ordered by the stream.

    Attributes:
        keeps_gradients: The memory of ``.grad`` is used for the next step's gradients. If False, it is freed with them.
        is_fixed: Buffers keep their addresses, which all ranks must use in the same order.
        slot: Memory for unsharded weights that several units share; None if each has separate memory.
    """

    keeps_gradients = False
    is_fixed = False
    slot: "Slot | None" = None

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of undefined content for unsharded weights, which has memory until it is freed once."""
        return torch.empty(numel, dtype=dtype, device=device)

    def allocate(self, flat: torch.Tensor) -> None:
        """Allocate memory of undefined content for a tensor that ``reserve`` returned, unless it has memory."""
        storage = flat.untyped_storage()
        if storage.nbytes() != flat.nbytes:
            storage.resize_(flat.nbytes)

    def free(self, flat: torch.Tensor) -> None:
        """Free that memory. Views of ``flat`` must not be read until it is allocated again."""
        if flat.untyped_storage().nbytes():
            flat.untyped_storage().resize_(0)

    def scratch(
        self, numel: int, dtype: torch.dtype, device: torch.device, writer: Writer = Writer.TASKS
    ) -> torch.Tensor:
        """A flat tensor of undefined content.

        Args:
            numel: Number of elements.
            dtype: Element type.
            device: Device of the tensor.
            writer: Who is the first to write it.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return a tensor of ``scratch``: no task that is given to a stream from now on uses it.

        The computation gives back its own tensors, after it has waited for the tasks that use them.
        """

    def trim(self) -> None:
        """Free what was given back, unless it stays allocated for life: the step's gradients are reduced."""


class HostPool(Pool):
    """Reuses freed memory of a model's buffers, for buffers of the same size, as CUDA's allocator does.

    On a CPU, memory of large buffers that is freed goes back to the operating system. New memory then costs a fault per
    page, which takes longer than a copy of the page.

    What is in use and what is kept are together never more than was in use at one time: before new memory is allocated,
    kept memory of at least that size is freed. Nothing is kept once all weights are resharded or a step's gradients are
    reduced.

    Args:
        keeps_gradients: See :class:`Pool`.
    """

    def __init__(self, keeps_gradients: bool) -> None:
        self.keeps_gradients = keeps_gradients
        self._kept: list[torch.UntypedStorage] = []  # oldest first
        self._unsharded = 0  # how many buffers of unsharded weights have memory
        self._lock = threading.Lock()

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Pool.reserve`."""
        with self._lock:
            self._unsharded += numel > 0
        return super().reserve(numel, dtype, device)

    def allocate(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.allocate`."""
        storage, nbytes = flat.untyped_storage(), flat.nbytes
        if storage.nbytes() == nbytes:
            return
        kept = self._take(nbytes) if _CAN_SWAP else None
        if kept is None:
            storage.resize_(nbytes)
        else:
            storage._swap_data_ptr_(kept)  # type: ignore[attr-defined]
        with self._lock:
            self._unsharded += 1

    def free(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.free`."""
        storage = flat.untyped_storage()
        if not storage.nbytes():
            return
        if _CAN_SWAP:
            freed = torch.UntypedStorage(0)
            freed._swap_data_ptr_(storage)  # type: ignore[attr-defined]
            self._keep(freed)
        else:
            storage.resize_(0)
        with self._lock:
            self._unsharded -= 1
            if not self._unsharded:
                self._kept.clear()

    def scratch(
        self, numel: int, dtype: torch.dtype, device: torch.device, writer: Writer = Writer.TASKS
    ) -> torch.Tensor:
        """See :meth:`Pool.scratch`."""
        flat = torch.empty(0, dtype=dtype, device=device)
        kept = self._take(numel * dtype.itemsize)
        return flat.resize_(numel) if kept is None else flat.set_(kept, 0, (numel,), (1,))

    def give_back(self, tensor: torch.Tensor) -> None:
        """See :meth:`Pool.give_back`."""
        self._keep(tensor.untyped_storage())

    def trim(self) -> None:
        """See :meth:`Pool.trim`."""
        with self._lock:
            self._kept.clear()

    def _take(self, nbytes: int) -> torch.UntypedStorage | None:
        """Kept memory of this size. None if there is none, and as much memory as is needed has been freed."""
        with self._lock:
            for place, kept in enumerate(self._kept):
                if kept.nbytes() == nbytes:
                    return self._kept.pop(place)
            freed = 0
            while self._kept and freed < nbytes:
                freed += self._kept.pop(0).nbytes()
            return None

    def _keep(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if storage.nbytes():
                # Two users would get memory that is here twice.
                assert all(kept.data_ptr() != storage.data_ptr() for kept in self._kept), "given back twice"
                self._kept.append(storage)


# It exchanges the memory of two storages. With torch 2.11, which lacks it, unsharded weights are new memory each time.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def users_of(tensor: torch.Tensor) -> int:
    """A number that grows with every tensor that shares the memory of this one; it has no meaning of its own."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Slot:
    """Memory that is never freed, for the unsharded weights of one unit at a time.

    Attributes:
        holder: Returns the unit whose weights were last unsharded to it, if there is one; set by ``Unit.unshard``.
        storage: The memory. Views move with it when it changes its size.
    """

    def __init__(self, device: torch.device) -> None:
        self.holder: Callable[[], Any] = lambda: None
        self.storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()

    def view(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over the bytes from ``begin`` on. The slot grows if it is too small."""
        end = begin + numel * dtype.itemsize
        if self.storage.nbytes() < end:
            if not self.storage.resizable():  # a part of a block
                self.take(torch.UntypedStorage(0, device=self.storage.device))
            self.storage.resize_(end)
        flat = torch.empty(0, dtype=dtype, device=self.storage.device)
        return flat.set_(self.storage, begin // dtype.itemsize, (numel,), (1,)).zero_()

    def take(self, memory: torch.UntypedStorage) -> None:
        """Move to other memory, with all views; the present memory, and its content, are dropped."""
        if _CAN_SWAP:
            self.storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]
        else:
            self.storage.resize_(memory.nbytes())


class FixedPool:
    """A model's buffers that stay where they are: a few slots for unsharded weights, and scratch memory that is reused.

    Nothing is allocated once every kind of buffer has been used. A slot has the size of the largest unit that uses it.

    Args:
        slots: How many units that are not inside each other may be unsharded at a time, in each half of the units.
        device: Device of the slots.
        half: The first number of the units that have slots apart. None: all units use the same slots.

    Attributes:
        grown: Whether a buffer was made since the last :meth:`renew`.
    """

    def __init__(self, slots: int, device: torch.device, half: int | None = None) -> None:
        self.grown = False
        self._slots, self._half = slots, half
        self._by_place: dict[tuple[object, int], Slot] = defaultdict(functools.partial(Slot, device))
        self._free: dict[_Kind, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, tuple[_Kind, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def for_unit(self, number: int, depth: int, inner_apart: bool) -> "UnitPool":
        """The pool of one unit.

        Args:
            number: Units with neighbouring numbers have different slots.
            depth: How many units are around it. Units of different depths never share a slot, because one may be
                unsharded inside the other.
            inner_apart: Units inside of others have slots that no other unit uses, as the root always has.
        """
        own = depth == 0 or (depth > 1 and inner_apart)
        second = self._half is not None and number >= self._half
        place = number % self._slots + self._slots * second
        return UnitPool(self, self._by_place[("own", number) if own else (depth, place)])

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device, writer: Writer) -> torch.Tensor:
        """The smallest free buffer that is large enough, or a new one.

        A task gives a buffer back while its kernels may still use it. That is safe for the next task, which follows in
        the stream's order, but not for the computation or another stream, which do not wait. Buffers are kept apart by
        who is the first to write them.
        """
        kind = (dtype, device, writer)
        with self._lock:
            free = self._free[kind]
            fitting = min((t for t in free if t.numel() >= numel), key=torch.Tensor.numel, default=None)
            if fitting is None:
                if is_capturing():
                    raise RuntimeError(
                        "The CUDA graph that is captured needs a buffer that no iteration before it has needed. It "
                        "must run the same forwards and backwards as an iteration before it."
                    )
                self.grown = True
                fitting = torch.empty(numel, dtype=dtype, device=device)
            else:
                free[:] = [t for t in free if t is not fitting]
            self._lent[fitting.data_ptr()] = kind, fitting
        return fitting[:numel]

    def give_back(self, tensor: torch.Tensor) -> None:
        """Keep a tensor of :meth:`scratch`. Other tensors are ignored."""
        with self._lock:
            kind, base = self._lent.pop(tensor.data_ptr(), (None, None))
            if kind is not None and base is not None:
                self._free[kind].append(base)

    def buffers(self) -> list[Buffer]:
        """All buffers, in an order that depends on nothing else."""
        with self._lock:
            scratch = [(kind, tensor) for kind, free in self._free.items() for tensor in free]
            scratch += self._lent.values()
        found = [(0, place, 0, slot.storage.nbytes()) for place, slot in enumerate(self._by_place.values())]
        found += [(1, _DTYPES.index(dtype), int(writer), tensor.numel()) for (dtype, _, writer), tensor in scratch]
        return sorted(found)

    def release(self, device: torch.device) -> None:
        """Free all buffers. Tensors in use keep their memory, which leaves the pool: giving them back frees it."""
        with self._lock:
            self._free.clear()
            self._lent.clear()
            for slot in self._by_place.values():
                slot.take(torch.UntypedStorage(0, device=device))

    def renew(self, buffers: list[Buffer], device: torch.device) -> None:
        """Replace all buffers by new ones on ``device``, in the given order, with undefined content.

        They are parts of one allocation. Between several, the allocator would choose the distances, and on each rank
        others. Without ``_swap_data_ptr_``, slots are allocations of their own.

        Slots move together with their views; no unit may be unsharded.
        """
        self.release(device)
        sizes = [size * (_DTYPES[which].itemsize if is_scratch else 1) for is_scratch, which, _, size in buffers]
        ends = list(accumulate(-(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT for size in sizes))
        with self._lock:
            slots = list(self._by_place.values())
            block = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=device).untyped_storage()
            for begin, nbytes, (is_scratch, which, writer, size) in zip([0, *ends], sizes, buffers, strict=False):
                part = block[begin : begin + nbytes]
                if is_scratch:
                    kind = (_DTYPES[which], device, Writer(writer))
                    flat = torch.empty(0, dtype=kind[0], device=device)
                    self._free[kind].append(flat.set_(part, 0, (size,), (1,)))
                else:
                    slots[which].take(part)
            self.grown = False

    def addresses(self) -> list[int]:
        """Addresses of the buffers that :meth:`renew` has just made: first the slots, then scratch memory."""
        storages = [slot.storage for slot in self._by_place.values()]
        storages += [flat.untyped_storage() for free in self._free.values() for flat in free]
        return [storage.data_ptr() for storage in storages if storage.nbytes()]


def sufficient(lists: list[list[Buffer]]) -> list[Buffer]:
    """The buffers with which every rank has at least what it needs: per kind, the maximum of each rank's largest,
    second largest, ...

    Args:
        lists: What each rank needs.
    """
    result: dict[tuple[int, int, int], list[int]] = {}
    for buffers in lists:
        sizes: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for is_scratch, which, writer, size in sorted(buffers, reverse=True):
            sizes[is_scratch, which, writer].append(size)
        for kind, found in sizes.items():
            result[kind] = [max(pair) for pair in zip_longest(result.get(kind, []), found, fillvalue=0)]
    return sorted((*kind, size) for kind, found in result.items() for size in found)


class UnitPool(Pool):
    """One unit's view of a :class:`FixedPool`: a slot for its unsharded weights, and scratch memory.

    ``Unit.unshard`` makes sure that no other unit uses the slot, which keeps its memory.
    """

    keeps_gradients = True
    is_fixed = True

    def __init__(self, pool: FixedPool, slot: Slot) -> None:
        self.slot: Slot = slot
        self._pool = pool
        self._end = 0

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Pool.reserve`. Groups of the unit follow each other in the slot."""
        begin = -(-self._end // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        self._end = begin + numel * dtype.itemsize
        self._pool.grown = True
        return self.slot.view(begin, numel, dtype)

    def allocate(self, flat: torch.Tensor) -> None:
        """Do nothing."""

    def free(self, flat: torch.Tensor) -> None:
        """Do nothing."""

    def scratch(
        self, numel: int, dtype: torch.dtype, device: torch.device, writer: Writer = Writer.TASKS
    ) -> torch.Tensor:
        """See :meth:`FixedPool.scratch`."""
        return self._pool.scratch(numel, dtype, device, writer)

    def give_back(self, tensor: torch.Tensor) -> None:
        """See :meth:`FixedPool.give_back`."""
        self._pool.give_back(tensor)
