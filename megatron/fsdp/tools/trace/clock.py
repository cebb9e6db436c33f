"""Time marks on the current stream, and the offset between the clocks of ranks.

On the CPU, a mark is a reading of the host's clock. On CUDA, it is an event on the current stream, which costs the host
a few microseconds. Events are converted to times after the step, so that recording does not wait for the device.
"""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 10


class HostClock:
    """Records marks, and converts them to times later, in nanoseconds of this process's ``time.perf_counter_ns``.

    Here, marks are times of the host; subclasses do the same for other devices.

    Attributes:
        error: Upper bound of the error of this clock against the host's, in nanoseconds.
    """

    error = 0

    def mark(self) -> Any:
        """Record a mark at the current position of the current stream."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait until the device has passed all marks."""

    def time(self, mark: Any) -> int:
        """The time at which a mark was passed. Call :meth:`synchronize` first."""
        return int(mark)


class CudaClock(HostClock):
    """A clock whose marks are CUDA events.

    CUDA only measures the time between two events, so the first event is compared to the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        self._first = self.mark()
        self._first.synchronize()
        after = time.perf_counter_ns()
        # The device passed the event at some time between the two readings.
        self._first_time = (before + after) // 2
        self.error = (after - before + 1) // 2

    def mark(self) -> torch.cuda.Event:
        """See :meth:`HostClock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """See :meth:`HostClock.synchronize`."""
        torch.cuda.synchronize(self._device)

    def time(self, mark: torch.cuda.Event) -> int:
        """See :meth:`HostClock.time`. The resolution is half a microsecond."""
        return self._first_time + round(self._first.elapsed_time(mark) * 1e6)


def clock_of(device: torch.device) -> HostClock:
    """The clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class SyncPoint(NamedTuple):
    """One rank's clock before and after an all-reduce, which no rank leaves before all ranks have entered it."""

    before: int
    after: int


class Offset(NamedTuple):
    """The nanoseconds to add to a rank's times to get times on the first rank's clock, and the maximum error."""

    nanoseconds: int
    error: int


def synchronize(group: dist.ProcessGroup, device: torch.device, rounds: int = ROUNDS) -> list[SyncPoint]:
    """Synchronize all ranks of the group a few times and record the clock around each. A collective."""
    sync_points = []
    for _ in range(rounds):
        flag = torch.zeros(1, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter_ns()
        dist.all_reduce(flag, group=group)
        flag.item()  # wait: on CUDA, the host does not wait for the all-reduce
        sync_points.append(SyncPoint(before, time.perf_counter_ns()))
    return sync_points


def offset(first: list[SyncPoint], other: list[SyncPoint]) -> Offset:
    """Compute the offset from another rank's clock to the first rank's.

    At every sync point, each rank leaves after the other one has entered. Both facts bound the offset, as in Cristian's
    algorithm, and the bounds of all sync points hold at the same time.

    Raises:
        ValueError: There are no sync points, or the ranks recorded different numbers of them.
    """
    if not first or len(first) != len(other):
        raise ValueError(
            f"expected the same number of sync points of both ranks, at least one; got {len(first)} and {len(other)}"
        )
    least = max(f.before - o.after for f, o in zip(first, other, strict=True))
    most = min(f.after - o.before for f, o in zip(first, other, strict=True))
    # All processes of a machine read the same clock. If the bounds allow for an offset of zero, it is zero: the clocks
    # of two machines count from their boot times, which are never that close.
    middle = 0 if least <= 0 <= most else (least + most) // 2
    return Offset(middle, max(most - middle, middle - least) if middle else 0)
