"""``python -m megatron.fsdp.selftest`` passes where the engine is right, and finds what is wrong where it is not."""

from pathlib import Path

import pytest

from tests.launch import Ended, printed, torchrun

INJECTED = """
import argparse, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.fsdp.tools import selftest
from tests.functional_tests import injected

kind, rank = sys.argv[1], int(os.environ["RANK"])
chosen = selftest.checks()
chosen = {name: chosen[name] for name in ("collectives", "ZeRO-3, optim_grads_params, fp32", "checkpoint")}

def fail(machine):
    if rank == 1:
        raise ValueError("one rank alone")
    dist.all_reduce(torch.ones(1))

def hang(machine):
    time.sleep(60 * rank)
    return "right"

if kind in ("fail", "hang"):
    chosen = {"collectives": chosen["collectives"], kind: {"fail": fail, "hang": hang}[kind]}
else:
    getattr(injected, kind)()
options = argparse.Namespace(out=Path("out.txt"), folder=".", limit=8 if kind == "hang" else 60, cpu=True)
sys.exit(selftest.run(options, chosen))
"""


def _injected(kind: str, folder: Path) -> Ended:
    (folder / "injected_test.py").write_text(INJECTED)
    return torchrun(["injected_test.py", kind], 2, folder=folder)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_passes(tmp_path: Path, ranks: int) -> None:
    out = printed(torchrun(["-m", "megatron.fsdp.selftest", "--cpu", "--out", "out.txt"], ranks, folder=tmp_path))
    of_several, of_gpus = 2, 2
    skipped = of_gpus + (of_several if ranks == 1 else 0)
    assert out.count("\nskipped ") == skipped and "FAILED" not in out
    assert f"{skipped} skipped ({ranks} rank" in out.splitlines()[-1], out
    report = (tmp_path / "out.txt").read_text()
    assert report.startswith("PASSED: ") and "torch: 2." in report and f"rank {ranks - 1}: " in report


@pytest.mark.merge
@pytest.mark.parametrize("kind", ["missed_reduction", "wrong_divisor", "stale_weights"])
def test_errors_of_the_engine_are_found(tmp_path: Path, kind: str) -> None:
    ended = _injected(kind, tmp_path)
    assert ended.returncode == 1
    assert "FAILED: ZeRO-3, optim_grads_params, fp32" in ended.stdout and "expected [" in ended.stdout, ended.stdout
    assert "\nok      collectives" in "\n" + ended.stdout


@pytest.mark.merge
@pytest.mark.parametrize(
    ("kind", "message"), [("fail", "ValueError: one rank alone"), ("hang", "rank 1: hang did not end within 8 s")]
)
def test_one_rank_that_fails_or_hangs(tmp_path: Path, kind: str, message: str) -> None:
    ended = _injected(kind, tmp_path)
    assert ended.returncode == 1 and f"FAILED: {kind} (2 ranks" in ended.stdout, ended.stdout + ended.stderr
    assert message in ended.stdout and message in (tmp_path / "out.txt").read_text()
