"""When a rank dies or diverges, the remaining ranks raise an error that reports what every rank was doing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.real_loop import free_port
from tests.launch import ROOT
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo on the CPU")
SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from megatron_fsdp import fully_shard

mode, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30 if mode in ("other", "slow") else 8))
model = nn.Sequential(*(nn.Linear(8, 8 + 8 * (i == 2)) for i in range(3)))
model, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[nn.Linear])
layers = list(model.module)

def die(*unused):
    os._exit(9)

def evaluate():
    time.sleep(8)

for step in range(4):
    lost = rank == 1 and step == 2
    if lost and mode == "forward":
        layers[1].register_forward_hook(die)
    loss = model(torch.ones(2, 8)).sum()
    if lost and mode == "backward":
        die()
    if lost and mode == "slow":
        evaluate()
    if lost and mode == "late":
        time.sleep(120)
    loss.backward()
    if lost and mode == "step":
        die()
    if lost and mode == "other":
        with torch.no_grad():
            model(torch.ones(2, 8))
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def run(mode: str, folder: Path, **variables: str) -> list[tuple[int, str]]:
    """Run both ranks without a launcher, which would kill the other rank; return their exit codes and outputs."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), mode],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        outputs.append(ranks[0].communicate(timeout=100)[0])
        if mode == "late":
            ranks[1].kill()
        outputs.append(ranks[1].communicate(timeout=100)[0])
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("mode", all_but_slow(["forward", "backward", "step", "late"], "backward"))
def test_a_lost_rank_is_reported(mode: str, tmp_path: Path) -> None:
    (code, output), _ = run(mode, tmp_path)
    assert code not in (0, 9) and "trained" not in output, output
    assert "Positions of the ranks:" in output, output
    other = "rank 1: last issued" if mode == "late" else "rank 1: no answer"
    assert "rank 0: last issued" in output and other in output, output
    assert "train.py:" in output and output.index("Positions of the ranks:") < output.index("The error was:"), output


@pytest.mark.slow
def test_the_first_difference_is_reported(tmp_path: Path) -> None:
    results = run("other", tmp_path)
    assert all(code for code, _ in results), results
    for _, output in results:
        assert "The ranks have issued different operations" in output and "They first differ at number" in output, (
            output
        )


@pytest.mark.slow
def test_a_long_wait_is_reported_meanwhile(tmp_path: Path) -> None:
    """Rank 1 spends some time in a function that rank 0 does not call."""
    results = run("slow", tmp_path, MEGATRON_FSDP_REPORT_AFTER="3")
    assert [code for code, _ in results] == [0, 0], results
    assert all("trained" in output for _, output in results)
    (report,) = [output for _, output in results if "no communication has ended for 3 s" in output]
    assert "in evaluate, which" not in report.split("rank 1:")[0] and "in evaluate" in report, report
    assert "waits for: unshard" in report and "bytes" in report, report
