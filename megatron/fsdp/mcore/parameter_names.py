"""Finds the canonical names of a model's parameters, and the rows of those that are fused, by looking at its modules.

:mod:`megatron.fsdp.naming` has the registry. A rank's model numbers the layers of its pipeline stage and the experts of
its expert-parallel rank; canonical names number those of the whole model. A checkpoint stores what the rows of fused
parameters are under ``layouts``, and tensor parallelism uses it to place a rank's rows in the full parameter.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from megatron.core import parallel_state
from megatron.fsdp.naming.names import GROUPED, PREDICTION, Name, without_indices
from megatron.fsdp.naming.table import Owner, RowLayout, kind_of


def global_name(model: nn.Module, name: str) -> str:
    """The canonical name of a parameter or buffer of this rank's model.

    Args:
        model: The model, without wrappers.
        name: The name in it, which counts the layers of the pipeline stage and the experts of the rank.
    """
    found = Name.parse(name)
    number = getattr(_module(model, found.beginning), "layer_number", None)
    # Prediction layers are all on one stage.
    canonical = found if number is None or not found.is_stackable else replace(found, layer=str(number - 1))
    if found.expert and parallel_state.model_parallel_is_initialized():
        owner, _, parameter = name.rpartition(".")
        if found.style == GROUPED:
            kind = re.sub(r"\d+$", "", parameter)
            names = [own for own, _ in _module(model, owner).named_parameters(recurse=False)]
            count = sum(re.sub(r"\d+$", "", own) == kind for own in names)
        else:
            count = len(list(_module(model, f"{found.beginning}{found.experts}{found.style}").children()))
        first = parallel_state.get_expert_model_parallel_rank() * count
        canonical = replace(canonical, expert=str(int(found.expert) + first))
    return str(canonical)


def _module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, with or without a dot at its end; an empty one if there is none."""
    try:
        return model.get_submodule(path.rstrip("."))
    except AttributeError:
        return nn.Module()


def renamed_in_checkpoints(module: nn.Module) -> dict[str, str]:
    """Prefixes of names that Megatron-Core has changed, and the earlier prefixes, which checkpoints keep.

    The prediction layer of a hybrid model, which holds layers of its own, has kept its name.
    """
    return {
        f"{path}.{PREDICTION.live}": f"{path}.{PREDICTION.stored}"
        for path, layer in module.named_modules()
        if PREDICTION.live.rstrip(".") in layer._modules and getattr(layer, "mtp_layer_pattern", None) is None
    }


def layouts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RowLayout]:
    """The row layouts of a model's fused parameters, by name.

    Args:
        model: The model, without wrappers.
        shapes: The shapes of the full parameters, by name. A parameter whose name and number of rows do not fit the
            same kind has no layout.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    gated = tuple(
        f"{path}." if path else ""
        for path, module in modules.items()
        if getattr(getattr(module, "config", None), "gated_linear_unit", False)
    )
    found: dict[str, RowLayout] = {}
    for name, shape in shapes.items():
        kind = kind_of(name)
        if kind is None or not shape:
            continue
        path, _, attribute = name.rpartition(".")
        parameter = getattr(modules.get(path), attribute, None)
        owner = Owner(modules.get(kind.owner_of(name)), name.startswith(gated), parameter, shape[0])
        layout = kind.layout(owner)
        if layout is not None:
            found[name] = layout
    return found


def described(facts: Mapping[str, Mapping[str, Any]], by_number: bool = False) -> dict[str, str]:
    """Facts as JSON text by name; one entry, with ``{}`` for the indices, for all layers and experts that agree.

    Args:
        facts: Facts by name.
        by_number: Keep an entry for each name, because layers may differ, also on other pipeline stages.
    """
    texts = {name: json.dumps(of_name) for name, of_name in facts.items()}
    if by_number:
        return texts
    alike: dict[str, set[str]] = {}
    for name, text in texts.items():
        alike.setdefault(without_indices(name), set()).add(text)
    return {
        without_indices(name) if len(alike[without_indices(name)]) == 1 else name: text for name, text in texts.items()
    }
