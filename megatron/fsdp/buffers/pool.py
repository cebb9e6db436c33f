"""Where temporary buffers come from.

A gathered buffer keeps one ``UntypedStorage`` for life: autograd saves views of weights in forward and reads them in
backward, so weights gathered again must appear in the storage that those views point to. Either only that storage's
memory comes and goes (:class:`AllocatorPool`), or the storage is one of a few that stay and that units take in turn
(:class:`FixedPool`).
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

# Dtype, device, and whether the computation writes it first.
_Kind = tuple[torch.dtype, torch.device, bool]

# Bytes. What collectives and vectorized kernels want a buffer to start at.
BUFFER_ALIGNMENT = 256


class Pool(Protocol):
    """Gives memory to the buffers of one unit and takes it back."""

    recycles: bool

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of zeros for gathered weights, filled until it is drained for the first time."""

    def allocate(self, flat: torch.Tensor) -> None:
        """Give what ``reserve`` returned memory of undefined content, unless it has some."""

    def free(self, flat: torch.Tensor) -> None:
        """Take that memory back; views of ``flat`` must not be read until it is filled again."""

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device, for_compute: bool = False) -> torch.Tensor:
        """A flat tensor of undefined content.

        Args:
            numel: Number of elements.
            dtype: Element type.
            device: Where it is.
            for_compute: The computation writes it first, and not a task of the communication stream.
        """

    def give_back(self, tensor: torch.Tensor) -> None:
        """No task that is given to a stream from now on will read or write what ``scratch`` returned.

        What was made for the computation is given back by it, when it has waited for the tasks that use it.
        """


class AllocatorPool:
    """Takes memory from torch's own allocator and keeps none, so that nothing is held at rest.

    Memory is requested by tasks of the communication stream. On CUDA it therefore belongs to that stream's part of
    the caching allocator, and reuse follows the order of the stream.
    """

    recycles = False

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Pool.reserve`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.allocate`."""
        storage, nbytes = flat.untyped_storage(), flat.numel() * flat.element_size()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)

    def free(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.free`."""
        if flat.untyped_storage().nbytes():
            flat.untyped_storage().resize_(0)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device, for_compute: bool = False) -> torch.Tensor:
        """See :meth:`Pool.scratch`."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, tensor: torch.Tensor) -> None:
        """See :meth:`Pool.give_back`. The last reference to it does that."""


class Slot:
    """Memory that stays, for the gathered weights of one unit at a time.

    Attributes:
        holder: Returns the unit whose weights were last gathered to it, if there is one; set by ``Unit.gather``.
    """

    def __init__(self) -> None:
        self.holder: Callable[[], Any] = lambda: None
        self._storage: torch.UntypedStorage | None = None

    def view(self, begin: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor over the bytes from ``begin`` on; the slot grows if it is too small."""
        end = begin + numel * dtype.itemsize
        if self._storage is None:
            self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        if self._storage.nbytes() < end:
            self._storage.resize_(end)
        flat = torch.empty(0, dtype=dtype, device=device)
        flat.set_(self._storage, begin // dtype.itemsize, (numel,), (1,))
        return flat.zero_()


class FixedPool:
    """A model's buffers that stay where they are: a few slots for gathered weights, and scratch memory that is reused.

    Nothing is allocated once every kind of buffer has been used. Slots have the size of the largest unit.

    Args:
        slots: How many units that are not inside each other may be gathered at a time.
        allocation: Gives a context for each allocation: makes memory that NCCL knows, for instance.

    Attributes:
        allocations: How many buffers have been made.
    """

    def __init__(self, slots: int, allocation: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.allocations = 0
        self._slots = slots
        self._allocation = allocation
        self._by_place: dict[tuple[object, int], Slot] = defaultdict(Slot)
        self._free: dict[_Kind, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, tuple[_Kind, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def for_unit(self, number: int, depth: int, shared: bool) -> "UnitPool":
        """The pool of one unit.

        Args:
            number: Units with neighbouring numbers have different slots.
            depth: How many units are around it. Units of different depths never share a slot, since one may be
                gathered inside the other.
            shared: Take a slot in turn with others; else the slot is the unit's own.
        """
        place = (depth, number % self._slots) if shared else ("own", number)
        return UnitPool(self, self._by_place[place])

    def view(self, slot: Slot, begin: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Slot.view`."""
        with self._allocation():
            self.allocations += 1
            return slot.view(begin, numel, dtype, device)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device, for_compute: bool) -> torch.Tensor:
        """The smallest free buffer that is large enough, or a new one.

        A buffer that a task has given back may still be in use by it when the computation goes on, but not when the
        next task begins: so the two have buffers of their own.
        """
        kind = (dtype, device, for_compute)
        with self._lock:
            free = self._free[kind]
            fitting = min((t for t in free if t.numel() >= numel), key=torch.Tensor.numel, default=None)
            if fitting is None:
                with self._allocation():
                    self.allocations += 1
                    fitting = torch.empty(numel, dtype=dtype, device=device)
            else:
                free[:] = [t for t in free if t is not fitting]
            self._lent[fitting.data_ptr()] = kind, fitting
        return fitting[:numel]

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back what :meth:`scratch` returned; other tensors are none of the pool's."""
        with self._lock:
            kind, base = self._lent.pop(tensor.data_ptr(), (None, None))
            if kind is not None and base is not None:
                self._free[kind].append(base)


class UnitPool:
    """What a unit has of a :class:`FixedPool`: one slot for its gathered weights, and scratch memory.

    Attributes:
        slot: The slot, which other units use too.
    """

    recycles = True

    def __init__(self, pool: FixedPool, slot: Slot) -> None:
        self.slot = slot
        self._pool = pool
        self._end = 0

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :meth:`Pool.reserve`. Groups of the unit lie behind each other in the slot."""
        begin = -(-self._end // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        self._end = begin + numel * dtype.itemsize
        return self._pool.view(self.slot, begin, numel, dtype, device)

    def allocate(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.allocate`. The memory is there; that no other unit uses it is seen to when it is gathered."""

    def free(self, flat: torch.Tensor) -> None:
        """See :meth:`Pool.free`."""

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device, for_compute: bool = False) -> torch.Tensor:
        """See :meth:`Pool.scratch`."""
        return self._pool.scratch(numel, dtype, device, for_compute)

    def give_back(self, tensor: torch.Tensor) -> None:
        """See :meth:`Pool.give_back`."""
        self._pool.give_back(tensor)
