"""Evaluation before, between and without training steps, with dropout and running statistics, equals unsharded."""

import copy
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.models import (
    STRATEGIES,
    Block,
    Pair,
    TinyModel,
    batches,
    device,
    loss_of,
)
from tests.ranks import RankPool

MODES: dict[str, type[AbstractContextManager]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Noisy(Block):
    """A block with dropout, and statistics that only training changes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.dropout = nn.Dropout(0.3)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(self.dropout(x))
        return self.statistics(x.flatten(0, 1)).view(x.shape)


class NoisyModel(TinyModel):
    """A model of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy(13) for _ in range(3))


def _evaluate(pair: Pair, tokens: torch.Tensor, mode: str) -> None:
    """Both in evaluation mode, twice over, with the same results and no noise in them."""
    outputs = []
    for each, _ in reversed(pair.sides):
        each.eval()
        assert not any(module.training for module in each.modules())
        with MODES[mode]():
            outputs += [each(tokens), each(tokens)]
        each.train()
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=2e-5, atol=2e-5)
    assert not outputs[2].requires_grad and outputs[2].is_inference() == (mode == "inference_mode")


def _train_and_evaluate(strategy: str, mode: str) -> None:
    # All ranks take the same micro-batch and the same random numbers, so that one unsharded model can follow.
    pair = Pair(NoisyModel(), zero_dp_strategy=strategy)
    for number, tokens in enumerate(batches(4, 1)[:, 0]):
        _evaluate(pair, tokens, mode)  # before there is a plan, and after each step
        losses = []
        for each, _ in pair.sides:
            torch.manual_seed(number)
            losses.append(loss_of(each, tokens))
        torch.testing.assert_close(*losses)
        if number == 2:  # between a forward and its backward
            _evaluate(pair, tokens, mode)
        for loss in losses:
            loss.backward()
        pair.update()
    _evaluate(pair, batches(1, 1, seed=5)[0, 0], mode)
    pair.assert_same_weights()
    for (name, buffer), other in zip(pair.reference.named_buffers(), pair.sharded.module.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
def test_dropout_and_evaluation_between_steps(ranks: RankPool, strategy: str, mode: str) -> None:
    ranks.run(2, _train_and_evaluate, strategy, mode)


def _only_evaluate(strategy: str, mode: str) -> None:
    """Forward passes only, without an optimizer or a backward: no unit stays unsharded between them."""
    torch.manual_seed(3)
    model = NoisyModel().to(device(), torch.bfloat16).requires_grad_(False)
    reference = copy.deepcopy(model).eval()
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy).eval()
    with MODES[mode]():
        for tokens in batches(3, dist.get_world_size())[:, dist.get_rank()]:
            torch.testing.assert_close(sharded(tokens), reference(tokens))
            assert all(unit.state.value == "sharded" for unit in sharded.engine.units)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
def test_model_that_is_only_evaluated(ranks: RankPool, strategy: str, mode: str) -> None:
    ranks.run(2, _only_evaluate, strategy, mode)


def _built_in_inference_mode() -> None:
    """A model that is loaded and evaluated in inference mode and never trained."""
    torch.manual_seed(3)
    model = TinyModel().to(device())
    reference = copy.deepcopy(model)
    tokens = batches(1, 1)[0, 0]
    with torch.inference_mode():
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        sharded.load_state_dict({f"module.{name}": value for name, value in reference.state_dict().items()})
        torch.testing.assert_close(sharded(tokens), reference(tokens))
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens), reference(tokens))


def test_model_that_is_sharded_in_inference_mode(ranks: RankPool) -> None:
    ranks.run(2, _built_in_inference_mode)
