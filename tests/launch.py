"""Starts a script on several ranks, as a user does."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(
    command: Iterable[str], ranks: int, timeout: float, packages: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script with its arguments, or ``-m`` and a module, under torchrun.

    Args:
        command: What torchrun runs.
        ranks: How many of it, with one thread each.
        timeout: Seconds.
        packages: A folder of packages that replace installed ones.
    """
    path = os.pathsep.join(filter(None, [packages, str(ROOT), os.environ.get("PYTHONPATH")]))
    # Buffered, so that a rank writes a line as a whole: two of them share the output.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
