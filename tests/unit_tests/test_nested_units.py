"""Units inside units: the innermost unit owns a parameter. That training is equal is in test_training.py."""

import copy
import logging

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import Outermost, fully_shard_model
from tests.models import assert_same_training, batches, device, logged
from tests.ranks import RankPool, on_ranks
from tests.training_models import Gate, Levels, Middle, Outer

_PARTS = ["", ".inner.0", ".inner.0.gate", ".inner.1", ".inner.1.gate"]


@on_ranks(2)
def test_the_innermost_unit_owns() -> None:
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


@on_ranks(2)
def test_the_outermost_unit_owns_if_asked() -> None:
    """A class that is inside others and alone is a unit where it is alone, which leaving it out would not give."""
    torch.manual_seed(1)
    model = nn.Sequential(Levels(), Middle(31)).to(device())
    coarse = {"", "0.outer.0", "0.outer.1", "1"}
    owners = {name for name, each in model.named_modules() if each._parameters and name.startswith(("0.outer.", "1."))}
    for fine in (False, True):
        for kinds in (Outermost([Outer, Middle, Gate]), Outermost([Outer, "Middle", Gate])):
            assert Outermost(Outer) == (Outer,) and Outermost("Outer") == ("Outer",)
            sharded = fully_shard_model(
                copy.deepcopy(model), fsdp_unit_modules=kinds, enable_fine_grained_param_gather=fine
            )
            assert set(sharded.engine.unit_names) == (coarse | owners if fine else coarse)
    assert_same_training(model, batches(2, dist.get_world_size()), fsdp_unit_modules=kinds)


@on_ranks(2)
def test_a_unit_with_units_inside_runs_by_itself() -> None:
    torch.manual_seed(1)
    plain = Levels().to(device())
    sharded = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[Outer, Middle, Gate])
    x = torch.randn(2, 7, device=device())
    with torch.no_grad():
        torch.testing.assert_close(sharded.module.outer[0](x), plain.outer[0](x))


def _log() -> list[list[str]]:
    found = []
    for classes, fine in (([Outer, Middle, Gate], False), ([Outer], False), ([Outer, Gate], True)):
        with logged(logging.INFO) as texts:
            fully_shard_model(Levels(), fsdp_unit_modules=classes, enable_fine_grained_param_gather=fine)
        found.append([text for text in texts if "inside other units" in text])
    return found


def test_nesting_is_logged_once(ranks: RankPool) -> None:
    (first, alone, fine), other = ranks.run(2, _log)
    assert len(first) == 1 and "8 units are inside other units, such as outer.0.inner.0 in outer.0." in first[0]
    assert first[0].endswith("to the outermost. For that, fsdp_unit_modules=megatron.fsdp.Outermost([...]).")
    assert not alone and not fine and not any(other)
