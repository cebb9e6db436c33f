"""Comparison of clocks between ranks, and times of mocked CUDA events."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.tools.trace.clock import CudaClock, HostClock, Offset, SyncPoint, clock_of, offset, synchronize
from tests.models import device
from tests.ranks import RankPool


def test_offset_is_the_middle_of_the_interval_that_all_sync_points_allow() -> None:
    # The other clock is ahead by 1000. At the first sync point the first rank waits, at the second the other does.
    first = [SyncPoint(0, 110), SyncPoint(250, 260)]
    other = [SyncPoint(1100, 1112), SyncPoint(1200, 1262)]
    # The bounds of the offset are 250 - 1262 and 110 - 1100.
    assert offset(first, other) == Offset(-1001, 11)


def test_clocks_of_one_machine_are_one() -> None:
    assert offset([SyncPoint(0, 10)], [SyncPoint(2, 12)]) == Offset(0, 0)
    assert offset([SyncPoint(5, 9)], [SyncPoint(5, 9)]) == Offset(0, 0)


def test_offset_needs_sync_points() -> None:
    with pytest.raises(ValueError, match="the same number of sync points of both ranks, at least one; got 0 and 0"):
        offset([], [])
    with pytest.raises(ValueError, match="got 1 and 2"):
        offset([SyncPoint(0, 1)], [SyncPoint(0, 1), SyncPoint(2, 3)])


def _shifted(nanoseconds: int) -> list[SyncPoint]:
    """Sync points of two ranks, the second of which has a shifted clock."""
    ahead = nanoseconds * dist.get_rank()
    return [SyncPoint(m.before + ahead, m.after + ahead) for m in synchronize(dist.group.WORLD, device())]


def test_sync_points_give_the_offset(ranks: RankPool) -> None:
    first, other = ranks.run(2, _shifted, 10**12)
    found, error = offset(first, other)
    assert abs(found + 10**12) <= error < 20e6


class _Event:
    """A mocked CUDA event that is passed one millisecond after the previous one."""

    count = itertools.count()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.passed: int | None = None

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.passed = next(self.count)

    def synchronize(self) -> None:
        assert self.passed is not None

    def elapsed_time(self, other: "_Event") -> float:
        return float(other.passed - self.passed)


def test_events_become_times(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    before = time.perf_counter_ns()
    clock = clock_of(torch.device("cuda", 0))
    after = time.perf_counter_ns()
    assert isinstance(clock, CudaClock)
    first, second = clock.mark(), clock.mark()
    clock.synchronize()
    assert len(waited) == 2
    assert clock.time(second) - clock.time(first) == 10**6
    assert before <= clock.time(first) - 10**6 <= after
    assert 0 <= clock.error <= after - before


def test_marks_on_the_host_are_times() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before, mark, after = time.perf_counter_ns(), clock.mark(), time.perf_counter_ns()
    assert before <= clock.time(mark) <= after
