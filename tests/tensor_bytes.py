"""Counts the live bytes of all CPU tensors of a process, exactly: see tensor_bytes.c."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile the counter; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("counting tensor bytes needs a C compiler")
    library = folder / "tensor_bytes.so"
    source = FOLDER / "tensor_bytes.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def call_counted(library: Path, function: str, *arguments: Any) -> Any:
    """Call ``module:function(*arguments)`` in a process whose tensors are counted; returns what it returns, as JSON."""
    module, name = function.split(":")
    code = f"import json, {module} as m; print('RESULT', json.dumps(m.{name}(*json.loads({json.dumps(arguments)!r}))))"
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "TENSOR_BYTES": str(library)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=FOLDER.parent, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.rsplit("RESULT ", 1)[1])


class TensorBytes:
    """The counter of this process, relative to when it is made."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["TENSOR_BYTES"])
        for name in ("tensor_bytes_live", "tensor_bytes_peak"):
            getattr(self._library, name).restype = ctypes.c_longlong
        self._start = self._library.tensor_bytes_live()

    def live(self) -> int:
        """Bytes that are held now."""
        return self._library.tensor_bytes_live() - self._start

    def peak(self) -> int:
        """The most that was held since ``reset``."""
        return self._library.tensor_bytes_peak() - self._start

    def reset(self) -> None:
        """Forget earlier peaks."""
        self._library.tensor_bytes_reset()
