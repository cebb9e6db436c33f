"""Forward passes without an immediate backward: several before one backward, evaluation, no backward at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from tests.models import (
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    adamw,
    assert_same_training,
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


def _evaluate_between(strategy: str) -> None:
    """Evaluation between steps, between forward and backward, and of every step's result."""

    def step_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            before = loss_of(model, tokens)
        loss = loss_of(model, tokens)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, tokens), before)
        with torch.inference_mode():
            torch.testing.assert_close(loss_of(model, tokens), before)
        model.train()
        torch.testing.assert_close(loss.detach(), before)
        return loss

    data = batches(steps=3, per_step=2 * dist.get_world_size())
    sharded = assert_same_training(TinyModel(), data, adamw, step_loss, zero_dp_strategy=strategy)
    assert all(unit.state.value == "sharded" for unit in sharded.engine.units)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_under_no_grad(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _evaluate_between, strategy)


def _forward_that_is_thrown_away(strategy: str) -> None:
    def step_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss_of(model, tokens)  # with gradients, and no backward
        return loss_of(model, tokens)

    assert_same_training(TinyModel(), batches(3, dist.get_world_size()), adamw, step_loss, zero_dp_strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_without_backward(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _forward_that_is_thrown_away, strategy)


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


class Failing(TinyModel):
    """A module that raises in forward or backward on request."""

    fail = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.fail == "forward":
                raise ValueError("in forward")
            if number == 1 and self.fail == "backward":
                x.register_hook(_raise)
        return self.head(self.norm(x))


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("in backward")


def _exception(strategy: str, where: str) -> None:
    model = Failing()
    pair = Pair(model, zero_dp_strategy=strategy)
    tokens = batches(1, 1)[0, 0]
    for _ in range(2):
        model.fail = where
        with pytest.raises(ValueError, match=f"in {where}"):
            loss_of(pair.sharded, tokens).backward()
        model.fail = ""
        pair.sharded.zero_grad()
        loss_of(pair.sharded, tokens).backward()
    loss_of(pair.reference, tokens).backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_next_step_works_after_an_exception_on_all_ranks(ranks: RankPool, strategy: str, where: str) -> None:
    ranks.run(2, _exception, strategy, where)


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


class Nested(nn.Module):
    """Wrappers around the model, with keyword and container arguments and outputs."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModel()

        def forward(self, *, batch: dict) -> dict:
            return {"logits": (self.inner(batch["tokens"][0]),)}

    def __init__(self) -> None:
        super().__init__()
        self.outer = Nested.Outer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.outer(batch={"tokens": [tokens]})["logits"][0]


def _nested(units: list) -> None:
    assert_same_training(Nested(), batches(3, dist.get_world_size()), adamw, fsdp_unit_modules=units)


@pytest.mark.parametrize(
    "units", [[Block], [Nested.Outer], [Nested.Outer, Block], [TinyModel, Block, "torch.nn.LayerNorm"]]
)
def test_nested_units_and_containers(ranks: RankPool, units: list) -> None:
    ranks.run(2, _nested, units)
