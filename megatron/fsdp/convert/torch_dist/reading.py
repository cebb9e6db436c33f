"""Reads a torch_dist checkpoint of any kind into the canonical view."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.checksums import read_json
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.reader import COMMON, COMMON_KEY, FORMAT_FILE, CheckpointReader, common_state
from megatron.fsdp.convert import groups
from megatron.fsdp.convert.canonical import SCALER, Tensors, TrainingState, compute_dtype, is_buffer, transposed
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST, Facts, to_canonical
from megatron.fsdp.convert.torch_dist.buffers import is_buffer_key, read_buffers
from megatron.fsdp.convert.torch_dist.facts import layout_of, read_facts
from megatron.fsdp.convert.torch_dist.flat import ungrid

# Names under which optimizer state contains the main weights.
MAIN_WEIGHTS = ("param", "fp32_param", "master_param")
# Common state that every format has. The rest is kept for a conversion back.
COMMON_KEYS = ("args", "checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<key>.+)$")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_GROUPS = re.compile(r"^(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1$")
_SCALER = re.compile(rf"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.{SCALER}/shard_0_1$")
_RNG = re.compile(r"^rng_state/shard_(\d+)\.(\d+)_\d+\.\d+$")
# Arguments of models whose weights are quantized beyond their dtype.
_QUANTIZED = ("fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Optimizer(NamedTuple):
    """Optimizer state by kind and canonical name, and the groups that the checkpoint lists."""

    states: dict[str, Tensors]
    groups: list[groups.Group]


def read(reader: CheckpointReader, options: ReadOptions) -> TrainingState:
    """Read a torch_dist checkpoint into the canonical view.

    Main weights become the weights. Each block is compared with the model's weights when it is read, and reading raises
    ValueError if the main weights do not round to them: their position was derived wrongly, or they were saved wrongly.
    Models that compute in float8 or float4 have no weights to compare with.

    Args:
        reader: The checkpoint.
        options: Facts that the checkpoint may not record.

    Raises:
        ValueError: The checkpoint lacks information, or contradicts itself or the options.
        NotImplementedError: Its optimizer state is of a kind that cannot be read.
    """
    common = common_state(reader.path, options.verify)
    args = common.get("args") or options.args
    model = {key: tensor for key, tensor in reader.tensors.items() if not _OPTIMIZER.match(key)}
    facts = read_facts(reader, model, args, options)
    live = to_canonical(model, TORCH_DIST, facts)
    weights = {name: tensor for name, tensor in live.items() if not is_buffer(name)}
    optimizer = _optimizer(reader, model, facts, common, args) if options.optimizer else _Optimizer({}, [])
    _check_states(reader, optimizer.states, weights)
    main = next((kind for kind in MAIN_WEIGHTS if kind in optimizer.states), None)
    mains = optimizer.states.pop(main) if main else {}
    if not any(getattr(args, name, False) for name in _QUANTIZED):
        mains = {name: checked(tensor, weights[name], name) for name, tensor in mains.items()}
    state_of = transposed(optimizer.states)
    mapping = groups.read_map(options.group_map) if options.group_map else None
    held = {name: weights[name] for name in state_of}
    muon = [name for name, state in state_of.items() if groups.MOMENTUM in state]
    return TrainingState(
        weights={name: mains.get(name, tensor) for name, tensor in weights.items()},
        common=_common(reader, common) | (_scaler(reader, common) if options.optimizer else {}),
        buffers={name: tensor for name, tensor in live.items() if is_buffer(name)},
        optimizer_state=state_of,
        group_of=groups.assign(held, optimizer.groups, args, mapping or None, muon) if held else {},
        model_dtypes={n: t.dtype for n, t in weights.items() if t.dtype != compute_dtype(args)},
        torch_dist=_kept(reader, common, facts) if options.keeps_rest else {},
        fsdp_dtensor=reader.read_object(FSDP_DTENSOR) if FSDP_DTENSOR in reader.objects else {},
        source=reader.fingerprint,
    )


def _optimizer(
    reader: CheckpointReader, model: Tensors, facts: Facts, common: Mapping[str, Any], args: argparse.Namespace
) -> _Optimizer:
    refused = next((key for key in reader.objects if key.endswith(".param_state/shard_0_1")), None)
    if refused is not None:
        raise NotImplementedError(
            f"{reader.path}: optimizer state of the kind dp_zero_gather_scatter ({refused}) is one pickle per rank; "
            "load it with Megatron and save it with --dist-ckpt-optim-fully-reshardable."
        )
    if any(is_buffer_key(key) for key in reader.tensors):
        return _Optimizer(read_buffers(reader, model, facts, args), _groups_in_objects(reader))
    stored: dict[str, Tensors] = {}
    for key, tensor in reader.tensors.items():
        match = _STATE.match(key)
        if match is None:
            continue
        if match["key"] not in model:
            raise ValueError(f"{reader.path}: {key} is optimizer state of a tensor that the checkpoint does not have.")
        shape = model[match["key"]].shape
        full = tensor if tensor.shape == shape else ungrid(tensor, shape)
        stored.setdefault(match["kind"], {})[match["key"]] = full
    states = {kind: to_canonical(tensors, TORCH_DIST, facts) for kind, tensors in stored.items()}
    return _Optimizer(states, [group for chain in groups.chains(common.get("optimizer")) for group in chain])


def _groups_in_objects(reader: CheckpointReader) -> list[groups.Group]:
    """The groups of every optimizer of the chain. Each model-parallel rank lists them, and all must agree."""
    found: dict[int, list[groups.Group]] = {}
    for key in reader.objects:
        match = _GROUPS.match(key)
        if match is None:
            continue
        value = reader.read_object(key)
        listed = groups.chains(value[0] if isinstance(value, list) and value else value)
        if len(listed) != 1:
            raise ValueError(f"{reader.path}: expected the groups of one optimizer in {key}; got {len(listed)}.")
        chain = int(match["chain"] or 0)
        if found.setdefault(chain, listed[0]) != listed[0]:
            raise ValueError(f"{reader.path}: {key} lists other optimizer groups than another rank does.")
    return [group for chain in sorted(found) for group in found[chain]]


def _check_states(reader: CheckpointReader, states: Mapping[str, Tensors], weights: Tensors) -> None:
    """Check that all kinds of state exist for the same parameters, and are floating-point numbers."""
    names = {name for tensors in states.values() for name in tensors}
    muon = set(states.get(groups.MOMENTUM, ()))
    for kind, tensors in states.items():
        # A float32 parameter of the model is also the main weight, and so is not stored twice.
        own = {n for n in names & set(weights) if kind in MAIN_WEIGHTS and weights[n].dtype == torch.float32}
        # Adam's moments are those of the parameters that are not Muon's.
        others = set() if kind in MAIN_WEIGHTS else names - muon if kind == groups.MOMENTUM else muon
        missing = sorted(names - set(tensors) - own - others)
        if missing:
            raise ValueError(
                f"{reader.path}: expected {kind} of {missing[0]}, which has other optimizer state; got none."
            )
        odd = sorted(name for name, tensor in tensors.items() if not tensor.dtype.is_floating_point)
        if odd:
            raise NotImplementedError(
                f"{reader.path}: {kind} of {odd[0]} is {tensors[odd[0]].dtype}, as in a precision-aware optimizer that "
                "stores remainders; save the checkpoint without it."
            )
    unknown = sorted(names - set(weights))
    if unknown:
        raise ValueError(f"{reader.path}: optimizer state of {unknown[0]}, which is no parameter of the model.")


def checked(main: LazyTensor, weight: LazyTensor, name: str) -> LazyTensor:
    """Compare main weights with the model's weights, block by block, when they are read.

    Args:
        main: The main weights.
        weight: The model's weights, which were cast from them.
        name: The parameter's name, for the ValueError that reading raises if they differ.
    """

    def read(region: Region) -> torch.Tensor:
        found = main.read(region)
        bits = _INTEGERS[weight.dtype.itemsize]
        if not torch.equal(found.to(weight.dtype).view(bits), weight.read(region).contiguous().view(bits)):
            raise ValueError(
                f"{name}: the optimizer's main weights do not round to the model's weights. Either they are not where "
                "they were expected in the checkpoint, or they were saved wrongly, as Megatron-Core does for "
                "fully_reshardable state of gradient buffers with padding between buckets. --no-optimizer converts "
                "only the model's weights."
            )
        return found

    return LazyTensor(main.shape, main.dtype, read)


def _common(reader: CheckpointReader, common: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: common[key] for key in (*COMMON_KEYS, "content_metadata") if key in common}
    states = {}
    for key in reader.objects:
        match = _RNG.match(key)
        if match is not None:
            value = reader.read_object(key)
            states[int(match[1]), int(match[2])] = value[0] if isinstance(value, list) and value else value
    return {**found, "rng_state": states} if states else found


def layout_and_format(path: Path) -> dict[str, Any]:
    """The layout of a checkpoint, in the form of :attr:`TrainingState.torch_dist`, for writing another one alike.

    Args:
        path: A torch_dist checkpoint. Of its data, only the extra state of a module is read.

    Raises:
        ValueError: The checkpoint has another format.
    """
    reader = CheckpointReader(path)
    if reader.format != TORCH_DIST:
        raise ValueError(f"{path}: expected a torch_dist checkpoint to copy the layout of; got {reader.format}.")
    common = common_state(path)
    model = {key: tensor for key, tensor in reader.tensors.items() if not _OPTIMIZER.match(key)}
    facts = read_facts(reader, model, common.get("args") or argparse.Namespace(), ReadOptions())
    kept = _kept(reader, common, facts)
    return {key: kept[key] for key in ("layout", "content_metadata", "format", "common_file")}


def _scaler(reader: CheckpointReader, common: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the gradient scaler: in the common state, or in an object for each model-parallel rank."""
    listed = common.get("optimizer")
    parts = [listed, *listed.values()] if isinstance(listed, Mapping) else []
    found = [part[SCALER] for part in parts if isinstance(part, Mapping) and SCALER in part]
    values = [reader.read_object(key) for key in reader.objects if _SCALER.match(key)]
    found += [value[0] if isinstance(value, list) else value for value in values]
    numbers = groups.scaler_as_numbers(found)
    return {SCALER: numbers} if numbers else {}


def _kept(reader: CheckpointReader, common: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Data that only a conversion back needs. Random states and groups are in the canonical view already."""
    # Copy extra states as bytes: only the modules that made them can interpret them.
    objects = {
        key: reader.object_bytes(key)
        for key in reader.objects
        if key not in (COMMON_KEY, FSDP_DTENSOR) and not _RNG.match(key) and not _OPTIMIZER.match(key)
    }
    listed = ("optimizer", "content_metadata", *COMMON_KEYS)
    return {
        "layout": layout_of(facts),
        "common": {key: value for key, value in common.items() if key not in listed},
        "optimizer": common.get("optimizer"),
        "content_metadata": common.get("content_metadata"),
        "objects": objects,
        "format": read_json(reader.path / FORMAT_FILE),
        "common_file": (reader.path / COMMON).is_file(),
    }
