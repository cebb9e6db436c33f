"""A plain training loop: meta device, HSDP, accumulation, clipping, a learning-rate schedule, asynchronous checkpoints.

torchrun --nproc-per-node 2 plain_loop.py --steps 6 --save checkpoints  # starts, or resumes from the newest checkpoint
"""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard

VOCABULARY, WIDTH = 61, 36
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that each hold all shards (HSDP)")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--save", type=Path, help="folder of checkpoints, one every three steps")


class Block(nn.TransformerEncoderLayer):
    """One layer with causal attention."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, sequence, WIDTH]."""
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype))


def build() -> nn.Module:
    """The language model."""
    first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(first, Block(), Block(), last)


def batch(step: int, micro: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of a micro-batch, which is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    starts = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (starts + torch.arange(12)).remainder(VOCABULARY).tensor_split(ranks)[rank]


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step: torch writes .metadata last."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), key=lambda p: int(p.name[5:]), default=None)


def sharded(args: argparse.Namespace, device: torch.device) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """The sharded model and its optimizer."""
    shape = (args.replicas, dist.get_world_size() // args.replicas)
    torch.manual_seed(0)  # all ranks initialize the same model
    model = megatron_fsdp.deferred_init(build)  # allocates nothing: each rank initializes unit by unit
    if args.compile:
        for block in model[1:3]:
            block.compile()
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5),
        init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")),
        dp_shard_dim="shard",
        dp_outer_dim="replicate",
        fsdp_unit_modules=[Block],
        device=device,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16 if device.type == "cuda" else None),
    )


def forward_backward(model: MegatronFSDP, step: int, micro_batches: int) -> torch.Tensor:
    """Accumulate the gradients of one step, and return the mean loss of all ranks."""
    rank, ranks, total = dist.get_rank(), dist.get_world_size(), torch.zeros((), device=model.device)
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with nullcontext() if last else model.no_sync():
            tokens = batch(step, micro, rank, ranks).to(model.device)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / micro_batches).backward()
        total += loss.detach() / micro_batches / ranks
    dist.all_reduce(total)
    return total


def main() -> None:
    """Train."""
    args, device = parser.parse_args(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, optimizer = sharded(args, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}

    if args.save and (found := newest(args.save)):
        dcp.load(loaded := state(), checkpoint_id=found)
        for part, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            part.load_state_dict(loaded[name])
    saving, group = None, dist.new_group(backend="gloo")  # a save communicates while training does
    for step in range(schedule.last_epoch, args.steps):
        start = time.perf_counter()
        loss = forward_backward(model, step, args.micro_batches)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # of all shards
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if dist.get_rank() == 0:
            took = time.perf_counter() - start
            print(f"step {step}: loss {loss.item():.5f}, norm {norm.item():.4f}, {took:.2f} s", flush=True)
        if args.save and (step + 1) % 3 == 0:
            if saving is not None:
                saving.result()  # one save at a time; raises an error if it failed
            saving = dcp.async_save(state(), checkpoint_id=args.save / f"step-{step + 1}", process_group=group)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
