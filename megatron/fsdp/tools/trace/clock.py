"""When things happen: marks on whatever stream is current, and one clock for all ranks.

On a CPU a mark is a reading of the host's clock. On CUDA it is an event on the current stream, which says when the
device came there and costs the host a few microseconds; events become times after the step, in one go.
"""

import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 10


class Clock(ABC):
    """Makes marks now and times of them later. Times are nanoseconds of ``time.perf_counter_ns`` of this process.

    Attributes:
        error: By how many nanoseconds all times of this clock may be off against the host's.
    """

    error = 0

    @abstractmethod
    def mark(self) -> Any:
        """A mark at the current place of the current stream."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every mark so far has been passed."""

    @abstractmethod
    def time(self, mark: Any) -> int:
        """When a mark was passed. Only after :meth:`settle`."""


class HostClock(Clock):
    """A mark is the time itself."""

    def mark(self) -> int:
        """See :meth:`Clock.mark`."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """See :meth:`Clock.settle`."""

    def time(self, mark: int) -> int:
        """See :meth:`Clock.time`."""
        return mark


class CudaClock(Clock):
    """A mark is a CUDA event. Events only know how far they are apart: one of them is compared to the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._first = self.mark()
        self._first.synchronize()
        after = time.perf_counter_ns()
        # The device passed the event somewhere between the two readings.
        self._first_time = (before + after) // 2
        self.error = (after - before + 1) // 2

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """See :meth:`Clock.settle`."""
        torch.cuda.synchronize(self._device)

    def time(self, mark: torch.cuda.Event) -> int:
        """See :meth:`Clock.time`. Events are apart in milliseconds, to half a microsecond."""
        return self._first_time + round(self._first.elapsed_time(mark) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Meeting(NamedTuple):
    """Readings of one rank's clock around an all-reduce: no rank is through it before every rank has come to it."""

    before: int
    after: int


class Offset(NamedTuple):
    """What to add to a rank's times to have them on the first rank's clock, in nanoseconds, and the most it is off."""

    nanoseconds: int
    error: int


def meet(group: dist.ProcessGroup, device: torch.device, rounds: int = ROUNDS) -> list[Meeting]:
    """Meet all ranks of the group a few times. The first meeting, which may have to wait for a rank, counts too."""
    meetings = []
    for _ in range(rounds):
        flag = torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        dist.all_reduce(flag, group=group)
        flag.item()  # on CUDA the all-reduce itself does not stop the host
        meetings.append(Meeting(before, time.perf_counter_ns()))
    return meetings


def offset(first: list[Meeting], other: list[Meeting]) -> Offset:
    """How to bring another rank's times onto the first rank's clock.

    At every meeting, the first rank left after the other had come, and the other left after the first had come. Each
    is a bound for the offset, as in Cristian's algorithm; the bounds of all meetings hold at once.

    Raises:
        ValueError: There was no meeting.
    """
    if not first or len(first) != len(other):
        raise ValueError(f"expected the same meetings, at least one, of both ranks; got {len(first)} and {len(other)}")
    least = max(f.before - o.after for f, o in zip(first, other, strict=True))
    most = min(f.after - o.before for f, o in zip(first, other, strict=True))
    # The processes of one machine read one clock. Bounds that allow for that say so: clocks of two machines, which
    # count from when each was started, do not get as close by chance.
    middle = 0 if least <= 0 <= most else (least + most) // 2
    return Offset(middle, max(most - middle, middle - least) if middle else 0)
