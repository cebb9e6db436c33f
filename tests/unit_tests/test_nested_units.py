"""Units inside units: the innermost unit owns a parameter, and each is unsharded and reduced separately."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fully_shard_model
from tests.models import STRATEGIES, Block, adamw, assert_same_training, batches
from tests.ranks import RankPool


class Gate(nn.Module):
    """The innermost unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.weight)


class Middle(Block):
    """A unit that uses direct parameters before and after it calls the unit inside."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = Gate(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(super().forward(x)) @ self.down.weight @ self.up.weight


class Outer(nn.Module):
    """A unit around two units, with direct parameters. Its inner units may be recomputed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = nn.ModuleList(Middle(width) for _ in range(2))
        self.after = nn.Linear(width, width)
        self.recompute: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for module in self.inner:
            x = module(x) if self.recompute is None else checkpoint(module, x, use_reentrant=self.recompute)
        return torch.tanh(self.after(x))


class Levels(nn.Module):
    """Outer units, which may be recomputed: ``None``, or ``use_reentrant``."""

    def __init__(self, outer: bool | None = None, inner: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 7)
        self.outer = nn.ModuleList(Outer(7) for _ in range(2))
        self.head = nn.Linear(7, 31)
        self.recompute = outer
        for module in self.outer:
            module.recompute = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for module in self.outer:
            x = module(x) if self.recompute is None else checkpoint(module, x, use_reentrant=self.recompute)
        return self.head(x)


def _owners() -> None:
    sharded = fully_shard_model(Levels(), fsdp_unit_modules=[Outer, Middle, Gate])
    inside = [f"outer.{i}{name}" for i in range(2) for name in _PARTS]
    assert sharded.engine.unit_names == ["", *inside]
    for unit in sharded.engine.units:
        for name in (entry.name for group in unit.groups for entry in group.params):
            around = [
                other for other in sharded.engine.unit_names if f"{name}.".startswith(f"{other}." if other else "")
            ]
            assert max(around, key=len) == unit.name
    root = sharded.engine.units[0]
    assert [child.name for child in root.children] == ["outer.0", "outer.1"]
    assert [child.name for child in root.children[0].children] == ["outer.0.inner.0", "outer.0.inner.1"]


_PARTS = ["", ".inner.0", ".inner.0.gate", ".inner.1", ".inner.1.gate"]


def test_the_innermost_unit_owns(ranks: RankPool) -> None:
    ranks.run(2, _owners)


def _train(strategy: str, units: list[type[nn.Module]], outer: bool | None, inner: bool | None) -> None:
    torch.manual_seed(3)
    data = batches(steps=3, per_step=2 * dist.get_world_size())
    sharded = assert_same_training(
        Levels(outer, inner), data, adamw, fsdp_unit_modules=units, zero_dp_strategy=strategy
    )
    assert all(unit.state.value == "sharded" for unit in sharded.engine.units)
    assert not any(unit.has_gradients() for unit in sharded.engine.units)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("outer", [None, False, True])
def test_three_levels(ranks: RankPool, strategy: str, outer: bool | None) -> None:
    ranks.run(2, _train, strategy, [Outer, Middle, Gate], outer, None)


@pytest.mark.parametrize("units", [[Outer, Middle, Gate], [Outer, Gate]])
@pytest.mark.parametrize(("outer", "inner"), [(None, False), (None, True), (False, False), (True, True), (True, False)])
def test_recomputed_at_two_levels(ranks: RankPool, units: list, outer: bool | None, inner: bool | None) -> None:
    ranks.run(2, _train, "optim_grads_params", units, outer, inner)
