"""Times the collectives of a strategy without compute. Called through ``benchmarks.worker``."""

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import training
from benchmarks.job import Job
from benchmarks.model import Transformer
from megatron.fsdp.comm import gloo

# For each pattern: how often a step all-gathers every unit, and how it reduces gradients.
PATTERNS = {
    "all-reduce": (0, "all_reduce"),
    "gather once": (1, "reduce_scatter"),
    "gather twice": (2, "reduce_scatter"),
    "gather once, pairwise": (1, "pairwise"),
    "gather twice, pairwise": (2, "pairwise"),
}

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Unit:
    """Flat buffers of one unit."""

    def __init__(self, numel: int, job: Job, rank: int) -> None:
        per_rank = -(-numel // job.ranks)
        dtype = torch.bfloat16 if job.low_precision else torch.float32
        self.weights = torch.zeros(per_rank * job.ranks, dtype=dtype)
        self.weights_shard = self.weights[rank * per_rank : (rank + 1) * per_rank]
        self.gradients = torch.zeros(per_rank * job.ranks)
        self.gradients_shard = torch.zeros(per_rank)


_units: list[_Unit] = []


def start(job: dict[str, Any], rank: int, store: str) -> None:
    """Create the process group, and buffers for every block and the root."""
    described = Job.from_json(job)
    training.join(described, rank, store)
    with torch.device("meta"):
        model = Transformer(described.shape)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    root = sum(p.numel() for p in model.parameters()) - sum(blocks)
    _units[:] = [_Unit(numel, described, rank) for numel in (*blocks, root)]


def turn(pattern: str, steps: int) -> list[float]:
    """Communicate for some steps. Returns the seconds of each."""
    gathers, reduction = PATTERNS[pattern]
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in range(gathers):
            for unit in _units:
                if reduction == "pairwise":
                    gloo.all_gather(unit.weights, unit.weights_shard, group)
                else:
                    _gather(unit.weights, unit.weights_shard)
        for unit in _units:
            if reduction == "all_reduce":
                dist.all_reduce(unit.gradients)
            elif reduction == "pairwise":
                gloo.reduce_scatter(unit.gradients_shard, unit.gradients, dist.ReduceOp.SUM, group)
            else:
                _scatter(unit.gradients_shard, unit.gradients)
        times.append(time.perf_counter() - began)
    return times
