"""Runs pretrain_gpt.py with an error injected in this project's FSDP, which ``FSDP_INJECTED`` selects."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.fsdp.buffers import (
    parameter_group,  # noqa: E402
    reduction,  # noqa: E402
    weights,  # noqa: E402
)
from megatron.fsdp.comm.collectives import SENDS  # noqa: E402


def missed_reduction() -> None:
    """The last rank keeps its own gradients of one unit in place of the sum."""
    original = SENDS.reduce_scatter

    def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        before = flat[group.rank() * shard.numel() :][: shard.numel()].clone()
        original(shard, flat, op, group)
        shard.copy_(before)

    SENDS.reduce_scatter = reduce_scatter


def wrong_divisor() -> None:
    """Gradients are divided by one rank more than there are."""
    original = reduction.Reduction.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.rescale(2 / 3)

    reduction.Reduction.__init__ = init  # type: ignore[method-assign]


def stale_weights() -> None:
    """Weights are unsharded once and never updated."""
    weights.WeightBuffer.invalidate = lambda self: None  # type: ignore[method-assign]
    weights.WeightBuffer.reshard = lambda self, keep=False: self.wait()  # type: ignore[method-assign]


def skipped_parameter() -> None:
    """The gradient of one parameter is lost."""
    original = parameter_group.ParameterGroup.collect_gradients

    def collect(self: Any) -> list[torch.Tensor | None]:
        grads = original(self)
        return [
            torch.zeros_like(g) if g is not None and e.name.endswith("layers.1.mlp.linear_fc2.weight") else g
            for e, g in zip(self.params, grads, strict=True)
        ]

    parameter_group.ParameterGroup.collect_gradients = collect  # type: ignore[method-assign]


def swapped_shard() -> None:
    """The shards of unsharded weights are in the wrong order."""
    original = SENDS.all_gather

    def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        original(flat, shard, group)
        flat.copy_(flat.view(group.size(), -1).flip(0).reshape(-1))

    SENDS.all_gather = all_gather


INJECTED = (missed_reduction, wrong_divisor, stale_weights, skipped_parameter, swapped_shard)

if __name__ == "__main__":
    import pretrain_gpt

    if "--use-megatron-fsdp" in sys.argv:
        for plant in INJECTED:
            if plant.__name__ == os.environ.get("FSDP_INJECTED"):
                plant()
    pretrain_gpt.main()
