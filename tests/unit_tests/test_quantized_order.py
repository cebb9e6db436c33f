"""Ranks that run different units, with weights whose planes forward and backward gather separately."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import batches
from tests.quantized_models import Reference, quantized_model, recompute, sharded_model, train
from tests.ranks import RankPool
from tests.slow import all_but_slow


class Skipping(nn.Module):
    """Skips the block whose number is the first token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = model.embedding, model.blocks, model.norm, model.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = x if int(tokens[0, 0]) == number else block(x)
        return self.head(self.norm(x))


def _skips(kind: str, recomputed: str, rows: list[list[int]], double_buffer: bool) -> None:
    """rows[step][rank] names the block that is left out; 4: none."""
    data = batches(len(rows), len(rows[0]))
    data[:, :, 0, 0] = torch.tensor(rows)
    reference = Reference(Skipping(quantized_model("mx")))
    expected = [reference.step(step)[dist.get_rank()] for step in data]
    model = Skipping(recompute(quantized_model("mx"), recomputed))
    model, optimizer = sharded_model(kind, model, fsdp_double_buffer=double_buffer)
    assert train(model, optimizer, data) == expected


ROWS = {
    "one rank, from the first step on": [[1, 4]] * 3,
    "in turn, from the first step on": [[1, 2], [0, 1], [2, 0], [4, 1]],
    "the last, from the first step on": [[4, 2], [2, 4], [1, 4]],
    "later": [[4, 4], [0, 1], [2, 4], [1, 2]],
}


@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("recomputed", ["", "unit", "layer"])
@pytest.mark.parametrize("kind", all_but_slow(["optim", "optim_grads_params"], "optim_grads_params"))
def test_blocks_that_some_ranks_skip(
    ranks: RankPool, kind: str, recomputed: str, rows: str, double_buffer: bool
) -> None:
    ranks.run(2, _skips, kind, recomputed, ROWS[rows], double_buffer)
