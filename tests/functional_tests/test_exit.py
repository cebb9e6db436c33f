"""A script that ends right after a step exits cleanly: no thread of gloo uses a tensor after Python's shutdown."""

import time
from pathlib import Path

import pytest
import torch

from tests.launch import torchrun
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo, in host memory")
SKIPPING = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group
from megatron_fsdp import fully_shard
from megatron.fsdp.comm.streams import CpuStream

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, skip):
        for i, layer in enumerate(self.layers):
            if not (skip and i == 2):
                x = layer(x)
        return x

run = CpuStream.run
# Delay the communication of the rank that skips a layer, so that it is still in flight when the rank exits.
CpuStream.run = lambda self, task: run(self, lambda: (time.sleep(0.05 * rank), task())[1])
model = Model()
model, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[nn.Linear])
for step in range(3):
    model(torch.randn(4, 32), skip=rank == 1).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(torch.randn(4, 32), skip=rank == 1)
if how == "raise" and rank == 1:
    raise ValueError("from the user's code")
if how == "destroy":
    destroy_process_group()
    os._exit(0)  # like processes that multiprocessing has forked
"""


@pytest.mark.parametrize("how", all_but_slow(["destroy", "exit"], "destroy"))
def test_pending_communication_is_finished_at_exit(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SKIPPING)
    run = torchrun([script, how], ranks=2)
    assert run.returncode == 0 and "Error" not in run.stderr, run.stdout + run.stderr


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_ranks_soon(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SKIPPING)
    begin = time.monotonic()
    run = torchrun([str(script), "raise"], ranks=2, timeout=200)
    assert run.returncode != 0 and "ValueError: from the user's code" in run.stderr
    assert time.monotonic() - begin < 100
