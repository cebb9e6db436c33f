"""Compiles the suite's C sources on first use, into the folder that git ignores."""

import shutil
import subprocess
from pathlib import Path

from benchmarks.options import Skipped
from benchmarks.original_package import FOLDER


def compiled(source: Path, *flags: str, suffix: str = "") -> Path:
    """The compiled file of ``source``; compiles it if it is missing or older than its source.

    Raises:
        Skipped: There is no C compiler.
    """
    target = FOLDER / (source.stem + suffix)
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Skipped(f"{source.name} needs a C compiler: neither cc nor gcc was found")
        FOLDER.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O2", *flags, "-o", target, source, "-lpthread"], check=True)
    return target
