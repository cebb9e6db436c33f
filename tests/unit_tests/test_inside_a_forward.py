"""Gradients that a forward computes, and weights that it writes, are those of an unsharded model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron_fsdp import fully_shard_model
from tests.models import device
from tests.ranks import RankPool, on_ranks
from tests.unit_tests.test_same_answer import SETTINGS, Block, Model, same, train


class Forces(Model):
    """Adds the gradients of its energy by its inputs, as a force field does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.pow(2).mean(), x, create_graph=True)
        return energy + self.head(self.first(force))  # the root's weights again


class Sampler(Model):
    """Follows the gradients of its energy, without a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(2):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(y).pow(2).mean(), y)
            y = y.detach() - 0.1 * force
        return super().forward(x) - super().forward(y)


class Learning(Block):
    """Takes a step of its own weight in every forward, as in test-time training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight
        (grad,) = torch.autograd.grad((x @ weight.t()).pow(2).mean(), weight, create_graph=True)
        return x + self.down((x @ (weight - 0.1 * grad).t()).tanh())


class Momentum(nn.Module):
    """Moves the weights of a second encoder towards those of the first one, as MoCo does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.one = how, Model(2)
        self.other = copy.deepcopy(self.one).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, value in zip(self.other.blocks.parameters(), self.one.blocks.parameters(), strict=True):
                if self.how == "data =":
                    own.data = own.data * 0.5 + value.data * 0.5
                else:
                    (own.data if self.how == "data" else own).mul_(0.5).add_(value, alpha=0.5)
            target = self.other(x)
        return self.one(x) - target - 1


def _learning() -> Model:
    model = Model(2)
    model.blocks = nn.ModuleList(Learning() for _ in range(2))
    return model


MODELS: dict[str, Any] = {
    "forces": Forces,
    "sampler": Sampler,
    "learning": _learning,
    **{f"momentum, {how}": lambda how=how: Momentum(how) for how in ("in place", "data", "data =")},
}


@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_unsharded(name: str) -> None:
    # Without a buffer that units share: they are needed at the same time.
    settings = [each for each in SETTINGS if name not in ("learning", "forces") or each != "double buffer"]
    same(train, MODELS[name], settings)


class Clamped(nn.Linear):
    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "data =":
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        elif self.how:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def _writes_itself(how: str, strategy: int, policy: MixedPrecisionPolicy) -> None:
    model = nn.Sequential(nn.Sequential(Clamped(4, 8)), nn.Linear(8, 4)).to(device())
    model[0][0].how = how  # type: ignore[index]
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy, mixed_precision_policy=policy
    )
    with pytest.raises(RuntimeError, match=r"FSDP unit 0 has changed its parameter 0\.0\.weight in place"):
        sharded(torch.ones(2, 4, dtype=policy.compute_dtype, device=device()))


@pytest.mark.parametrize("how", ["data", "data ="])
def test_what_the_next_unshard_would_undo_raises(ranks: RankPool, how: str) -> None:
    ranks.run(2, _writes_itself, how, 3, MixedPrecisionPolicy())
    ranks.run(2, _writes_itself, how, 1, MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
