"""Counts the bytes of a process's tensors and of its heap, exactly: see heap.c, which is compiled when it is needed."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.options import Skipped
from benchmarks.original_package import FOLDER

SOURCE = Path(__file__).with_suffix(".c")
VARIABLE = "BENCHMARKS_HEAP"


def environment() -> dict[str, str]:
    """Variables with which a process is counted.

    Raises:
        Skipped: There is no C compiler.
    """
    library = FOLDER / "heap.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Skipped("counting bytes needs a C compiler: neither cc nor gcc was found")
        FOLDER.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-lpthread"], check=True)
    return {"LD_PRELOAD": str(library), VARIABLE: str(library)}


class Heap:
    """The counters of this process, relative to when this object was made."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[VARIABLE])
        for name in ("counted_tensors", "counted_tensors_peak", "counted_heap"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._start = self._library.counted_tensors()
        self.reset()

    @property
    def tensors(self) -> int:
        """Bytes of tensors now."""
        return int(self._library.counted_tensors()) - self._start

    @property
    def peak(self) -> int:
        """The most bytes of tensors since :meth:`reset`."""
        return int(self._library.counted_tensors_peak()) - self._start

    @property
    def whole(self) -> int:
        """Bytes of all blocks of the heap now."""
        return int(self._library.counted_heap())

    def reset(self) -> None:
        """Forget earlier peaks."""
        self._library.counted_reset()
