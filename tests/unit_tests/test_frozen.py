"""Frozen parameters are unsharded like others, and never reduced or changed."""

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.models import STRATEGIES, TinyModel, adamw, assert_same_training, batches
from tests.ranks import RankPool


def _freeze(model: TinyModel, what: str) -> TinyModel:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(what))
    return model


def _train(strategy: str, what: str) -> None:
    before = {name: p.detach().clone() for name, p in TinyModelSeeded().named_parameters()}
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    sharded = assert_same_training(_freeze(TinyModelSeeded(), what), data, adamw, zero_dp_strategy=strategy)
    for entry in sharded.engine.params():
        if entry.name.startswith(what):
            part = (
                before[entry.name]
                .reshape(-1)[entry.shard_slice.start : entry.shard_slice.stop]
                .view(entry.shard_slice.shape)
            )
            assert torch.equal(local_shard(entry.main).cpu(), part)
            assert entry.main.grad is None and not entry.main.requires_grad


def TinyModelSeeded() -> TinyModel:  # noqa: N802
    torch.manual_seed(3)
    return TinyModel()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ["embedding", "blocks.1", "blocks.0.up.weight", "blocks"])
def test_frozen(ranks: RankPool, strategy: str, what: str) -> None:
    """The embedding: then no input of the first block needs gradients. A whole block, part of one, all of them."""
    ranks.run(2, _train, strategy, what)
