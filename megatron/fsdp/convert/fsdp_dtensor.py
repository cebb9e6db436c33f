"""Reads and writes ``fsdp_dtensor`` checkpoints: plain DCP with one key per parameter."""

import argparse
import io
import pickle
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from megatron.fsdp.checkpoint import lazy, safe_pickle
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.writer import Draft, RawObject
from megatron.fsdp.convert import groups
from megatron.fsdp.convert.canonical import SCALER, Tensors, TrainingState, compute_dtype, is_buffer, transposed
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.rewrites import (
    FSDP_DTENSOR,
    Facts,
    from_canonical,
    gated_parameters,
    has_own_layers,
    to_canonical,
)
from megatron.fsdp.convert.torch_dist.facts import asked, checked_gates
from megatron.fsdp.naming.names import live_names, live_prediction_name, stored_names, without_half

# The object in which a conversion from torch_dist stores data for the conversion back.
KEPT = "torch_dist"
CHECKPOINT_VERSION = 3.0

_WEIGHT = re.compile(r"^model\.(?:module\.)*(?P<name>.+)$")
_STATE = re.compile(r"^optimizer\.state\.(?:module\.)*(?P<name>.+)\.(?P<kind>\w+)$")
_META = re.compile(r"^optimizer\.param_to_group_meta\.(?:module\.)*(?P<name>.+)\.(?P<field>\w+)$")
_RNG = re.compile(r"^rng_state\.\((?P<pp>\d+), (?P<tp>\d+)\)\.(?P<index>\d+)\.(?P<rest>.+)$")
_TRACKER = "rng_tracker_states."
_SINGLE = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_DICTS = ("opt_param_scheduler", SCALER)
_STEP = "step"
# Objects that are read elsewhere, or repeat what other keys tell.
_REPEATED = (*(f"{name}." for name in _DICTS), "layouts.", "optimizer.param_groups.")


class _Model(NamedTuple):
    """Tensors by name, and the tensors of each optimizer state by name."""

    tensors: Tensors
    states: dict[str, Tensors]


def read(reader: CheckpointReader, options: ReadOptions) -> TrainingState:
    """Read an ``fsdp_dtensor`` checkpoint into the canonical view.

    Args:
        reader: The checkpoint.
        options: Facts that the checkpoint may not record.

    Raises:
        ValueError: It holds tensors that belong to no model, optimizer or random state, or contradicts the options.
    """
    common = _common(reader)
    args = common.get("args") or argparse.Namespace()
    facts = Facts(
        q_lora_rank=getattr(args, "q_lora_rank", None) or 0,
        tensor_parallel=getattr(args, "tensor_model_parallel_size", None) or 1,
    )
    stored = _model(reader)
    live = to_canonical(stored.tensors, FSDP_DTENSOR, facts)
    checked_gates(gated_parameters(live), options)
    asked(options, has_own_layers(live))
    weights = {name: tensor for name, tensor in live.items() if not is_buffer(name)}
    if not options.optimizer:
        stored.states.clear()
    steps = stored.states.pop(_STEP, {})
    states = {kind: to_canonical(tensors, FSDP_DTENSOR, facts) for kind, tensors in stored.states.items()}
    group_of = _groups(reader, steps) if options.optimizer else {}
    kept = dict(reader.read_object(KEPT)) if KEPT in reader.objects else {}
    dtypes = {name: dtype for name, dtype in kept.pop("model_dtypes", {}).items() if name in weights}
    # Weights that no optimizer holds are stored in the model's dtype.
    frozen = {n: t.dtype for n, t in weights.items() if group_of and without_half(n) not in group_of}
    return TrainingState(
        weights=weights,
        common=common,
        buffers={name: tensor for name, tensor in live.items() if is_buffer(name)},
        optimizer_state=transposed(states),
        group_of=group_of,
        model_dtypes={n: d for n, d in (frozen | dtypes).items() if d != compute_dtype(args)},
        torch_dist=kept,
        fsdp_dtensor=_unknown(reader),
        source=reader.fingerprint,
    )


def _model(reader: CheckpointReader) -> _Model:
    tensors: Tensors = {}
    states: dict[str, Tensors] = {}
    for key, tensor in reader.tensors.items():
        if match := _WEIGHT.match(key):
            tensors[match["name"]] = tensor
        elif match := _STATE.match(key):
            states.setdefault(match["kind"], {})[match["name"]] = tensor
        elif not _RNG.match(key):
            raise ValueError(f"{reader.path}: expected weights, optimizer state and random states; got {key}.")
    return _Model(tensors, states)


def _groups(reader: CheckpointReader, steps: Tensors) -> dict[str, groups.Group]:
    """The group of each parameter, including the step count of optimizers that store it in their state."""
    group_of: dict[str, groups.Group] = {}
    # Thousands of small objects have only a few different values.
    known: dict[bytes, Any] = {}
    for key in reader.objects:
        match = _META.match(key)
        if match is None:
            continue
        data = reader.object_bytes(key)
        if data not in known:
            known[data] = safe_pickle.load_torch(io.BytesIO(data), f"{reader.path} ({key})")
        for name in stored_names(match["name"]):
            group_of.setdefault(name, {})[match["field"]] = known[data]
    for stored, step in steps.items():
        for name in stored_names(stored):
            group = group_of.get(without_half(name), {})
            if _STEP not in group:
                group[_STEP] = step.full_tensor().item()
    return group_of


def _unknown(reader: CheckpointReader) -> dict[str, tuple[tuple[Any, ...], bytes]]:
    """Objects of training scripts and of later versions, to be kept as bytes, with their paths."""
    paths = reader.metadata.planner_data or {}
    return {
        key: (tuple(paths.get(key, (key,))), reader.object_bytes(key))
        for key in reader.objects
        if not (key in (*_SINGLE, KEPT) or key.startswith(_REPEATED) or _META.match(key) or _RNG.match(key))
    }


