"""A schedule that runs parts of units itself, the forward of one micro-batch during the backward of another."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.runtime.unit import Unit, WeightState
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.interleaved import interleave, interleaved_step, ordinary_step
from tests.models import (
    FP32_GRADS,
    STRATEGIES,
    Block,
    TinyModel,
    assert_same_weights,
    batches,
    device,
    loss_of,
    sgd,
    train_reference,
)
from tests.ranks import RankPool, on_ranks
from tests.slow import all_but_slow


def _shard(module: TinyModel, strategy: str = "optim_grads_params", **settings: object) -> MegatronFSDP:
    return fully_shard_model(
        module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS, **settings
    )


def _train(model: MegatronFSDP, data: torch.Tensor, **arguments: Any) -> None:
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    for step in data:
        interleaved_step(model, step, **arguments)
        optimizer.step()
        optimizer.zero_grad()


# With an odd number of blocks, the forward and the backward are in the same block halfway.
@on_ranks(2)
@pytest.mark.every_strategy
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("depth", "micro_batches"), [(3, 3), (4, 2)])
def test_it_equals_the_unsharded_loop(strategy: str, depth: int, micro_batches: int) -> None:
    torch.manual_seed(3)
    module, reference = (TinyModel(depth=depth, tied=True).to(device()) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    data = batches(steps=3, per_step=micro_batches * dist.get_world_size())
    train_reference(reference, data)
    model = _shard(module, strategy)
    _train(model, data[:, dist.get_rank() :: dist.get_world_size()])
    assert_same_weights(model, reference)
    assert all(unit.state is WeightState.SHARDED for unit in model.engine.units)


def _starts_as_the_reference(strategy: str) -> tuple[MegatronFSDP, TinyModel, torch.Tensor]:
    torch.manual_seed(3)
    module, reference = (TinyModel(tied=True).to(device()) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    return _shard(module, strategy), reference, batches(steps=4, per_step=3 * dist.get_world_size())


@on_ranks(2)
@pytest.mark.parametrize(("delay", "sync_each"), [(True, False), (False, True)])
@pytest.mark.parametrize("strategy", all_but_slow(STRATEGIES, "optim", "optim_grads_params"))
def test_ordinary_steps_and_evaluations_in_between(strategy: str, delay: bool, sync_each: bool) -> None:
    model, reference, data = _starts_as_the_reference(strategy)
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    for i, step in enumerate(data):
        mine = step[dist.get_rank() :: dist.get_world_size()]
        if i % 2 == 0:
            interleaved_step(model, mine, delay=delay, sync_each=sync_each)
        else:
            ordinary_step(model, mine)
        optimizer.step()
        optimizer.zero_grad()
        train_reference(reference, step.unsqueeze(0))
        # By the two ways to evaluate, and saved.
        with torch.no_grad():
            expected = loss_of(reference, mine[0])
            torch.testing.assert_close(loss_of(model, mine[0]), expected)
            torch.testing.assert_close(interleave(model, mine[0], None, 1).loss, expected)
        assert all(unit.state is WeightState.SHARDED for unit in model.engine.units)
        assert not model.engine.schedule.passes.by_caller
        assert_same_weights(model, reference)


# Within the first micro-batch's forward, and the first and the last layer of the second's during its backward.
@on_ranks(2)
@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary", "interleaved"])
@pytest.mark.parametrize("abandon", [True, False], ids=["abandoned", "not abandoned"])
@pytest.mark.parametrize("at", [3, 14, 23])
@pytest.mark.parametrize("strategy", all_but_slow(STRATEGIES, "optim_grads_params"))
def test_exceptions(strategy: str, at: int, abandon: bool, ordinary: bool) -> None:
    model, reference, data = _starts_as_the_reference(strategy)
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    calls = 0

    def fail(model: MegatronFSDP) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise InterruptedError

    for number, step in enumerate(data):
        mine = step[dist.get_rank() :: dist.get_world_size()]
        if number in (0, 2):
            calls = 0
            with pytest.raises(InterruptedError):
                interleaved_step(model, mine, watch=fail)
            if abandon:
                model.engine.abandon_pass()
            optimizer.zero_grad()
        (ordinary_step if ordinary else interleaved_step)(model, mine)
        # The end of the last backward has put them there, without the optimizer's hook.
        assert all(param.main.grad is not None for param in model.engine.params())
        optimizer.step()
        optimizer.zero_grad()
    train_reference(reference, data)
    assert_same_weights(model, reference)


def _reductions(delay: bool) -> list[str]:
    """Units whose gradients are reduced in a step of three micro-batches, in order."""
    reduced: list[str] = []
    reduce_gradients = Unit.reduce_gradients

    def noted(unit: Unit, last: bool) -> bool:
        reduced.append(unit.label)
        return reduce_gradients(unit, last)

    model = _shard(TinyModel(depth=3).to(device()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "reduce_gradients", noted)
        interleaved_step(model, batches(1, 3)[0], delay=delay)
    return reduced


@pytest.mark.parametrize("delay", [False, True])
def test_each_unit_is_reduced_once_per_micro_batch(ranks: RankPool, delay: bool) -> None:
    for reduced in ranks.run(2, _reductions, delay):
        assert reduced == ["blocks.2", "blocks.1", "blocks.0", "<root>"] * 3


def _most_unsharded(depth: int) -> int:
    most = 0

    def watch(model: MegatronFSDP) -> None:
        nonlocal most
        units = [unit for unit in model.engine.units if not unit.is_root]
        # Memory, not only the state.
        buffers = [unit.groups[0].weights.planes[0].buffer.flat for unit in units]
        most = max(most, sum(flat.untyped_storage().nbytes() > 0 for flat in buffers))

    _train(_shard(TinyModel(depth=depth).to(device())), batches(steps=2, per_step=3), watch=watch)
    return most


def test_blocks_are_resharded_when_neither_micro_batch_needs_them(ranks: RankPool) -> None:
    # Each of the two has a block that it computes and the next one.
    assert ranks.run(2, _most_unsharded, 8) == [4, 4]
