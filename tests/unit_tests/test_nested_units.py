"""Units inside units: the innermost unit owns a parameter. That training is equal is in test_training.py."""

from megatron_fsdp import fully_shard_model
from tests.ranks import RankPool
from tests.training_models import Gate, Levels, Middle, Outer


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