def _common(reader: CheckpointReader) -> dict[str, Any]:
    common: dict[str, Any] = {key: reader.read_object(key) for key in _SINGLE if key in reader.objects}
    for key in reader.objects:
        name, _, field = key.partition(".")
        if name in _DICTS:
            common.setdefault(name, {})[field] = reader.read_object(key)
    ranks: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for key in (*reader.objects, *reader.tensors):
        match = _RNG.match(key)
        if match is None:
            continue
        value = reader.tensors[key].full_tensor() if key in reader.tensors else reader.read_object(key)
        state = ranks.setdefault((int(match["pp"]), int(match["tp"])), {}).setdefault(int(match["index"]), {})
        if match["rest"].startswith(_TRACKER):
            state = state.setdefault("rng_tracker_states", {})
        state[match["rest"].removeprefix(_TRACKER)] = value
    if ranks:
        common["rng_state"] = {place: [states[i] for i in sorted(states)] for place, states in ranks.items()}
    return common


def lay_out(state: TrainingState, options: WriteOptions) -> Draft:
    """Plan a checkpoint with every key that a strict load needs, in Megatron-Core's FSDP and in this one.

    Args:
        state: The checkpoint.
        options: Prefixes of keys, and the name of the layer of multi-token prediction.
    """
    nested = _Nested()
    facts = Facts(live_mtp=options.rename_mtp_keys)
    prefix = options.optimizer_prefix
    if prefix is None:
        # A model in low precision has one more wrapper, which casts its inputs.
        low = state.compute_dtype != torch.float32
        prefix = "optimizer.state." + ".".join(["module"] * (3 if low else 2))
    for name, tensor in from_canonical(state.weights | state.buffers, FSDP_DTENSOR, facts).items():
        nested.tensor(options.weight_prefix, (name,), tensor)
    for kind, found in transposed(state.optimizer_state).items():
        for name, tensor in from_canonical(found, FSDP_DTENSOR, facts).items():
            nested.tensor(prefix, (name, kind), tensor)
    _lay_out_groups(nested, state, prefix, facts)
    _lay_out_common(nested, state)
    for key, (path, data) in state.fsdp_dtensor.items():
        nested.objects[key], nested.paths[key] = RawObject(data), path
    if state.torch_dist or state.model_dtypes:
        nested.object((KEPT,), {**state.torch_dist, "model_dtypes": state.model_dtypes})
    return Draft(nested.tensors, nested.objects, nested.paths)


class _Nested:
    """The keys of a nested dict with their paths, in which a parameter's name is one step."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.objects: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self._pickled: dict[bytes, RawObject] = {}

    def tensor(self, prefix: str, path: tuple[str, ...], tensor: lazy.LazyTensor) -> None:
        """Add a tensor under a prefix such as ``optimizer.state.module``: two dicts, then the beginning of the name."""
        name, *rest = path
        key = ".".join((prefix, *path))
        self.tensors[key] = tensor
        self.paths[key] = (*_steps(prefix, name), *rest)

    def object(self, path: tuple[Any, ...], value: Any) -> None:
        """Add an object."""
        key = ".".join(map(str, path))
        self.objects[key], self.paths[key] = value, path

    def setting(self, path: tuple[Any, ...], value: Any) -> None:
        """Add a small object. Equal objects are pickled only once."""
        # Not by repr: a tensor's has only four digits.
        key = pickle.dumps(value)
        if key not in self._pickled:
            self._pickled[key] = RawObject(safe_pickle.save_torch(value))
        self.object(path, self._pickled[key])


def _steps(prefix: str, name: str) -> tuple[str, ...]:
    whole = f"{prefix}.{name}"
    for start in ("optimizer.state", "model"):
        if whole.startswith(f"{start}."):
            return (*start.split("."), whole.removeprefix(f"{start}."))
    return (whole,)


def _lay_out_groups(nested: _Nested, state: TrainingState, prefix: str, facts: Facts) -> None:
    wrappers = prefix.removeprefix("optimizer.state.") if prefix.startswith("optimizer.state.") else "module.module"
    fused = bool(getattr(state.args, "mla_down_proj_fusion", False))
    for name, group in state.group_of.items():
        # FSDP has one optimizer for all parameters, and all parameters of a group must have equal settings.
        settings = {**group, groups.EXPERTS: False} if groups.EXPERTS in group else group
        for own in live_names(name, fused):
            for field, value in settings.items():
                nested.setting(("optimizer", "param_to_group_meta", f"{wrappers}.{own}", field), value)
    for name in state.optimizer_state:
        group = state.group_of[without_half(name)]
        # torch.optim.Adam counts steps in the state of each parameter, and needs them there when it loads.
        if "amsgrad" in group and _STEP in group:
            live = live_prediction_name(name) if facts.live_mtp else name
            nested.tensor(prefix, (live, _STEP), lazy.of(torch.tensor(float(group[_STEP]))))


def _lay_out_common(nested: _Nested, state: TrainingState) -> None:
    common: Mapping[str, Any] = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, **state.common}
    for key in _SINGLE:
        if key in common:
            nested.object((key,), common[key])
    for name in _DICTS:
        for key, value in (common.get(name) or {}).items():
            nested.object((name, key), value)
    states = {f"({pp}, {tp})": value for (pp, tp), value in (common.get("rng_state") or {}).items()}
    flat, paths = flatten_state_dict({"rng_state": states})
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            nested.tensors[key], nested.paths[key] = lazy.of(value), paths[key]
        else:
            nested.object(paths[key], value)
