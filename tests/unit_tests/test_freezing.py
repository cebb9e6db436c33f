"""Parameters are frozen and unfrozen between steps: training equals that of the unsharded model."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import FSDPConfig, MegatronFSDP
from tests.exchanges import seen
from tests.models import STRATEGIES, Block, Pair, TinyModel, batches, loss_of
from tests.ranks import RankPool, on_ranks
from tests.training_models import Skipping, WithUnused

# The modules that are frozen in each step.
PHASES = {
    "part_of_a_unit": ["", "blocks.1.up", "", "blocks.1.up"],
    "a_unit": ["", "blocks.1", "blocks.1", ""],
    "all_units": ["", "blocks", "blocks", ""],
    "the_root": ["", "embedding", "head", ""],
    "what_comes_first": ["embedding blocks.0", "", "embedding blocks.0 blocks.1", ""],
    "in_turn": ["blocks.0", "blocks.1", "blocks.2", "blocks.0"],
}


def _frozen(model: nn.Module, what: str) -> Iterator[str]:
    for name, _ in model.named_parameters():
        if name.startswith(tuple(what.split())):
            yield name


def _freeze(model: nn.Module, what: str) -> None:
    frozen = set(_frozen(model, what))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _train(strategy: str, phases: list[str], per_rank: int) -> None:
    pair = Pair(TinyModel(), zero_dp_strategy=strategy)
    for what, step in zip(phases, batches(len(phases), per_rank * dist.get_world_size()), strict=True):
        _freeze(pair.reference, what)
        _freeze(pair.sharded.module, what)
        pair.backward(step)
        pair.assert_same_gradients()
        for name, parameter in pair.sharded.module.named_parameters():
            assert parameter.requires_grad == pair.reference.get_parameter(name).requires_grad
        pair.update()
    pair.assert_same_weights()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phases", PHASES)
def test_freezing_between_steps(ranks: RankPool, strategy: str, phases: str) -> None:
    ranks.run(2, _train, strategy, PHASES[phases], 2)


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_began_frozen_is_unfrozen_and_given_to_the_optimizer(strategy: str) -> None:
    """As in fine-tuning: the optimizer is given more and more parameters."""
    model = TinyModel()
    _freeze(model, "embedding blocks")
    pair = Pair(model, zero_dp_strategy=strategy)
    for what, data in zip(["", "blocks.2", "", "blocks.0 blocks.1"], batches(4, dist.get_world_size()), strict=True):
        if what:
            for each, each_optimizer in pair.sides:
                each = getattr(each, "module", each)
                unfrozen = [each.get_parameter(name) for name in _frozen(each, what)]
                each_optimizer.add_param_group({"params": [p.requires_grad_() for p in unfrozen], "lr": 2e-2})
        pair.backward(data)
        pair.update()
    assert all(entry.main.requires_grad == entry.trained for entry in pair.sharded.engine.params())
    pair.assert_same_weights()


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_freezing_while_weights_are_gathered(strategy: str) -> None:
    """Freeze while a unit is unsharded after a forward without backward, and between forward and backward."""
    pair = Pair(TinyModel(), zero_dp_strategy=strategy)
    tokens = batches(1, 1)[0, 0]
    for each, _ in pair.sides:
        module = getattr(each, "module", each)
        loss_of(each, tokens)
        _freeze(module, "blocks.2 head")
        loss = loss_of(each, tokens)
        _freeze(module, "blocks.2 head blocks.0.up")
        loss.backward()
        _freeze(module, "head")
        loss_of(each, tokens).backward()
    pair.assert_same_gradients()


def _communication_of(phases: list[str]) -> list[tuple[int, int]]:
    """Reductions, and exchanges of plans, in each step."""
    counts, exchanged = [], CommContext.exchange
    exchange = patch.object(CommContext, "exchange", autospec=True, side_effect=exchanged)
    with seen("reduce_scatter") as reductions, exchange as exchanges:
        sharded = MegatronFSDP(TinyModel(), config=FSDPConfig(), fsdp_unit_modules=[Block])
        for what in phases:
            _freeze(sharded.module, what)
            reductions.clear()
            exchanges.reset_mock()
            loss_of(sharded, batches(1, 1)[0, 0]).backward()
            sharded.zero_grad()
            counts.append((len(reductions), exchanges.call_count))
    return counts


def test_frozen_units_are_not_reduced_and_plans_are_made_once(ranks: RankPool) -> None:
    phases = ["", "blocks.1", "", "blocks.1", "blocks.1 blocks.2.up", "blocks.0 blocks.1"]
    # Forward, backward and late reductions are exchanged where a set of units takes gradients for the first time.
    expected = [(4, 3), (3, 3), (4, 0), (3, 0), (3, 0), (2, 3)]
    assert ranks.run(2, _communication_of, phases) == [expected] * 2


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_freezing_where_ranks_leave_units_out(strategy: str) -> None:
    pair = Pair(Skipping(), zero_dp_strategy=strategy)
    phases = ["blocks.1", "blocks.1", "", "blocks.2", "", "blocks.1"]
    skipped = [(9, 9), (0, 9), (9, 1), (2, 0), (1, 9), (9, 2)]
    data = batches(len(phases), 2)
    for what, row, step in zip(phases, skipped, data, strict=True):
        step[:, 0, 0] = torch.tensor(row)
        _freeze(pair.reference, what)
        _freeze(pair.sharded.module, what)
        pair.backward(step)
        pair.update()
    pair.assert_same_weights()


@on_ranks(2)
def test_frozen_parameters_get_no_zeros() -> None:
    sharded = MegatronFSDP(WithUnused(), config=FSDPConfig(zero_unused_gradients=True), fsdp_unit_modules=[Block])
    for what in ("blocks.1", "blocks.1.up"):
        _freeze(sharded.module, what)
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
        frozen = set(_frozen(sharded.module, what))
        assert {name for name, p in sharded.module.named_parameters() if p.grad is None} == frozen
        unused = [p.grad for name, p in sharded.module.named_parameters() if "spare" in name and name not in frozen]
        assert unused and not any(local_shard(grad).any() for grad in unused)
        sharded.zero_grad()
