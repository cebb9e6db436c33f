"""scripts/torch_cases.py runs tests that are written for torch's fully_shard with this engine's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

# As torch writes its tests: ranks are processes or threads.
CASES = """
import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread, check_sharded_parity


class TestProcesses(FSDPTest):
    world_size = 2

    def test_parity(self):
        plain = torch.nn.Linear(3, 5)
        for parameter in plain.parameters():
            dist.broadcast(parameter.data, 0)
        sharded = torch.nn.Linear(3, 5)
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded)
        assert type(sharded).__mro__[1].__module__.startswith(%r)
        around = torch.nn.Sequential(sharded)
        check_sharded_parity(self, plain, around, prefixes_to_ignore=("0.",))

    def test_error(self):
        raise ValueError("of a rank")

    @unittest.skip("by itself")
    def test_skips(self):
        pass


class TestThreads(FSDPTestMultiThread):
    world_size = 2

    def test_ranks(self):
        assert dist.get_world_size() == 2

    def test_waits(self):
        if self.rank == 0:
            dist.barrier()
"""


def _run(folder: Path, *arguments: str, fails: bool = False) -> list[str]:
    command = [sys.executable, "scripts/torch_cases.py", str(folder), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 * fails, done.stderr
    return (done.stderr if fails else done.stdout).splitlines()


def test_cases_pass_fail_and_skip(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(CASES % "megatron.fsdp.fsdp2")
    *lines, counts = _run(tmp_path, "--whole", "--seconds", "60")
    found = {line.split()[1].split(".")[-1]: line for line in lines}
    assert {name: line.split()[0] for name, line in found.items()} == {
        "test_parity": "passed",
        "test_error": "failed",
        "test_skips": "skipped",
        "test_ranks": "passed",
        "test_waits": "failed",
    }
    assert "ValueError: of a rank" in found["test_error"] and "by itself" in found["test_skips"]
    assert counts.endswith(": 2 passed, 2 failed, 1 skipped, of 5")


def test_without_the_folder(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        assert f"{folder} has no test_*.py" in _run(folder, fails=True)[-1]


@pytest.mark.slow
@pytest.mark.skipif("TORCH_FSDP_TESTS" not in os.environ, reason="TORCH_FSDP_TESTS: the folder of torch's FSDP2 tests")
def test_torchs_own_cases() -> None:
    """Those that the reference counts, at the least."""
    *lines, counts = _run(Path(os.environ["TORCH_FSDP_TESTS"]), "-k", "test_fully_shard_state.")
    assert lines and all(line.startswith("passed") for line in lines), counts
