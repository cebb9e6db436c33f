"""The lifecycle of a unit's weights is a table."""

import itertools

import pytest

from megatron.fsdp.runtime.unit import TRANSITIONS, Unit, WeightState


@pytest.mark.parametrize(("before", "after"), list(itertools.product(WeightState, WeightState)))
def test_transitions(before: WeightState, after: WeightState) -> None:
    unit = Unit("blocks.3", groups=[])
    unit.state = before
    if after in TRANSITIONS[before]:
        unit.to(after)
        assert unit.state is after
        return
    with pytest.raises(RuntimeError, match=f"FSDP unit blocks.3: cannot go from '{before.value}' to '{after.value}'"):
        unit.to(after)
    assert unit.state is before


def test_everything_may_go_to_rest() -> None:
    assert all(WeightState.SHARDED in allowed for allowed in TRANSITIONS.values())


def test_nothing_is_used_that_was_not_gathered() -> None:
    in_use = {WeightState.FORWARD, WeightState.BACKWARD, WeightState.UNSHARDED}
    assert not in_use & set(TRANSITIONS[WeightState.SHARDED])
