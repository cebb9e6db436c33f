"""Measures how much CPU other processes use during a measurement."""

import os
import time
from collections.abc import Callable

import psutil

# Cores that other processes may use during a timed turn.
LIMIT = 0.2


class Quiet:
    """Measures the CPU time of other processes between :meth:`begin` and :meth:`end`.

    Args:
        own: Returns the CPU seconds that the suite's processes have used so far.
    """

    def __init__(self, own: Callable[[], float]) -> None:
        self._own = own
        self._before = (0.0, 0.0, 0.0)

    def begin(self) -> None:
        """Start the measurement."""
        self._before = self._now()

    def end(self) -> float:
        """Average number of cores that other processes have used since :meth:`begin`."""
        return cores_of_others(self._before, self._now())

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # Time stolen by the hypervisor counts as other processes. Interrupts do not, as the ranks' packets cause them.
        busy = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        this = os.times()
        return time.monotonic(), busy, self._own() + this.user + this.system


def cores_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Cores used by others, given (clock, CPU seconds of the machine, CPU seconds of the suite) before and after."""
    elapsed, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (busy - own) / elapsed) if elapsed > 0 else 0.0
