"""CUDA graphs of the simulated device: the kernels of a capture, which a replay runs again on the same memory.

A replay runs kernels and no Python, so nothing that Python did during the capture is done again. A capture on CUDA runs
no kernels. Here it runs them, because Python needs tensors with values, and then restores all memory.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simulated.allocator import Block
from tests.simulated.device import SimulatedDevice
from tests.simulated.memory import FreedMemory
from tests.simulated.streams import CaptureError, Event, Stream, Timeline


class SimulatedGraph:
    """Stands for ``torch.cuda.CUDAGraph``.

    Args:
        device: Runs the kernels.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._pool = next(device.timeline.numbers) + 1
        self._kernels: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record the kernels of the block. Stands for ``torch.cuda.graph``, on the current stream: the host first waits
        for the device.

        Raises:
            CaptureError: Another stream's kernels are not part of the capture or are not waited for at its end, or an
                event is queried, also by another thread that does not ignore captures.
            HostWait: The host would wait for the device.
        """
        device = self._device
        device.timeline.synchronize()
        rules = _Rules(device.timeline.current[-1], device.ignoring)
        with _disable_current_modes():  # not a copy that the host would wait for
            saved = [(storage, storage.clone()) for storage in device.memory.on_device()]
        before = device.on_kernel
        capturing = patch.multiple(torch.cuda, is_initialized=_yes, is_current_stream_capturing=_yes)
        with rules.enforced(), device.no_host_wait(), capturing:
            device.on_kernel, device.memory.pool = self._record, self._pool
            try:
                yield
            finally:
                device.on_kernel, device.memory.pool = before, 0
        rules.check_joined()
        with _disable_current_modes():
            for storage, content in saved:
                if storage.nbytes() == content.nbytes():
                    storage.copy_(content)

    def _record(self, stream: int, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        # The references stand for the graph's own memory: nothing else gets it while the graph lives.
        self._kernels.append((function, *tree_map_only(torch.Tensor, self._address, (args, kwargs, result))))

    def _address(self, tensor: torch.Tensor) -> "torch.Tensor | _Outside":
        block = self._device.memory.block_of(tensor)
        return tensor if block is None or block.pool == self._pool else _Outside(tensor, block)

    def _at(self, outside: "_Outside") -> torch.Tensor:
        with _disable_current_modes():
            tensor = outside.tensor()
        if tensor is None or self._device.memory.block_of(tensor) is not outside.block:
            raise FreedMemory("a replay uses memory that was allocated before the capture and has been freed")
        return tensor

    @torch.no_grad()
    def replay(self) -> None:
        """Run the kernels again. Results go to the memory that they were in.

        Raises:
            FreedMemory: Memory that is not the graph's own has been freed.
        """
        for function, *kept in self._kernels:
            args, kwargs, result = tree_map_only(_Outside, self._at, kept)
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(new, torch.Tensor):
                    if new.untyped_storage()._cdata != old.untyped_storage()._cdata:
                        old.copy_(new)
                elif isinstance(new, torch.ScriptObject) and function.namespace == "c10d":
                    dist.Work.unbox(new).wait()

    def __len__(self) -> int:
        return len(self._kernels)


class _Outside:
    """A tensor in memory from before the capture. The graph knows the address, and does not keep the memory."""

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        self.block = block
        self._storage = weakref.ref(tensor.untyped_storage())
        self._view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> torch.Tensor | None:
        """The tensor, if there is its storage."""
        storage, (dtype, *where) = self._storage(), self._view
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *where)


def _yes() -> bool:
    return True


class _Rules:
    """The streams of a capture: its first stream, and those that wait for an event of the capture.

    Every stream has a clock: how many operations of each stream its next kernel comes after.
    """

    def __init__(self, origin: Stream, ignoring: set[threading.Thread]) -> None:
        self._origin = origin
        self._thread, self._ignoring = threading.get_ident(), ignoring
        self._invalid = False
        self._clocks: dict[int, dict[int, int]] = {origin.number: {origin.number: 0}}
        self._events: dict[Event, dict[int, int]] = {}

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Context in which streams and events follow the rules."""
        run, record, wait = Stream.run_kernel, Event.record, Event.wait

        def run_kernel(stream: Stream) -> None:
            if stream.number not in self._clocks:
                raise CaptureError(f"a kernel runs on stream {stream.number}, which is not part of the capture")
            self._clocks[stream.number][stream.number] += 1
            run(stream)

        def record_event(event: Event, stream: Stream | None = None) -> None:
            stream = stream or self._origin
            record(event, stream)
            event.is_captured = stream.number in self._clocks
            if event.is_captured:
                self._events[event] = dict(self._clocks[stream.number])

        def wait_event(event: Event, stream: Stream | None = None) -> None:
            stream = stream or self._origin
            wait(event, stream)
            if event in self._events:
                clock = self._clocks.setdefault(stream.number, {stream.number: 0})
                clock.update({key: max(clock.get(key, 0), n) for key, n in self._events[event].items()})
                clock[stream.number] += 1
            elif stream.number in self._clocks and event.is_recorded:
                raise CaptureError("a stream of the capture waits for an event from before the capture")

        methods = {"record": record_event, "wait": wait_event}
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(Stream, "run_kernel", run_kernel))
            for name, method in methods.items():
                stack.enter_context(patch.object(Event, name, method))
            stack.enter_context(patch.object(Timeline, "before_query", self._query))
            yield

    def _query(self) -> None:
        """Called before a thread queries an event."""
        if threading.current_thread() not in self._ignoring:
            # The mode of a capture is "global" unless torch is told otherwise.
            self._invalid |= threading.get_ident() != self._thread
            raise CaptureError("an event is queried during a capture")

    def check_joined(self) -> None:
        """Raise if a stream has operations that the first stream does not wait for, or the capture was invalidated."""
        if self._invalid:
            raise CaptureError("another thread has queried an event during the capture")
        reached = self._clocks[self._origin.number]
        late = [number for number, clock in self._clocks.items() if reached.get(number, 0) < clock[number]]
        if late:
            raise CaptureError(f"streams {late} are not joined at the end of the capture")
