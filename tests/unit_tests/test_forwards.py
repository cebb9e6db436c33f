"""Forward passes without an immediate backward: several before one backward, evaluation, no backward at all."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import fully_shard, fully_shard_model
from tests.models import (
    STRATEGIES,
    Block,
    TinyModel,
    adamw,
    assert_same_training,
    assert_same_weights,
    batches,
    device,
    loss_of,
    main_weights,
)
from tests.ranks import RankPool


def _all_forwards_first(strategy: str, backward_order: list[int]) -> None:
    """Three forwards, then their backwards in the given order."""
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    reference_optimizer = adamw(reference.parameters())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in batches(steps=3, per_step=3 * ranks):
        sum(loss_of(reference, tokens) / ranks for tokens in step).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        losses = [loss_of(sharded, tokens) for tokens in step[rank::ranks]]
        for which in backward_order:
            losses[which].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(sharded, reference)


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
    torch.manual_seed(3)
    model = Failing().to(device())
    reference = copy.deepcopy(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    tokens = batches(1, 1)[0, 0]
    for _ in range(2):
        model.fail = where
        with pytest.raises(ValueError, match=f"in {where}"):
            loss_of(sharded, tokens).backward()
        model.fail = ""
        sharded.zero_grad()
        loss_of(sharded, tokens).backward()
    loss_of(reference, tokens).backward()
    for entry in sharded.engine.params():
        expected = dict(reference.named_parameters())[entry.name].grad.reshape(-1)
        expected = expected[entry.shard_slice.start : entry.shard_slice.stop].view(entry.shard_slice.shape)
        torch.testing.assert_close(local_shard(entry.main.grad), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_next_step_works_after_an_exception_on_all_ranks(ranks: RankPool, strategy: str, where: str) -> None:
    ranks.run(2, _exception, strategy, where)


def _call_the_inner_module() -> None:
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
    tokens = batches(1, 1)[0, 0]
    torch.testing.assert_close(loss_of(sharded.module, tokens), loss_of(reference, tokens))
    loss_of(sharded.module, tokens).backward()
    assert all(p.grad is not None for p in sharded.parameters())


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
