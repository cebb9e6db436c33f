"""Starts programs as a user does, and returns what they print."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Ended = subprocess.CompletedProcess[str]


def start(
    command: Iterable[object],
    timeout: float = 280,
    folder: Path = ROOT,
    packages: str = "",
    given: str | None = None,
    **variables: str,
) -> Ended:
    """Run a command, with one thread for each of its processes.

    Args:
        command: The program and its arguments. Programs in the folder of this Python come first in PATH.
        timeout: Seconds.
        folder: Where it runs.
        packages: A folder of packages that replace installed ones.
        given: What it reads from stdin.
        variables: Of the environment, in addition to those of this process.
    """
    words = [str(word) for word in command]
    variables = {**environment(packages), **variables}
    return subprocess.run(
        words, cwd=folder, env=variables, input=given, capture_output=True, text=True, timeout=timeout
    )


def environment(packages: str = "") -> dict[str, str]:
    """The variables of a program: one thread, this Python's programs and this project's packages first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    packages = os.pathsep.join(filter(None, [packages, str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": packages}


def python(*words: object, **options: Any) -> Ended:
    """Run Python with these arguments. The options are those of :func:`start`."""
    return start([sys.executable, *words], **options)


def torchrun(command: Iterable[object], ranks: int, **options: Any) -> Ended:
    """Run a script with its arguments, or ``-m`` and a module, on several ranks. Options are those of :func:`start`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    # Buffered, so that a rank writes a line as a whole: two of them share the output.
    return python(*launcher, *command, PYTHONUNBUFFERED="", **options)


def printed(ended: Ended) -> str:
    """The output of a program that has to succeed."""
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def tree_of(process: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(each for child in children for each in tree_of(int(child)))]
