"""Trains on several ranks where only torch is installed; a second run resumes from the first one's checkpoint.

    torchrun --nproc-per-node 2 engine_alone.py CHECKPOINT

Rank 0 prints the losses of its three steps as JSON.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard


def main(checkpoint: Path) -> None:
    """Train three steps, from the checkpoint if there is one, and save it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
    )
    if checkpoint.exists():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    batch, losses = torch.linspace(-1, 1, 32, dtype=torch.bfloat16).view(4, 8), []
    for _ in range(3):
        loss = (model(batch).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
