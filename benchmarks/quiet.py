"""Tells how much CPU other processes used while something was measured."""

import os
import time
from collections.abc import Callable

import psutil

# Cores that others may use while a turn is timed.
LIMIT = 0.2


class Quiet:
    """Watches the machine between :meth:`begin` and :meth:`end`.

    Args:
        own: CPU seconds that the suite's own processes have used so far.
    """

    def __init__(self, own: Callable[[], float]) -> None:
        self._own = own
        self._before = (0.0, 0.0, 0.0)

    def begin(self) -> None:
        """Start to watch."""
        self._before = self._now()

    def end(self) -> float:
        """Cores that other processes used since :meth:`begin`, on average."""
        return cores_of_others(self._before, self._now())

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # What the hypervisor took away counts as others'. Interrupts do not: the ranks' own packets make them.
        busy = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        this = os.times()
        return time.monotonic(), busy, self._own() + this.user + this.system


def cores_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """From (clock, busy CPU seconds of the machine, CPU seconds of the suite) before and after."""
    elapsed, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (busy - own) / elapsed) if elapsed > 0 else 0.0
