"""Registered classes that look at more than was declared raise an error; wrappers of optimizers need no declaration."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.optim.trial import looks_at_more
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer, register_optimizer
from tests.models import STRATEGIES, Block, TinyModel, assert_same_weights, batches, device, loss_of
from tests.ranks import on_ranks


class Scaled(torch.optim.Optimizer):
    """Descends by gradients that ``how`` scales."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.how, self.steps = how, [0]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps[0] += 1
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        everything = sum(p.grad.square().sum() for p in given) if self.how == "all" else 1.0
        for p in given:
            grad = p.grad
            if self.how == "matrix" and p.dim() > 1:
                grad = grad / grad.norm(dim=0)
            if self.how == "parameter":
                grad = grad / grad.norm()
            if self.how == "noise":
                grad = grad + torch.randn_like(grad)
            if self.how == "communication":
                total = p.grad.square().sum()
                dist.all_reduce(total)
                grad = grad / total
            p.sub_(grad / everything, alpha=self.param_groups[0]["lr"])


FOUND = {
    "element": (False, False, False),
    "matrix": (True, False, False),
    "parameter": (True, True, False),
    "all": (True, True, True),
    "noise": (False, False, False),
}


def _scaled(how: str) -> Scaled:
    return Scaled([nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(()))], how)


@pytest.mark.parametrize("how", FOUND)
def test_a_trial_shows_what_a_class_looks_at(how: str) -> None:
    optimizer, numbers = _scaled(how), torch.get_rng_state()
    assert tuple(looks_at_more(optimizer, kind) for kind in ("element", "matrix", "parameter")) == FOUND[how]
    assert optimizer.steps == [0] and not optimizer.state and torch.equal(numbers, torch.get_rng_state())


@on_ranks(2)
def test_a_class_that_communicates_has_no_trial() -> None:
    assert not looks_at_more(_scaled("communication"), "element")


@on_ranks(2)
def test_a_false_declaration_raises() -> None:
    for how, kind, message in (
        (
            "parameter",
            "element",
            r"Scaled is registered as 'element', .*Expected register_optimizer\(Scaled, 'parameter",
        ),
        ("all", "parameter", "It looks at several parameters at once"),
    ):
        register_optimizer(Scaled, kind)
        model = TinyModel().to(device())
        optimizer = Scaled(model.parameters(), how)
        with pytest.raises(ValueError, match=message):
            fully_shard(model, optimizer, fsdp_unit_modules=[Block], shard_granularity="parameter")


# Wrappers ---------------------------------------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Every second step moves halfway to slow weights, which it copies when it is made."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([{"params": []}], {})
        self.param_groups, self.count = inner.param_groups, 0
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The inner optimizer has the groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.count % 2 == 0):
            slow = self.state[p]["slow"]
            slow.lerp_(p, 0.5)
            p.copy_(slow)


class SharpnessAware(Lookahead):
    """Takes gradients where weights have moved along gradients, by their norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        params = [p for group in self.param_groups for p in group["params"]]
        rate = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["slow"] = p.detach().clone()
            p.add_(p.grad * float(rate))
        with torch.enable_grad():
            closure()
        for p in params:
            p.copy_(self.state[p]["slow"])
        self.inner.step()


@on_ranks(2)
@pytest.mark.parametrize("cls", [Lookahead, SharpnessAware])
@pytest.mark.parametrize(
    ("order", "strategy"),
    [("sharded", each) for each in STRATEGIES] + [(o, "optim_grads_params") for o in ("inner", "implicit", "after")],
)
def test_wrappers_update_as_without_sharding(cls: type[Lookahead], order: str, strategy: str) -> None:
    torch.manual_seed(3)
    plain = TinyModel().to(device())
    model = copy.deepcopy(plain)
    reference = cls(torch.optim.AdamW(plain.parameters(), lr=0.02))
    settings: dict[str, Any] = {"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy}
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    if order == "sharded":
        sharded, optimizer = fully_shard(model, cls(inner), **settings)
    else:
        wrapper = cls(inner)
        sharded = fully_shard_model(model, **settings)
        optimizer = {"inner": lambda: (fully_shard_optimizer(inner), wrapper)[1], "implicit": lambda: wrapper}.get(
            order, lambda: cls(fully_shard_optimizer(inner))
        )()
    for tokens in batches(4, dist.get_world_size()):
        for each, updater, mine in ((plain, reference, tokens), (sharded, optimizer, tokens[dist.get_rank()][None])):

            def closure(each: nn.Module = each, updater: Any = updater, mine: torch.Tensor = mine) -> torch.Tensor:
                updater.zero_grad()
                loss = torch.stack([loss_of(each, one) for one in mine]).mean()
                loss.backward()
                return loss

            updater.step(closure)
    assert_same_weights(sharded, plain)
    for p, entry in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.state[entry]["slow"].full_tensor(), reference.state[p]["slow"], rtol=2e-5, atol=2e-5
        )
