"""Plans a torch_dist checkpoint, with optimizer state by parameter (``fully_reshardable``)."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.reader import COMMON, COMMON_KEY, FORMAT_FILE
from megatron.fsdp.checkpoint.writer import Draft, RawObject
from megatron.fsdp.convert.canonical import SCALER, Tensors, TrainingState, transposed
from megatron.fsdp.convert.groups import EXPERTS, MOMENTUM, Group, chains, is_expert, scaler_as_tensors
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST, Facts, from_canonical, layers_with_own_norms
from megatron.fsdp.convert.torch_dist.facts import written_facts
from megatron.fsdp.convert.torch_dist.reading import COMMON_KEYS, layout_and_format

SHARDING = "fully_reshardable"
_SHARDING_KEY = "distrib_optim_sharding_type"
# The name of the main weights among the optimizer's states.
_MAIN = "param"

_LINEAR = re.compile(r"^(.*\.(?:linear_\w+|eh_proj))\.weight(?:_[wv])?$")
_NORM = re.compile(r"^(.*layers\..*(?:layernorm|norm)|.*final_layernorm)\.weight$")


def lay_out(state: TrainingState, options: WriteOptions) -> Draft:
    """Plan a checkpoint.

    The weights become the optimizer's main weights, and, cast to the dtype that the model computes in, the model's
    weights. Common state, random states and data that an earlier conversion kept are written as well.

    Args:
        state: The checkpoint.
        options: ``like`` gives the layout.

    Raises:
        ValueError: Layers to be stacked in one tensor differ.
        NotImplementedError: There is state of Muon and of another optimizer.
    """
    kept = state.torch_dist
    if options.like is not None:
        # The kept objects of modules have the names of the earlier layout.
        kept = {k: v for k, v in kept.items() if k != "objects"} | layout_and_format(options.like)
    facts = written_facts(state.weights, state.args, kept.get("layout") or {})
    model = {name: tensor.to(state.model_dtype(name)) for name, tensor in state.weights.items()} | state.buffers
    stored = from_canonical(model, TORCH_DIST, facts)
    tensors = dict(stored)
    for kind, states in _by_kind(state).items():
        for key, tensor in from_canonical(states, TORCH_DIST, facts).items():
            tensors[f"optimizer.state.{kind}.{key}"] = tensor
    own = bool(layers_with_own_norms(state.weights))
    earlier = kept.get("objects")
    objects: dict[str, Any] = (
        extra_states(stored, own) if earlier is None else {k: RawObject(data) for k, data in earlier.items()}
    )
    if state.fsdp_dtensor:
        objects[FSDP_DTENSOR] = state.fsdp_dtensor
    objects |= _random_states(state.common.get("rng_state") or {})
    common = _common_state(state, kept, facts)
    layout = kept.get("format") or {"sharded_backend": TORCH_DIST, "sharded_backend_version": 1}
    files = {FORMAT_FILE: json.dumps(layout).encode()}
    if kept.get("common_file"):
        return Draft(tensors, objects, None, {**files, COMMON: safe_pickle.save_torch(common)})
    return Draft(tensors, {**objects, COMMON_KEY: [common]}, None, files)


def extra_states(model: Tensors, own_layers: bool) -> dict[str, Any]:
    """Empty extra states for the modules that may have them, because Megatron requires them when it loads.

    Args:
        model: The model's tensors, by stored key.
        own_layers: Layers are Megatron's local ones, in which only linear layers have extra states. In Transformer
            Engine's, norms and attention also have them.
    """
    objects: dict[str, Any] = {}
    for key, tensor in model.items():
        linear, norm = _LINEAR.match(key), _NORM.match(key)
        modules = {linear[1]: tensor.shape[:-2]} if linear else {}
        if linear and not own_layers and linear[1].endswith("self_attention.linear_proj"):
            modules[linear[1].replace("linear_proj", "core_attention")] = tensor.shape[:-2]
        if norm and not own_layers:
            modules[norm[1]] = tensor.shape[:-1]
        for module, stacked in modules.items():
            counts = stacked or (1,)
            for index in product(*map(range, counts)):
                place = f"{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
                objects[f"{module}._extra_state/shard_{place}"] = [None]
    return objects


def _by_kind(state: TrainingState) -> dict[str, Tensors]:
    """Main weights and optimizer states, by kind."""
    held = [name for name in state.weights if state.optimizer_state.get(name)]
    kinds: dict[str, Tensors] = {_MAIN: {name: state.weights[name] for name in held}} if held else {}
    kinds |= transposed(state.optimizer_state)
    if len(kinds.get(MOMENTUM, {})) not in (0, len(held)):
        raise NotImplementedError(
            "Megatron stores the state of Muon without its distributed optimizer, in a form that is not written here; "
            "--no-optimizer converts only the model's weights."
        )
    return kinds


def _random_states(states: Mapping[tuple[int, int], Any]) -> dict[str, Any]:
    """The random states: one object for each pipeline and tensor rank."""
    if not states:
        return {}
    ranks = tuple(1 + max(place[d] for place in states) for d in range(2))
    return {f"rng_state/shard_{p}.{t}_{ranks[0]}.{ranks[1]}": [state] for (p, t), state in states.items()}


def _common_state(state: TrainingState, kept: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    common = {key: state.common[key] for key in COMMON_KEYS if key in state.common} | kept.get("common", {})
    if state.group_of:
        common["optimizer"] = _optimizer(state, kept.get("optimizer"))
    content = kept.get("content_metadata") or {}
    if state.group_of and content.get(_SHARDING_KEY) != SHARDING:
        content = {
            **content,
            _SHARDING_KEY: SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }
    single = facts.single_experts or facts.stored_halves
    content = {"singleton_local_shards": single, **content}
    if not kept.get("layout") and not facts.stacked:
        content["non_homogeneous_layers"] = True
    return {**common, "content_metadata": content}


def _optimizer(state: TrainingState, earlier: Any) -> dict[Any, Any]:
    """The optimizer's part of the common state: its groups, in chains of dense parameters and experts.

    Args:
        state: The checkpoint.
        earlier: The same part of the torch_dist checkpoint that the state was converted from, if any. Its groups keep
            their order, including those without parameters.
    """
    before = [group for chain in chains(earlier) for group in chain]
    # In torch_dist, experts that are spread over ranks have a separate optimizer. FSDP has one for all parameters.
    known = before or list(state.group_of.values())
    spread = any(group.get(EXPERTS) for group in known)
    if not before:
        spread = spread or (getattr(state.args, "expert_model_parallel_size", None) or 1) > 1
    groups: list[Group] = []
    names: list[str] = []
    for name, settings in state.group_of.items():
        group = {**settings, EXPERTS: True} if spread and is_expert(name) else settings
        if group not in groups:
            groups.append(group)
            names.append(name)
    kinds = [_identity(group) for group in before]
    if len(set(kinds)) == len(kinds):
        _require_distinct(groups, names)
    if before and len(set(kinds)) == len(kinds) and {_identity(group) for group in groups} <= set(kinds):
        now = {_identity(group): group for group in groups}
        # Do not write a setting that reading added because an older version lacked it.
        ordered = [
            {k: v for k, v in now.get(kind, group).items() if k in group or k != "default_config"}
            for kind, group in zip(kinds, before, strict=True)
        ]
    else:
        ordered = sorted(groups, key=_identity)
    parts = [[g for g in ordered if bool(g.get(EXPERTS)) == expert] for expert in (False, True)]
    scaler = {SCALER: scaler_as_tensors(state.common[SCALER])} if state.common.get(SCALER) else {}
    made = [
        {**scaler, "optimizer": {"param_groups": part}, "param_state_sharding_type": SHARDING} for part in parts if part
    ]
    return made[0] if len(made) == 1 else dict(enumerate(made))


def _require_distinct(groups: Sequence[Group], names: Sequence[str]) -> None:
    """Raise an error if Megatron cannot distinguish two groups: it would load the settings of one for both.

    Args:
        groups: Groups that differ.
        names: A parameter of each.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for index, group in enumerate(groups):
        first = seen.setdefault(_identity(group), index)
        if first == index:
            continue
        other = groups[first]
        key = next(key for key in sorted({*group, *other}) if group.get(key) != other.get(key))
        raise ValueError(
            f"expected equal optimizer settings for {names[first]} and {names[index]}, which torch_dist stores in one "
            f"group; got {key} {other.get(key)!r} and {group.get(key)!r}. --no-optimizer converts only the model."
        )


def _identity(group: Group) -> tuple[Any, ...]:
    """The key by which Megatron distinguishes groups; groups with default settings sort first."""
    numbers = [float(group.get(key, group.get(f"pre_{key}")) or 0.0) for key in ("wd_mult", "lr_mult")]
    limits = [str(group.get(key)) for key in ("max_lr", "min_lr")]
    return (
        bool(group.get(EXPERTS)),
        bool(group.get("is_decoupled_lr")),
        *(-number for number in numbers),
        *limits,
    )
