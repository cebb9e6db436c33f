"""Measures how much CPU other processes use during a measurement."""

import os
import time
from collections.abc import Callable
from pathlib import Path

# Cores that other processes may use during a timed turn.
LIMIT = 0.2
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


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
        # These are user, nice, system, idle, iowait, irq, softirq and steal. Time stolen by the hypervisor counts as
        # other processes. Interrupts do not, as the ranks' packets cause them.
        ticks = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = (sum(ticks[:3]) + ticks[7]) / TICKS_PER_SECOND
        this = os.times()
        return time.monotonic(), busy, self._own() + this.user + this.system


def cores_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Cores used by others, given (clock, CPU seconds of the machine, CPU seconds of the suite) before and after."""
    elapsed, busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (busy - own) / elapsed) if elapsed > 0 else 0.0


def cpu_seconds(process: int) -> float:
    """CPU seconds that a process has used; 0 if it has ended."""
    try:
        # The fields after the name, which is in parentheses and may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
