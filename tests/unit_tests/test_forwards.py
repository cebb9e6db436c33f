"""Forward passes without an immediate backward: several before one backward, evaluation, no backward at all."""

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard
from tests.models import (
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    adamw,
    batches,
    device,
    loss_of,
    main_weights,
)
from tests.ranks import RankPool


def _all_forwards_first(strategy: str, backward_order: list[int]) -> None:
    """Three forwards, then their backwards in the given order."""
    pair = Pair(TinyModel(), zero_dp_strategy=strategy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in batches(steps=3, per_step=3 * ranks):
        sum(loss_of(pair.reference, tokens) / ranks for tokens in step).backward()
        losses = [loss_of(pair.sharded, tokens) for tokens in step[rank::ranks]]
        for which in backward_order:
            losses[which].backward()
        pair.update()
    pair.assert_same_weights()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_several_forwards_before_backward(ranks: RankPool, strategy: str, order: list[int]) -> None:
    ranks.run(2, _all_forwards_first, strategy, order)


def _weights_change_between_forward_and_forward(strategy: str) -> None:
    """A forward keeps weights for its backward; a step in between must not be missed by the next forward."""
    torch.manual_seed(3)
    model = TinyModel().to(device())
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    tokens = batches(1, 1)[0, 0]
    loss_of(sharded, tokens).backward()
    kept = loss_of(sharded, tokens)
    optimizer.step()
    after = loss_of(sharded, tokens)
    reference = TinyModel().to(device())
    reference.load_state_dict(main_weights(sharded))
    torch.testing.assert_close(after, loss_of(reference, tokens))
    assert not torch.allclose(after, kept)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_after_a_forward_that_keeps_weights(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _weights_change_between_forward_and_forward, strategy)


def _call_the_inner_module() -> None:
    pair = Pair(TinyModel())
    tokens = batches(1, 1)[0, 0]
    losses = [loss_of(each, tokens) for each in (pair.sharded.module, pair.reference)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    pair.assert_same_gradients()


def test_wrapped_module_may_be_called_itself(ranks: RankPool) -> None:
    ranks.run(2, _call_the_inner_module)
