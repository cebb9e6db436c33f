"""A plain training loop: meta device, HSDP, accumulation, clipping, a learning-rate schedule, asynchronous checkpoints.

torchrun --nproc-per-node 2 plain_loop.py --steps 6 --save checkpoints  # starts, or resumes from the newest checkpoint
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron_fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, WIDTH = 61, 36


class Block(nn.Module):
    """One layer: causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, sequence, WIDTH]."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def build() -> nn.Module:
    """The language model."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


def batch(step: int, micro: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of a micro-batch, which is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    starts = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (starts + torch.arange(12)).remainder(VOCABULARY).tensor_split(ranks)[rank]


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step: torch writes .metadata last."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), key=lambda p: int(p.name[5:]), default=None)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that each hold all shards (HSDP)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-interval", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (args.replicas, ranks // args.replicas), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)  # all ranks initialize the same model
    model = megatron_fsdp.deferred_init(build)  # allocates nothing: each rank initializes unit by unit
    if args.compile:
        for block in model[1:3]:
            block.compile()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    model, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="shard",
        dp_outer_dim="replicate",
        fsdp_unit_modules=[Block],
        device=device,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else None),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}

    saving, group = None, dist.new_group(backend="gloo")  # a save communicates while training does
    if args.save and (found := newest(args.save)):
        dcp.load(loaded := state(), checkpoint_id=found)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        schedule.load_state_dict(loaded["schedule"])
    for step in range(schedule.last_epoch, args.steps):
        start, total = time.perf_counter(), torch.zeros((), device=device)
        for micro in range(args.micro_batches):
            model.is_last_microbatch = micro == args.micro_batches - 1
            model.set_model_auto_sync(model.is_last_microbatch)  # as no_sync() for all but the last
            tokens = batch(step, micro, rank, ranks).to(device)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / args.micro_batches).backward()
            total += loss.detach() / args.micro_batches / ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(total)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if rank == 0:
            took = time.perf_counter() - start
            print(f"step {step}: loss {total.item():.5f}, norm {norm.item():.4f}, {took:.2f} s", flush=True)
        if args.save and (step + 1) % args.save_interval == 0:
            if saving is not None:
                saving.result()  # one save at a time; raises if it failed
            saving = dcp.async_save(state(), checkpoint_id=args.save / f"step-{step + 1}", process_group=group)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
