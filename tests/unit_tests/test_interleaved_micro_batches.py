"""A schedule that runs parts of units itself, the forward of one micro-batch beside the backward of another."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.runtime.unit import WeightState
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.interleaved import interleaved_step
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, assert_same_weights, batches, sgd, train_reference
from tests.ranks import RankPool


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


def _equals_the_unsharded_loop(strategy: str, depth: int, micro_batches: int) -> None:
    torch.manual_seed(3)
    module, reference = TinyModel(depth=depth, tied=True), TinyModel(depth=depth, tied=True)
    reference.load_state_dict(module.state_dict())
    data = batches(steps=3, per_step=micro_batches * dist.get_world_size())
    train_reference(reference, data)
    model = _shard(module, strategy)
    _train(model, data[:, dist.get_rank() :: dist.get_world_size()])
    assert_same_weights(model, reference)
    assert all(unit.state is WeightState.SHARDED for unit in model.engine.units)


# With an odd number of blocks, the forward and the backward are in the same block halfway.
@pytest.mark.every_strategy
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("depth", "micro_batches"), [(3, 3), (4, 2)])
def test_it_equals_the_unsharded_loop(ranks: RankPool, strategy: str, depth: int, micro_batches: int) -> None:
    ranks.run(2, _equals_the_unsharded_loop, strategy, depth, micro_batches)


def _most_unsharded(depth: int) -> int:
    most = 0

    def watch(model: MegatronFSDP) -> None:
        nonlocal most
        units = [unit for unit in model.engine.units if not unit.is_root]
        # Memory, not only the state.
        buffers = [unit.groups[0].weights.planes[0].buffer.flat for unit in units]
        most = max(most, sum(flat.untyped_storage().nbytes() > 0 for flat in buffers))

    _train(_shard(TinyModel(depth=depth)), batches(steps=2, per_step=3), watch=watch)
    return most


def test_blocks_are_resharded_when_neither_micro_batch_needs_them(ranks: RankPool) -> None:
    # Each of the two has a block that it computes and the next one.
    assert ranks.run(2, _most_unsharded, 8) == [4, 4]
