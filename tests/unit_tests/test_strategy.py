"""The table of sharding strategies."""

import re
from pathlib import Path

import megatron.fsdp
from megatron.fsdp.sharding.strategy import INNER, resolve_strategy


def test_zero_stage_is_the_position_in_the_table() -> None:
    assert [resolve_strategy(stage) for stage in range(4)] == list(INNER)


def test_each_stage_shards_one_kind_more() -> None:
    stages = [(p.shards_parameters, p.shards_gradients, p.shards_optimizer) for p in INNER.values()]
    assert stages == [(False, False, False), (False, False, True), (False, True, True), (True, True, True)]


def test_no_other_file_of_the_engine_names_a_strategy_in_code() -> None:
    folder = Path(megatron.fsdp.__file__).parent
    allowed = {"sharding/strategy.py", "config.py"}  # the table and the default
    others = ("api/", "mcore/", "checkpoint/", "convert/", "tools/")  # not the engine
    pattern = re.compile(r"[\"'](optim|optim_grads|optim_grads_params)[\"']")
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        if name not in allowed and not name.startswith(others):
            assert not pattern.search(path.read_text()), f"{path.name} names a strategy"
