"""Assigns parameters to optimizer groups: torch_dist lists the groups, but not their parameters."""

import argparse
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.checksums import read_json
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.naming.names import stored_prediction_name, without_half

# The settings of an optimizer group: lr, step, weight_decay and so on.
Group = dict[str, Any]

OPTION = "--param-to-param-group-map-json"
# The setting that marks groups of experts that are spread over ranks.
EXPERTS = "is_expert_parallel"
# The state of parameters that Muon updates.
MOMENTUM = "momentum_buffer"
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
_WRAPPERS = re.compile(r"^(?:model\.)?(?:module\.)*")


class GroupKind(NamedTuple):
    """The properties by which Megatron divides parameters into groups.

    Attributes:
        expert: Gradients are reduced over expert data-parallel ranks.
        decays: Weight decay applies.
        decoupled: The learning rate is a separate one, as it may be for the embedding and the output layer.
        muon: Muon updates them.
    """

    expert: bool
    decays: bool
    decoupled: bool
    muon: bool

    def __str__(self) -> str:
        words = ["expert" if self.expert else "dense", "decayed" if self.decays else "not decayed"]
        words += ["updated by Muon"] if self.muon else []
        return ", ".join([*words, "with a decoupled learning rate"] if self.decoupled else words)


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert."""
    return ".experts." in name


def read_map(path: Path) -> dict[str, int]:
    """Read the index of each parameter's group, by canonical name, as a training script dumped it.

    Args:
        path: A JSON object of group indices by parameter name, with or without the prefixes of wrappers.

    Raises:
        ValueError: The file contains something else.
    """
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(index, int) for index in found.values()):
        raise ValueError(f"{path}: expected an object of group indices by parameter name.")
    return {stored_prediction_name(_WRAPPERS.sub("", name)): index for name, index in found.items()}


def assign(
    weights: Tensors,
    groups: list[Group],
    args: argparse.Namespace,
    mapping: Mapping[str, int] | None = None,
    muon: Collection[str] = (),
) -> dict[str, Group]:
    """Find the settings of each parameter's group.

    By Megatron's rules, weight decay applies to parameters with two or more dimensions that are not biases. Experts
    that are spread over ranks are in separate groups, and so are the embedding and the output layer if their learning
    rate is decoupled.

    Args:
        weights: The weights that the optimizer holds, by canonical name.
        groups: The groups of the dense optimizer, then those of the experts.
        args: The training arguments.
        mapping: The index into ``groups`` of each parameter, if a training script dumped it.
        muon: The names of the weights that Muon updates.

    Returns:
        The settings by name without halves. They include ``default_config``, which is False if the learning rate is
        decoupled, even if the checkpoint lacks it.

    Raises:
        ValueError: The rules are ambiguous and there is no map, or the map contradicts the rules or lacks a parameter.
    """
    dimensions = {without_half(name): len(tensor.shape) for name, tensor in weights.items()}
    muon = {without_half(name) for name in muon}
    spread = any(group.get(EXPERTS, False) for group in groups)
    kinds = [_kind_of_group(group, args) for group in groups]
    decoupled = any(kind.decoupled for kind in kinds)
    if mapping is not None:
        _check_map(mapping, dimensions, len(groups))
    assigned = {}
    for name, count in dimensions.items():
        by_muon = name in muon
        kind = GroupKind(spread and is_expert(name), _decays(name, count, args), decoupled and name in _ENDS, by_muon)
        candidates = [group for group, found in zip(groups, kinds, strict=True) if found == kind]
        known = len(candidates) > 0 and all(group == candidates[0] for group in candidates)
        if mapping is not None:
            chosen = groups[mapping[name]]
            if known and chosen != candidates[0]:
                raise ValueError(
                    f"{OPTION}: {name} is in group {mapping[name]} ({kinds[mapping[name]]}), but by Megatron's rules "
                    f"it is {kind}; the map is another model's or another run's."
                )
        elif known:
            chosen = candidates[0]
        else:
            raise ValueError(
                f"{name}: expected one optimizer group that is {kind}; got {len(candidates)} different ones among "
                f"{[str(found) for found in kinds]}. Give {OPTION}."
            )
        # Older versions do not write this setting, but newer ones need it.
        assigned[name] = {"default_config": not kind.decoupled, **chosen}
    return assigned


def _check_map(mapping: Mapping[str, int], dimensions: Mapping[str, int], groups: int) -> None:
    missing = sorted(set(dimensions) - set(mapping))
    if missing:
        raise ValueError(f"{OPTION}: {len(missing)} parameters are not in the map; the first is {missing[0]}.")
    wrong = sorted(name for name in dimensions if not 0 <= mapping[name] < groups)
    if wrong:
        raise ValueError(f"{OPTION}: {wrong[0]} is in group {mapping[wrong[0]]}; the checkpoint has {groups} groups.")


def _kind_of_group(group: Group, args: argparse.Namespace) -> GroupKind:
    multiplier = group.get("wd_mult", group.get("pre_wd_mult"))
    decays = group.get("weight_decay", 0.0) != 0 if multiplier is None else multiplier != 0
    rate = getattr(args, "decoupled_lr", None)
    own_rate = rate is not None and group.get("max_lr") == rate and not group.get("default_config", False)
    by_muon = "momentum" in group and "betas" not in group
    return GroupKind(bool(group.get(EXPERTS)), decays, bool(group.get("is_decoupled_lr")) or own_rate, by_muon)


def _decays(name: str, dimensions: int, args: argparse.Namespace) -> bool:
    if getattr(args, "apply_wd_to_qk_layernorm", False) and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return dimensions > 1 and not name.endswith(".bias")


def scaler_as_numbers(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of fp16's gradient scalers as numbers, as ``fsdp_dtensor`` has it; empty if there is none.

    Megatron's DDP has one for dense parameters and one for experts, FSDP one for both: the smaller scale overflows in
    neither.
    """
    numbers = [{k: v.item() if isinstance(v, torch.Tensor) else v for k, v in state.items()} for state in found]
    return min((state for state in numbers if state), key=lambda state: state["scale"], default={})


def scaler_as_tensors(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a gradient scaler as Megatron has it."""
    return {k: torch.tensor([v], dtype=torch.float) if k == "scale" else v for k, v in numbers.items()}


def chains(optimizer: Any) -> list[list[Group]]:
    """The groups of each optimizer of a chain, from the common state of a torch_dist checkpoint.

    Args:
        optimizer: The common state's ``optimizer``: that of one optimizer, or of several by index. Groups without a
            step count get the shared one of a plain optimizer's state.

    Returns:
        A list of groups for each optimizer; empty if there are none.
    """
    if not isinstance(optimizer, Mapping):
        return []
    if "param_groups" in optimizer:
        state = optimizer.get("state")
        step = {"step": state["common_step"]} if isinstance(state, Mapping) and "common_step" in state else {}
        return [[{**step, **{k: v for k, v in group.items() if k != "params"}} for group in optimizer["param_groups"]]]
    if "optimizer" in optimizer:
        return chains(optimizer["optimizer"])
    parts = [chains(optimizer[index]) for index in sorted(key for key in optimizer if isinstance(key, int))]
    return [part for found in parts for part in found]
