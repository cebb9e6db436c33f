"""Gradient accumulation over micro-batches, synchronized after each or after the last only."""

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import fully_shard_model
from tests.exchanges import both_exchanges
from tests.models import FP32_GRADS, STRATEGIES, TinyModel, adamw, assert_same_training, batches, loss_of
from tests.ranks import RankPool

pytestmark = pytest.mark.every_strategy


def _train(strategy: str, micro_batches: int, use_no_sync: bool, sync_each: bool, overlap: bool) -> None:
    assert_same_training(
        TinyModel(),
        batches(steps=3, per_step=micro_batches * dist.get_world_size()),
        adamw,
        zero_dp_strategy=strategy,
        use_no_sync=use_no_sync,
        sync_model_each_microbatch=sync_each,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )


@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("use_no_sync", "sync_each", "overlap"),
    [(False, True, True), (True, True, True), (True, False, True), (False, False, False), (True, False, False)],
)
def test_accumulation(ranks: RankPool, strategy: str, use_no_sync: bool, sync_each: bool, overlap: bool) -> None:
    ranks.run(2, _train, strategy, 3, use_no_sync, sync_each, overlap)


@both_exchanges("strategy", STRATEGIES)
def test_accumulation_over_three_ranks(ranks: RankPool, strategy: str) -> None:
    ranks.run(3, _train, strategy, 2, True, True, True)


def _count_reductions(strategy: str) -> int:
    import megatron.fsdp.buffers.reduction as reduction

    count = 0
    collectives = {name: getattr(reduction, name) for name in ("all_reduce", "reduce_scatter")}

    def counting(name: str):  # noqa: ANN202
        def call(*args: object) -> None:
            nonlocal count
            count += 1
            collectives[name](*args)

        return call

    try:
        for name in collectives:
            setattr(reduction, name, counting(name))
        model = fully_shard_model(TinyModel(), zero_dp_strategy=strategy, mixed_precision_policy=FP32_GRADS)
        data = batches(steps=1, per_step=3)[0]
        with model.no_sync():
            loss_of(model, data[0]).backward()
            loss_of(model, data[1]).backward()
        model.synchronize_gradient_reduce()
        before_last = count
        loss_of(model, data[2]).backward()
        assert all(p.grad is not None for p in model.parameters())
        assert count == before_last + 1
        return before_last
    finally:
        for name, function in collectives.items():
            setattr(reduction, name, function)


@pytest.mark.parametrize(("strategy", "expected"), [("no_shard", 0), ("optim", 0), ("optim_grads", 2)])
def test_no_sync_keeps_back_what_is_not_sharded(ranks: RankPool, strategy: str, expected: int) -> None:
    assert ranks.run(2, _count_reductions, strategy) == [expected, expected]


def _gradients_accumulate_until_they_are_zeroed(set_to_none: bool) -> None:
    model = fully_shard_model(TinyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = batches(steps=1, per_step=1)[0, 0]
    loss_of(model, tokens).backward()
    once = [local_shard(p.grad).clone() for p in model.parameters()]
    loss_of(model, tokens).backward()
    twice = [local_shard(p.grad).clone() for p in model.parameters()]
    torch.testing.assert_close(twice, [2 * grad for grad in once])
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(model, tokens).backward()
    torch.testing.assert_close([local_shard(p.grad) for p in model.parameters()], once)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_as_in_torch(ranks: RankPool, set_to_none: bool) -> None:
    ranks.run(2, _gradients_accumulate_until_they_are_zeroed, set_to_none)
