"""Names that a value may have in checkpoints of other runs, or of other implementations of a layer."""

import re
from collections.abc import Iterable, Iterator

from megatron.fsdp.checkpoint.matching import Rows
from megatron.fsdp.mcore.parameter_names import FUSED_DOWN

_WRAPPERS = re.compile(r"^(optimizer\.(?:state|param_to_group_meta)\.|model\.)((?:module\.)+)")
_STEP = re.compile(r"optimizer\.(state|param_to_group_meta)\.(.*?)(_[wv])?\.step")
_RENAMED = (
    # A layer's norms, in layers of Megatron's own and in Transformer Engine's fused ones.
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    # The layer that predicts a further token, in megatron-core 0.19 and after it.
    (".mtp_model_layer.", ".transformer_layer."),
    # A layer's norm, where it is part of a fused down projection; groups have the module's own name.
    (".input_layernorm.", f".self_attention.{FUSED_DOWN}.layer_norm_"),
)
# What a fused down projection is apart.
_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


def other_names(key: str) -> list[str | Rows]:
    """What checkpoints of other runs, or of other layers' implementations, have in place of a value."""
    found = [key]
    for name in found:  # and of what is found: a name may differ in several words
        found += [other for other in _unique(_variants(name)) if other not in found]
    found = _renamed(found)
    return [*found[1:], *(rows for name in found if (rows := _fused(name, key)) is not None)]


def _variants(name: str) -> Iterator[str]:
    """Names that differ from one in a single way."""
    step = _STEP.fullmatch(name)
    if step is not None and step[1] == "state":
        yield f"optimizer.param_to_group_meta.{step[2]}.step"
    elif step is not None:
        yield from (f"optimizer.state.{step[2]}{half}.step" for half in ("", "_w"))
    if name.startswith("rng_state."):
        yield re.sub(r"\(\d+, \d+\)", "(0, 0)", name, count=1)
    for one, other in (*_RENAMED, *(pair[::-1] for pair in _RENAMED)):
        if one in name:
            yield name.replace(one, other)
    if name.startswith("optimizer.param_to_group_meta."):
        yield from (name.replace(f".{down}.", f".{FUSED_DOWN}.") for down in _DOWN)
        yield from (name.replace(f".{FUSED_DOWN}.", f".{down}.") for down in _DOWN)


def _renamed(names: list[str]) -> list[str]:
    """Names, and those that they have in a run of another precision: one in bf16 has one wrapper more."""
    found = list(names)
    for name in names:
        wrappers = _WRAPPERS.match(name)
        if wrappers is not None:
            found += [name.replace(wrappers[2], "module." * n, 1) for n in (2, 3)]
    return _unique(found)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _fused(name: str, key: str) -> Rows | None:
    """The tensor that has the rows of both down projections, as a run that fuses them once stored it.

    Args:
        name: One that a value may have.
        key: That by which it is wanted.
    """
    down = next((down for down in _DOWN if f".{down}." in name and f".{down}." in key), None)
    if down is None or name.startswith("optimizer.param_to_group_meta."):
        return None
    parts = tuple(key.replace(f".{down}.", f".{part}.") for part in _DOWN)
    return Rows(name.replace(f".{down}.", f".{FUSED_DOWN}."), parts)
