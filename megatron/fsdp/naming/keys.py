"""The keys of an ``fsdp_dtensor`` checkpoint, and the keys under which other runs stored the same value."""

import re
from collections.abc import Iterable, Iterator

from megatron.fsdp.checkpoint.matching import Rows
from megatron.fsdp.naming.names import DOWN, DOWN_NORM, DOWN_PROJECTIONS, FUSED_DOWN, NORMS, OTHER_NORMS, PREDICTION

_GROUPS = "optimizer.param_to_group_meta."
_WRAPPERS = re.compile(r"^(optimizer\.(?:state|param_to_group_meta)\.|model\.)((?:module\.)+)")
_STEP = re.compile(r"optimizer\.(state|param_to_group_meta)\.(.*?)(_[wv])?\.step")


def other_names(key: str) -> list[str | Rows]:
    """The keys to look for if a checkpoint lacks a key, the likeliest first.

    Checkpoints differ with the implementation of layers, the version of Megatron-Core, the precision, and the optimizer
    of the run that wrote them.
    """
    found = [key]
    for name in found:  # grows while it is walked: a name may differ in several words
        found += [other for other in _unique(_variants(name)) if other not in found]
    found = _with_other_wrappers(found)
    return [*found[1:], *(rows for name in found if (rows := _fused(name, key)) is not None)]


def _variants(key: str) -> Iterator[str]:
    """Keys that differ from one in a single way."""
    step = _STEP.fullmatch(key)
    if step is not None and step[1] == "state":
        yield f"{_GROUPS}{step[2]}.step"
    elif step is not None:
        yield from (f"optimizer.state.{step[2]}{half}.step" for half in ("", "_w"))
    if key.startswith("rng_state."):
        yield re.sub(r"\(\d+, \d+\)", "(0, 0)", key, count=1)
    down = DOWN_PROJECTIONS if key.startswith(_GROUPS) else ()
    for alias in (*NORMS, PREDICTION, DOWN_NORM, *OTHER_NORMS, *down):
        yield from (alias.to_live(key), alias.to_stored(key))


def _with_other_wrappers(keys: list[str]) -> list[str]:
    """Keys, and those of a run in another precision: a model in low precision has one more wrapper."""
    found = list(keys)
    for key in keys:
        wrappers = _WRAPPERS.match(key)
        if wrappers is not None:
            found += [key.replace(wrappers[2], "module." * n, 1) for n in (2, 3)]
    return _unique(found)


def _unique(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))


def _fused(key: str, wanted: str) -> Rows | None:
    """The tensor that holds the rows of both down projections, as a run that fuses them once stored it.

    Args:
        key: One under which the value may be stored.
        wanted: The key of the value itself.
    """
    down = next((down for down in DOWN if f".{down}." in key and f".{down}." in wanted), None)
    if down is None or key.startswith(_GROUPS):
        return None
    parts = tuple(wanted.replace(f".{down}.", f".{part}.") for part in DOWN)
    return Rows(key.replace(f".{down}.", f".{FUSED_DOWN}."), parts)
