"""Trains with Ray Train on sharded weights. After the failure of a worker, or started again, it resumes.

python ray_train.py runs --steps 6 --workers 2
"""

import argparse
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.newest import newest_complete_checkpoint
from megatron_fsdp import fully_shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="on a file system that all workers share")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--fail-at", type=int, default=-1, help="step at which one worker fails, once")


def train(config: dict) -> None:
    """Run on every worker. Ray has made the process group, and chosen the GPU."""
    folder, device = Path(config["folder"], "checkpoints"), ray.train.torch.get_device()
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(*layers, nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[nn.TransformerEncoderLayer])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    # Ray may run workers on other machines after a failure: all of them look in the shared folder.
    if (newest := newest_complete_checkpoint(folder)) is not None:
        load(state, newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if dist.get_rank() == 0:
            print(f"resumes from {newest.name}", flush=True)
    for step in range(state["step"], config["steps"]):
        x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(step)).to(device)
        mine = x.tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = (model(mine) - mine.sum(-1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if step % 2:  # the workers train in a thread, where signals cannot be handled: save by steps
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            save(saved, folder / f"step_{step + 1}")
        if step == config["fail_at"] and newest is None and dist.get_rank() == 1:
            raise RuntimeError("a worker fails")
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.5f}", flush=True)
        ray.train.report({"loss": mean.item(), "step": step})


if __name__ == "__main__":
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "folder": str(args.folder.resolve())},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(args.folder.resolve()), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
