"""Determines how a torch_dist checkpoint stores its model: which tensors are stacked, and whose layers it has."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.rewrites import TORCH_DIST, Facts, gated_parameters, to_canonical
from megatron.fsdp.naming.names import STORED, Name

_NORM = re.compile(r"^(.*layers\.(?:\d+\.)?)(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_weight$")
_LINEAR_STATE = re.compile(r"layers\..*linear_(?:qkv|proj|fc1|fc2)\._extra_state/shard_")


def read_facts(reader: CheckpointReader, model: Tensors, args: argparse.Namespace, options: ReadOptions) -> Facts:
    """Determine how the model's tensors are stored.

    Args:
        reader: The checkpoint.
        model: The tensors of its model, by stored key.
        args: Its training arguments.
        options: Facts that the checkpoint may not record.

    Raises:
        ValueError: The checkpoint does not record facts that names depend on, or contradicts the options.
    """
    names = [Name.parse(key) for key in model]
    experts = [name for name in names if name.style == STORED]
    local = _is_local(reader, model, args, options, bool(experts))
    facts = Facts(
        stacked=frozenset(name.block for name in names if name.block and not name.layer),
        separate_norms=bool(local),
        grouped_experts=bool(experts) and _is_grouped(args, options, local),
        single_experts=any(name.expert for name in experts),
        stored_halves=any(name.half for name in names),
    )
    gated = gated_parameters(to_canonical(model, TORCH_DIST, facts))
    return replace(facts, gated=checked_gates(gated, options))


def checked_gates(found: frozenset[str], options: ReadOptions) -> frozenset[str]:
    """The parameters that the canonical view splits into halves.

    Args:
        found: Names of the first layers of gated MLPs.
        options: Modules that must have such layers.

    Raises:
        ValueError: The layers contradict the options.
    """
    if options.swiglu and not found:
        raise ValueError("--swiglu: expected SwiGLU layers; the checkpoint has none.")
    outside = sorted(name for name in found if not name.startswith(options.swiglu_modules or ("",)))
    if outside:
        raise ValueError(
            f"--swiglu-modules: expected SwiGLU layers under {', '.join(options.swiglu_modules)} only; by its shape, "
            f"{outside[0]} is one."
        )
    for module in options.swiglu_modules:
        if not any(name.startswith(module) for name in found):
            raise ValueError(f"--swiglu-modules: expected SwiGLU layers under {module}; the checkpoint has none.")
    return found


def _is_local(
    reader: CheckpointReader, model: Tensors, args: argparse.Namespace, options: ReadOptions, experts: bool
) -> bool | None:
    """Whether layers are Megatron's local ones, not Transformer Engine's; None if no name depends on it."""
    norms = [match[1] for match in map(_NORM.match, model) if match]
    if not norms and not experts:
        return None
    # A norm that is named after a linear layer which does not exist is a module: Transformer Engine has no such name.
    shown = any(
        f"{layer}mlp.linear_fc1.layer_norm_weight" in model and f"{layer}mlp.linear_fc1.weight" not in model
        for layer in norms
    )
    state = next((key for key in reader.objects if _LINEAR_STATE.search(key)), None)
    found = {"local": True, "transformer_engine": False, "inference_optimized": False}.get(
        str(getattr(args, "transformer_impl", None))
    )
    # A conversion writes None for the extra states of either implementation, so these show nothing.
    converted = reader.checksums is not None and bool(reader.checksums.fingerprint)
    if shown:
        found = True
    elif state is not None and (found is None or not converted):
        found = _is_none(reader, state)
    if options.transformer_impl is not None:
        return asked(options, found) == "local"
    if found is None:
        raise ValueError(
            f"{reader.path}: neither its arguments nor its extra states tell whether its layers are Megatron's "
            "local ones or Transformer Engine's, which decides how norms are named. Give --transformer-impl."
        )
    return found


def asked(options: ReadOptions, local: bool | None) -> str | None:
    """The implementation of layers that the user gives.

    Args:
        options: Facts that the checkpoint may not record.
        local: Whether the checkpoint has Megatron's local layers; None if it does not record it.

    Raises:
        ValueError: The checkpoint contradicts the options.
    """
    if options.transformer_impl is not None and local not in (None, options.transformer_impl == "local"):
        raise ValueError(
            f"--transformer-impl {options.transformer_impl}: the checkpoint has layers of the other implementation."
        )
    return options.transformer_impl


def _is_none(reader: CheckpointReader, key: str) -> bool:
    """Whether an extra state is None, as for Megatron's local linear layers. Transformer Engine's has a value."""
    try:
        return reader.read_object(key) in ([None], None)
    except UnsafePickle:
        return False


def _is_grouped(args: argparse.Namespace, options: ReadOptions, local: bool | None) -> bool:
    """Whether the experts of a layer are one grouped module."""
    if getattr(args, "moe_use_legacy_grouped_gemm", False):
        raise NotImplementedError(
            "experts of --moe-use-legacy-grouped-gemm, which current versions of Megatron no longer have."
        )
    found = False if local else getattr(args, "moe_grouped_gemm", None)
    if options.moe_grouped_gemm is not None:
        if found not in (None, options.moe_grouped_gemm):
            raise ValueError(f"--moe-grouped-gemm: expected {found}, as in the checkpoint; got the opposite.")
        return options.moe_grouped_gemm
    if found is None:
        raise ValueError(
            "the checkpoint's arguments do not tell whether experts are grouped, which decides how they are named. "
            "Give --moe-grouped-gemm or --no-moe-grouped-gemm."
        )
    return bool(found)


def written_facts(weights: Tensors, args: argparse.Namespace, layout: Mapping[str, Any]) -> Facts:
    """Determine how to store a model.

    Args:
        weights: The weights, by canonical name.
        args: Training arguments.
        layout: The layout to copy, from :func:`layout_of`. Empty: as Megatron-Core stores a model, with equal layers
            stacked in one tensor, and the experts of a layer too.
    """
    stacked = frozenset(layout["stacked"]) if layout else _stackable(weights, args)
    return Facts(
        stacked=stacked,
        single_experts=bool(layout.get("single_experts", False)),
        stored_halves=bool(layout.get("stored_halves", False)),
        sections=_sections(weights),
    )


def layout_of(facts: Facts) -> dict[str, Any]:
    """The layout that :func:`written_facts` needs to store another model in the same way, as plain data."""
    return {
        "stacked": sorted(facts.stacked),
        "single_experts": facts.single_experts,
        "stored_halves": facts.stored_halves,
    }


def _stackable(weights: Tensors, args: argparse.Namespace) -> frozenset[str]:
    """Prefixes of layers that are equal. Layers that the arguments allow to differ do not count as equal."""
    if _layers_may_differ(args) or any(".mixer." in name for name in weights):
        return frozenset()
    shapes: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
    for name, tensor in weights.items():
        place = Name.parse(name)
        if place.is_stackable:
            rest = name.removeprefix(place.beginning)
            shapes.setdefault(place.block, {}).setdefault(place.layer, {})[rest] = tensor.shape
    return frozenset(
        block
        for block, layers in shapes.items()
        if all(layer == next(iter(layers.values())) for layer in layers.values())
        and set(layers) == {str(index) for index in range(len(layers))}
    )


def _layers_may_differ(args: argparse.Namespace) -> bool:
    for name in ("moe_layer_freq", "linear_attention_freq"):
        frequency = getattr(args, name, None)
        if isinstance(frequency, list) or (isinstance(frequency, int) and frequency > 1):
            return True
    # The second name is misspelled in Megatron.
    options = ("heterogeneous_layers_config_path", "hetereogenous_dist_checkpoint", "heterogeneous_block_specs")
    return any(getattr(args, name, None) for name in options)


def _sections(weights: Tensors) -> dict[str, tuple[int, ...]]:
    """The number of rows of each part of the fused projections of state-space layers, derived from shapes."""
    sections: dict[str, tuple[int, ...]] = {}
    for name in weights:
        layer = name.removesuffix("in_proj.weight")
        convolutions = [f"{layer}conv1d{dot}{kind}" for dot in "._" for kind in ("weight", "bias")]
        found = [convolution for convolution in convolutions if convolution in weights]
        if layer == name or f"{layer}A_log" not in weights or not found:
            continue
        heads, rows, channels = (weights[key].shape[0] for key in (f"{layer}A_log", name, found[0]))
        if layer.endswith(".mixer."):
            inner = rows - channels - heads
            state = (channels - inner) // 2
            convolution = (inner, state, state)
            sections[name] = (inner, *convolution, heads)
        else:
            value = rows - channels - 2 * heads
            key = (channels - value) // 2
            convolution = (key, key, value)
            sections[name] = (*convolution, value, heads, heads)
        sections |= dict.fromkeys(found, convolution)
    return sections
