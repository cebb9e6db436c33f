"""Quantized compute weights: sharded training equals unsharded training with the same format, bit by bit."""

import pytest
import torch
import torch.distributed as dist

from tests.models import batches
from tests.quantized_models import BLOCKS, KINDS, Reference, quantized_model, sharded_model, train
from tests.ranks import RankPool

STEPS = 20


def _ranks_of(kind: str) -> int:
    return 4 if kind in ("hsdp", "hybrid") else 2


def _trains(kind: str, block: tuple[int, int] | None) -> None:
    data = batches(STEPS, dist.get_world_size())
    reference = Reference(quantized_model(block))
    expected = [reference.step(step)[dist.get_rank()] for step in data]
    model, optimizer = sharded_model(kind, quantized_model(block))
    assert train(model, optimizer, data) == expected
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_unsharded(ranks: RankPool, kind: str) -> None:
    ranks.run(_ranks_of(kind), _trains, kind, None)


@pytest.mark.parametrize("block", BLOCKS)
def test_trains_as_unsharded_in_blocks(ranks: RankPool, block: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", BLOCKS[block])
