"""Streams and events of the simulated device, in virtual time.

The host spends one unit of time on each launch, and the device a number of units on each kernel. A stream runs its
kernels one after another, and an event happens when the stream gets there.
"""

import itertools
import threading
from types import TracebackType
from typing import Any

import torch

from tests.simulated.checker import HOST, Checker


class HostWait(AssertionError):
    """The host would wait for the device where it must not."""


class CaptureError(AssertionError):
    """CUDA would refuse to capture this, or a replay would not repeat it."""


class Timeline:
    """The host's clock, and what makes the host wait.

    Args:
        checker: Learns of every wait.
        kernel_time: Time of a kernel on the device; a launch takes the host 1.

    Attributes:
        now: Time of the host.
        forbids_waits: Raise an error where the host would wait for the device.
    """

    def __init__(self, checker: Checker, kernel_time: float) -> None:
        self.checker = checker
        self.kernel_time = kernel_time
        self.now = 0.0
        self.forbids_waits = False
        self.numbers = itertools.count()
        self.streams: list[Stream] = []
        self._of_thread = threading.local()
        Stream(self)

    @property
    def current(self) -> "list[Stream]":
        """The current stream of this thread, the last of those that it made current. At first it is the default one."""
        if not hasattr(self._of_thread, "current"):
            self._of_thread.current = [self.streams[0]]
        found: list[Stream] = self._of_thread.current
        return found

    @staticmethod
    def before_query() -> None:
        """Called before an event is queried."""

    def wait_until(self, time: float, event: int, what: str) -> None:
        """Let the host wait for an event."""
        if self.forbids_waits:
            raise HostWait(f"{what} makes the host wait for the device")
        self.now = max(self.now, time)
        self.checker.wait(HOST, event)

    def synchronize(self, what: str = "torch.cuda.synchronize") -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            stream.synchronize(what)


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, timeline: Timeline) -> None:
        self.number = len(timeline.streams)
        self.end = 0.0
        self._timeline = timeline
        timeline.streams.append(self)
        timeline.checker.create_stream(self.number)

    @property
    def cuda_stream(self) -> int:
        """The number of the stream."""
        return self.number

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    def run_kernel(self) -> None:
        """Add a kernel's time."""
        self._timeline.now += 1
        self.end = max(self.end, self._timeline.now) + self._timeline.kernel_time

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, or a new one."""
        event = event or Event(self._timeline)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Make later kernels wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """Make later kernels wait for the present ones of another stream."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Whether all kernels have run. A host that asks again and again gets on meanwhile."""
        self._timeline.now += 1
        return self.end <= self._timeline.now

    def synchronize(self, what: str = "Stream.synchronize") -> None:
        """Make the host wait."""
        self.record_event().synchronize(what)


class Event:
    """Stands for ``torch.cuda.Event``. ``query`` puts nothing in an order: the engine must not rely on it.

    Attributes:
        is_captured: It was recorded in a capture, and has happened only there.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._number = next(timeline.numbers)
        self._time: float | None = None
        self.is_captured = False

    @property
    def is_recorded(self) -> bool:
        """Whether the event stands for anything. One that was never recorded can be waited for and does nothing."""
        return self._time is not None

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all kernels that the stream has so far."""
        stream = stream or self._timeline.current[-1]
        self._time = max(stream.end, self._timeline.now)
        self._timeline.checker.record(self._number, stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later kernels of the stream wait."""
        if self.is_captured and not torch.cuda.is_current_stream_capturing():
            raise CaptureError("a stream waits for an event of a capture that has ended")
        stream = stream or self._timeline.current[-1]
        if self._time is not None:
            stream.end = max(stream.end, self._time)
            self._timeline.checker.wait(stream.number, self._number)

    def query(self) -> bool:
        """Whether the kernels have run."""
        self._timeline.before_query()
        self._timeline.now += 1
        return self._time is None or self._time <= self._timeline.now

    def synchronize(self, what: str = "Event.synchronize") -> None:
        """Make the host wait."""
        if self._time is not None:
            self._timeline.wait_until(self._time, self._number, what)

    def elapsed_time(self, end: "Event") -> float:
        """Virtual time between two events."""
        assert self._time is not None and end._time is not None
        return end._time - self._time


class StreamContext:
    """Stands for ``torch.cuda.stream``: makes a stream current."""

    def __init__(self, timeline: Timeline, stream: Stream | None) -> None:
        self._timeline = timeline
        self._stream = stream

    def __enter__(self) -> None:
        self._timeline.current.append(self._stream or self._timeline.current[-1])

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        self._timeline.current.pop()
