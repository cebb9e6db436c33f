"""Main weights, gradients of the step and optimizer state in host memory: equal training, compute stays where it is."""

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.uneven_dtensor import local_part
from megatron_fsdp import fully_shard
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, adamw, assert_same_training, batches, device, loss_of
from tests.ranks import RankPool


def _train(strategy: str) -> None:
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    assert_same_training(TinyModel(), data, adamw, zero_dp_strategy=strategy, offload_optimizer=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_unsharded(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _train, strategy)


def _where(strategy: str) -> None:
    model = TinyModel().to(device(), torch.bfloat16)
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
        offload_optimizer=True,
    )
    seen = []
    sharded.module.head.register_forward_hook(lambda m, args, out: seen.append((m.weight.device, out.device)))
    for _ in range(2):
        loss_of(sharded, batches(1, 1)[0, 0]).backward()
        for entry in sharded.entries():
            assert local_part(entry.main).device.type == "cpu"
            assert local_part(entry.main.grad).device.type == "cpu"
        optimizer.step()
        optimizer.zero_grad()
    for entry in sharded.entries():
        assert local_part(optimizer.state[entry.main]["exp_avg"]).device.type == "cpu"
    assert {d.type for pair in seen for d in pair} == {device().type}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_everything_is(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _where, strategy)
