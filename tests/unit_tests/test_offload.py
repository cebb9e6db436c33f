"""Main weights, reduced gradients and optimizer state in host memory: equal training, compute on the device."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.buffers.weights import PlaneSet
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.notes import add_note
from megatron.fsdp.runtime.unit import Unit
from tests.models import (
    FP32_GRADS,
    OPTIMIZERS,
    STRATEGIES,
    Pair,
    TinyModel,
    assert_same_training,
    batches,
    device,
    loss_of,
    shard,
    train_step,
)
from tests.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_everything_is(strategy: str) -> None:
    model = TinyModel().to(device(), torch.bfloat16)
    sharded, optimizer = shard(model, strategy, mixed_precision_policy=FP32_GRADS, offload_optimizer=True)
    seen = []
    sharded.module.head.register_forward_hook(lambda m, args, out: seen.append((m.weight.device, out.device)))
    for _ in range(2):
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
        for entry in sharded.engine.params():
            assert local_shard(entry.main).device.type == "cpu"
            assert local_shard(entry.main.grad).device.type == "cpu"
        optimizer.step()
        optimizer.zero_grad()
    for entry in sharded.engine.params():
        assert local_shard(optimizer.state[entry.main]["exp_avg"]).device.type == "cpu"
    assert {d.type for pair in seen for d in pair} == {device().type}


# The step and the all-gathers after it ----------------------------------------------------------------------------


class Another(torch.optim.AdamW):
    """An optimizer that nothing is known of."""


EVERY_OPTIMIZER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "SGD_plain_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    # Optimizers whose step cannot be split:
    "another": lambda p: Another(p, lr=1e-2),
}


@on_ranks(2)
def test_optimizers_train_as_unsharded() -> None:
    data = batches(steps=3, per_step=dist.get_world_size())
    for name, make in EVERY_OPTIMIZER.items():
        try:
            assert_same_training(TinyModel(), data, make, offload_optimizer=True)
        except AssertionError as error:
            add_note(error, name)
            raise


ALL = ["<root>", "blocks.0", "blocks.1", "blocks.2"]


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "gathered"), [("optim", ALL), ("optim_grads_params", ALL[:3])])
def test_the_first_units_are_gathered_during_the_step(strategy: str, gathered: list[str]) -> None:
    """A unit that forward needs early is unsharded before later units are updated."""
    model = TinyModel().to(device(), torch.bfloat16)
    sharded, optimizer = shard(model, strategy, mixed_precision_policy=FP32_GRADS, offload_optimizer=True)
    data = batches(steps=3, per_step=1)
    for tokens in data[:2, 0]:
        train_step(sharded, optimizer, tokens)
    loss_of(sharded, data[2, 0]).backward()
    before = {entry.name: local_shard(entry.main).clone() for entry in sharded.engine.params()}
    events: list[str] = []
    gather = Unit.unshard

    def spy(unit: Unit, planes: PlaneSet) -> None:
        updated = {e.name for e in sharded.engine.params() if not torch.equal(local_shard(e.main), before[e.name])}
        later = [u for u in sharded.engine.units if u.label not in [*events, unit.label]]
        others = {entry.name for u in later for group in u.groups for entry in group.params}
        assert not updated & others, (unit, updated & others)
        events.append(unit.label)
        gather(unit, planes)

    with patch.object(Unit, "unshard", spy):
        optimizer.step()
    assert events == gathered
    for entry in sharded.engine.params():
        local = local_shard(entry.main)
        assert not local.numel() or not torch.equal(local, before[entry.name])


@on_ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_changed_after_the_step_are_what_forward_uses(strategy: str) -> None:
    """As a clamp, or an average of weights, does."""
    pair = Pair(TinyModel(), zero_dp_strategy=strategy, offload_optimizer=True)
    for tokens in batches(steps=4, per_step=1)[:, 0]:
        for each, each_optimizer in pair.sides:
            train_step(each, each_optimizer, tokens)
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.clamp_(-0.05, 0.05)
    pair.assert_same_weights()
