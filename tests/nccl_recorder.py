"""A mock of NCCL's registration of memory, which checks the rules of the real one while ranks train over gloo.

The rules, and where they come from:

1. Registering to a communicator that does not exist is an error; a communicator is made by the group's first collective
   or when the group is made (``registerMemPool`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
2. A pool is registered segment by segment, in the order of allocation. A symmetric window is registered by a collective
   of the communicator, for which all ranks must pass the same size (same function; NCCL's ncclCommWindowRegister). So
   ranks that register other segments, or the same in a different order of communicators, wait for each other forever.
3. Every later segment of a registered pool is registered at its allocation, by that rank alone
   (``cacheAllocatorRegisterHook``, same file).
4. Registering a pool twice has no effect on segments that are registered; deregistering one that is not registered is
   an error (``deregisterMemPool``, same file, and ``NCCLComm::registerSegment`` in NCCLUtils.cpp).
5. Deregistering from a communicator that has ended is an error (``deregisterMemPool``). A communicator that is aborted
   deregisters all it has, but not as windows in every version (``NCCLComm::abort`` in NCCLUtils.cpp).
6. Memory must not be used while it is registered or deregistered, so no kernel may be pending (NCCL's documentation of
   ncclCommDeregister; Megatron-Core's allocator synchronizes as well).
7. With symmetric windows, every collective must be given buffers at the same offsets of the same windows on all ranks
   (NCCL_WIN_COLL_SYMMETRIC in NCCL's documentation of flags). A shard may be the rank's own slice of the full buffer,
   which is what NCCL calls an operation in place.
8. A pool belongs to the device that is current when it is made (``MemPool::MemPool`` in c10/cuda).
9. Small allocations share segments of 2 MiB, at offsets that depend on what was allocated and freed before
   (``get_free_block`` in c10/cuda/CUDACachingAllocator.cpp): here ranks with odd numbers fill a segment from its end.

Rules 1 and 3 to 6 are checked when the call is made, and 2 and 7 by :func:`assert_alike` on what all ranks recorded.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron.fsdp.comm import registered_memory
from megatron.fsdp.comm.backends import Backend
from megatron.fsdp.comm.collectives import all_reduce
from megatron.fsdp.comm.streams import CpuStream, Stream
from tests.exchanges import wrapped

_SEGMENT = 2 << 20


class Event(NamedTuple):
    """A registration or a collective of one group.

    Attributes:
        group: Name of the group, which is the same on all its ranks.
        ranks: Its ranks.
        what: What was called.
        details: What must be equal on all ranks of the group.
    """

    group: str
    ranks: tuple[int, ...]
    what: str
    details: tuple[Any, ...]


class Segment:
    """Memory that the allocator has got from NCCL's, and the part of it that is free."""

    def __init__(self, nbytes: int) -> None:
        # NaN in every dtype: the content of new memory must not matter.
        self.memory = torch.UntypedStorage(nbytes).fill_(255)
        self.begin, self.end = 0, nbytes

    def take(self, nbytes: int, from_end: bool) -> torch.UntypedStorage:
        """Allocate a part. The first is always at the beginning."""
        if from_end and self.begin:
            self.end -= nbytes
            return self.memory[self.end : self.end + nbytes]
        self.begin += nbytes
        return self.memory[self.begin - nbytes : self.begin]


