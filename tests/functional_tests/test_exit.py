"""A script that ends right after a step ends cleanly: nothing of gloo's outlives Python."""

from pathlib import Path

import pytest
import torch

from tests.launch import torchrun
from tests.slow import all_but_slow

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from megatron_fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[nn.Linear])
for _ in range(2):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.module[0].weight.full_tensor()
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo, in host memory")
@pytest.mark.parametrize("last", all_but_slow(["", "destroy"], "destroy"))
def test_a_script_ends_cleanly(last: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # Every other run was aborted where a thread of gloo's freed a tensor after Python's end.
    for _ in range(3):
        run = torchrun([str(script), last], ranks=2, timeout=200)
        assert run.returncode == 0, run.stdout + run.stderr
