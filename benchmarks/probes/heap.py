"""Counts the exact bytes of a process's tensors and of its heap with heap.c, which is compiled on first use."""

import ctypes
import os
from pathlib import Path

from benchmarks.compiled import compiled

SOURCE = Path(__file__).with_suffix(".c")
VARIABLE = "BENCHMARKS_HEAP"


def environment() -> dict[str, str]:
    """Environment variables that enable counting in a process.

    Raises:
        Skipped: There is no C compiler.
    """
    library = compiled(SOURCE, "-shared", "-fPIC", suffix=".so")
    return {"LD_PRELOAD": str(library), VARIABLE: str(library)}


class Heap:
    """The counters of this process, relative to the creation of this object."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        for name in ("counted_tensors", "counted_tensors_peak", "counted_heap"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._start = self._library.counted_tensors()
        self.reset()

    @property
    def tensors(self) -> int:
        """Current bytes of tensors."""
        return int(self._library.counted_tensors()) - self._start

    @property
    def peak(self) -> int:
        """Peak bytes of tensors since :meth:`reset`."""
        return int(self._library.counted_tensors_peak()) - self._start

    @property
    def whole(self) -> int:
        """Current bytes of all heap blocks."""
        return int(self._library.counted_heap())

    def reset(self) -> None:
        """Reset the peak."""
        self._library.counted_reset()
