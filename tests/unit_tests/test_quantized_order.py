"""Ranks that run different units, with weights whose planes forward and backward gather separately."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models import batches
from tests.quantized_models import Reference, quantized_model, sharded_model, train
from tests.ranks import RankPool


class Skipping(nn.Module):
    """Skips the block whose number is the first token, and recomputes whole blocks or one layer of each."""

    def __init__(self, model: nn.Module, recompute: str) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = model.embedding, model.blocks, model.norm, model.head
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if int(tokens[0, 0]) != number:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute == "unit" else block(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Recomputes a layer in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def _model(format: str, recompute: str) -> nn.Module:
    model = quantized_model(format)
    if recompute == "layer":
        for block in model.blocks:
            block.up = Layer(block.up)
    return Skipping(model, recompute if recompute == "unit" else "")


def _skips(format: str, kind: str, recompute: str, rows: list[list[int]], double_buffer: bool) -> None:
    """rows[step][rank] names the block that is left out; 4: none."""
    data = batches(len(rows), len(rows[0]))
    data[:, :, 0, 0] = torch.tensor(rows)
    reference = Reference(_model(format, ""))
    expected = [reference.step(step)[dist.get_rank()] for step in data]
    model, optimizer = sharded_model(kind, _model(format, recompute), fsdp_double_buffer=double_buffer)
    assert train(model, optimizer, data) == expected


ROWS = {
    "one rank, from the first step on": [[1, 4]] * 3,
    "in turn, from the first step on": [[1, 2], [0, 1], [2, 0], [4, 1]],
    "the last, from the first step on": [[4, 2], [2, 4], [1, 4]],
    "later": [[4, 4], [0, 1], [2, 4], [1, 2]],
}


@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("recompute", ["", "unit", "layer"])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
def test_blocks_that_some_ranks_skip(
    ranks: RankPool, kind: str, recompute: str, rows: str, double_buffer: bool
) -> None:
    ranks.run(2, _skips, "mx", kind, recompute, ROWS[rows], double_buffer)