class Pool:
    """A memory pool, whose segments are registered.

    Attributes:
        largest: The most bytes of one allocation.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.largest = 0
        self.windows = False
        self.registered_with: list[str] = []

    def snapshot(self) -> list[dict[str, int]]:
        """As that of ``torch.cuda.MemPool``."""
        return [{"address": each.memory.data_ptr(), "total_size": each.memory.nbytes()} for each in self.segments]

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for ``nbytes``, rounded up to 512."""
        self.largest = max(self.largest, nbytes)
        size = -(-nbytes // 512) * 512
        segment = next((each for each in self.segments if each.end - each.begin >= size), None)
        if segment is None:
            segment = Segment(-(-size // _SEGMENT) * _SEGMENT)
            self.segments.append(segment)
        return segment.take(size, from_end=dist.get_rank() % 2 == 1)[:nbytes]


class Communicator:
    """The backend of one group."""

    mem_allocator = "NCCL's allocator"

    def __init__(self, recorder: "Recorder", group: dist.ProcessGroup) -> None:
        self._recorder = recorder
        self._group = group

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def register_mem_pool(self, pool: Pool, symm: bool = False) -> None:
        name = self._check(pool)
        assert name in self._recorder.communicators, f"{name} has no communicator yet"
        assert name not in pool.registered_with, f"registered twice with {name}"
        assert pool.segments, "nothing is allocated"
        pool.registered_with.append(name)
        pool.windows = symm
        for segment in pool.segments:
            self._recorder.note(self._group, "window" if symm else "local", segment.memory.nbytes())

    def deregister_mem_pool(self, pool: Pool) -> None:
        name = self._check(pool)
        if not dist.is_initialized():
            raise RuntimeError("NCCL communicator has not been initialized")
        assert name in pool.registered_with, f"not registered with {name}"
        pool.registered_with.remove(name)
        self._recorder.note(self._group, "deregister", pool.windows)

    def _check(self, pool: Pool) -> str:
        assert not self._recorder.pending, "tasks were given since the device was synchronized"
        assert self._recorder.active is None, "allocations still go to a pool"
        return self._group.group_name


class Recorder:
    """The calls of one rank.

    Attributes:
        events: Registrations and collectives, in order.
        pools: All pools, in order.
        communicators: Groups that have run a collective.
        pending: Whether tasks were given to a stream since the device was synchronized.
        active: The pool that allocations of the main thread come from.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pools: list[Pool] = []
        self.communicators: set[str] = set()
        self.pending = False
        self.active: Pool | None = None
        self._thread = threading.get_ident()
        self._streams: set[Stream] = set()

    @property
    def registered(self) -> list[Pool]:
        """The pools that are registered."""
        return [pool for pool in self.pools if pool.registered_with]

    def note(self, group: dist.ProcessGroup, what: str, *details: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        self.events.append(Event(group.group_name, ranks, what, details))

    @contextmanager
    def installed(self) -> Iterator["Recorder"]:
        """Context in which models on the CPU behave as if their groups were NCCL's."""
        _device_constructors()  # torch keeps this list: made below, it would lack torch.empty for good
        replaced = {
            # The settings are accepted. Everything else computes on the CPU.
            "megatron.fsdp.config.torch": SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)),
            "torch.cuda.MemPool": self._make_pool,
            "torch.cuda.use_mem_pool": self._use_pool,
            "torch.cuda.device": lambda device: nullcontext(),
            "torch.cuda.synchronize": self._synchronize,
            "torch.empty": self._allocating(torch.empty, lambda tensor, *args: tensor.untyped_storage()),
            "torch.UntypedStorage.resize_": self._allocating(
                torch.UntypedStorage.resize_, lambda result, storage, *args: storage
            ),
            "megatron.fsdp.comm.context.all_reduce": self._collective("all_reduce", 1)(all_reduce),
            # As on CUDA: tasks use the caller's groups.
            "megatron.fsdp.comm.streams.CpuStream.group": lambda stream, group: group,
            "megatron.fsdp.comm.streams.CpuStream.run": self._run(CpuStream.run),
        }
        with ExitStack() as stack:
            for name, replacement in replaced.items():
                stack.enter_context(patch(name, replacement))
            tensors = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
            stack.enter_context(wrapped(**{name: self._collective(name, count) for name, count in tensors.items()}))
            stack.enter_context(patch.object(Backend, "registers_memory", True))
            stack.enter_context(patch.object(registered_memory, "nccl_backends", self._backends))
            yield self

    def _backends(self, groups: list[dist.ProcessGroup], device: torch.device) -> list[Communicator]:
        return [Communicator(self, group) for group in groups]

    def _make_pool(self, allocator: str) -> Pool:
        assert allocator == Communicator.mem_allocator
        self.pools.append(Pool())
        return self.pools[-1]

    @contextmanager
    def _use_pool(self, pool: Pool, device: torch.device) -> Iterator[None]:
        self.active = pool
        try:
            yield
        finally:
            self.active = None

    def _allocating(self, original: Callable[..., Any], storage_of: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # Only the thread that has entered the context allocates in the pool.
            if self.active is not None and threading.get_ident() == self._thread:
                assert not self.active.registered_with, "torch would register this segment on this rank alone"
                storage = storage_of(result, *args)
                if storage.nbytes():
                    storage._swap_data_ptr_(self.active.allocate(storage.nbytes()))
            return result

        return allocate

    def _synchronize(self, device: torch.device) -> None:
        for stream in self._streams:
            assert stream.finish()
        self.pending = False

    def _run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(stream: Stream, task: Callable[[], None]) -> Any:
            self.pending = True
            self._streams.add(stream)
            return original(stream, task)

        return run

    def _collective(self, name: str, tensors: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> None:
                if name == "all_gather" and args[0].dtype is torch.int64:
                    original(*args)  # rows of CommContext.exchange, whose memory is in no pool
                    return
                group = args[-1]
                self.communicators.add(group.group_name)
                self.note(group, name, *self._places(args[:tensors], group.rank()))
                original(*args)

            return run

        return recorded

    def _places(self, tensors: tuple[torch.Tensor, ...], rank: int) -> list[Any]:
        """Places of the tensors of one collective, the smaller of which may be a slice of the larger."""
        places = [self._place(tensor) for tensor in tensors]
        if len(tensors) == 2:
            shard, whole = sorted((0, 1), key=lambda i: tensors[i].numel())
            if tensors[shard].data_ptr() == tensors[whole].data_ptr() + rank * tensors[shard].nbytes:
                return [places[whole], "in place"]
        return places

    def _place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Window and offset of a tensor; None outside of all windows."""
        for pool in self.registered:
            for number, segment in enumerate(pool.segments):
                offset = tensor.data_ptr() - segment.memory.data_ptr()
                if pool.windows and 0 <= offset < segment.memory.nbytes():
                    return number, offset
        return None


def assert_alike(ranks: list[list[Event]]) -> None:
    """Check that the ranks of every group have registered the same and used the same windows, and that none hangs.

    Args:
        ranks: The events of each rank.
    """
    for group in {event.group for events in ranks for event in events}:
        members = next(event.ranks for events in ranks for event in events if event.group == group)
        found = [[event[2:] for event in ranks[rank] if event.group == group] for rank in members]
        assert all(events == found[0] for events in found), f"ranks {members} differ in {_difference(found)}"
    queues = [[event for event in events if event.what in ("window", "deregister")] for events in ranks]
    while any(queues):
        ready = [q[0] for q in queues if q and all(queues[r] and queues[r][0].group == q[0].group for r in q[0].ranks)]
        assert ready, f"all ranks wait: {[queue[:1] for queue in queues]}"
        for rank in ready[0].ranks:
            queues[rank].pop(0)


def _difference(found: list[list[tuple[Any, ...]]]) -> str:
    for number, events in enumerate(zip(*found, strict=False)):
        if len(set(events)) > 1:
            return f"event {number}: {events}"
    return f"the number of events: {[len(events) for events in found]}"
