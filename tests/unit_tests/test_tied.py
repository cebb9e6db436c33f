"""Tied parameters have one slot in the layout, for any number of registrations."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, loss_of
from tests.ranks import RankPool


def _tied_embedding(strategy: str) -> None:
    data = batches(steps=3, per_step=dist.get_world_size())
    sharded = assert_same_training(TinyModel(tied=True), data, adamw, zero_dp_strategy=strategy)
    assert sharded.module.head.weight is sharded.module.embedding.weight
    assert len(list(sharded.parameters())) == len(list(TinyModel(tied=True).parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_embedding_tied_to_the_head(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _tied_embedding, strategy)


class TiedAcrossUnits(TinyModel):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def _tied_across_units(strategy: str) -> None:
    data = batches(steps=3, per_step=dist.get_world_size())
    sharded = assert_same_training(TiedAcrossUnits(), data, adamw, zero_dp_strategy=strategy)
    root = [entry.name for group in sharded.engine.units[0].groups for entry in group.params]
    assert "blocks.0.up.weight" in root  # there for both blocks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameter_tied_across_units_belongs_to_the_root(ranks: RankPool, strategy: str) -> None:
    ranks.run(3, _tied_across_units, strategy)


class SharedBlock(nn.Module):
    """The same block at two places, and called at both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 13)
        self.first = Block(13)
        self.second = self.first
        self.head = nn.Linear(13, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embedding(tokens)))))


def _shared_block(strategy: str) -> None:
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    assert_same_training(SharedBlock(), data, adamw, zero_dp_strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_module_that_is_called_twice(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _shared_block, strategy)


def _names_in_state_dict() -> None:
    sharded = fully_shard_model(TinyModel(tied=True), fsdp_unit_modules=[Block])
    assert list(sharded.module.state_dict()) == list(TinyModel(tied=True).state_dict())
    loss_of(sharded, batches(1, 1)[0, 0]).backward()
    assert list(sharded.module.state_dict()) == list(TinyModel(tied=True).state_dict())


def test_state_dict_has_every_name(ranks: RankPool) -> None:
    ranks.run(2, _names_in_state_dict)
