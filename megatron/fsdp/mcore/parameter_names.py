"""Finds the canonical names of a model's parameters, and the rows of those that are fused, by looking at its modules.

:mod:`megatron.fsdp.naming` has the registry. A rank's model numbers the layers of its pipeline stage and the experts of
its expert-parallel rank; canonical names number those of the whole model. A checkpoint stores what the rows of fused
parameters are under ``layouts``, and tensor parallelism uses it to place a rank's rows in the whole parameter.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core import parallel_state
from megatron.fsdp.naming.names import PREDICTION, without_indices
from megatron.fsdp.naming.table import Owner, RowLayout, kind_of

# Names of the parameters of one expert among others in one module.
_GROUPED = re.compile(r"(weight|bias)(\d+)")


# Names ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step down a name: from a module to what it has under an attribute.

    Attributes:
        owner: The module.
        attribute: A word of the name.
        child: What is there: a module, or None for a parameter or buffer.
        path: Words before this one.
    """

    owner: nn.Module
    attribute: str
    child: nn.Module | None
    path: tuple[str, ...]


def _layer(step: Step) -> str | None:
    """Layers are counted over all pipeline stages; layers that predict further tokens are on one stage."""
    number = getattr(step.child, "layer_number", None)
    if number is None or not isinstance(step.owner, nn.ModuleList) or "mtp" in step.path:
        return None
    return str(number - 1)


def _sequential_expert(step: Step) -> str | None:
    """Experts are counted over all expert-parallel ranks."""
    if not step.path or step.path[-1] != "local_experts":
        return None
    return str(int(step.attribute) + _first_expert(len(step.owner)))  # type: ignore[arg-type]


def _grouped_expert(step: Step) -> str | None:
    found = _GROUPED.fullmatch(step.attribute)
    if found is None or step.child is not None or "experts" not in step.path:
        return None
    here = sum(1 for name, _ in step.owner.named_parameters(recurse=False) if re.fullmatch(rf"{found[1]}\d+", name))
    return f"{found[1]}{int(found[2]) + _first_expert(here)}"


def _first_expert(local: int) -> int:
    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_expert_model_parallel_rank()) * local


# Each takes a step of a name and returns another word for it, or None.
REWRITES = (_layer, _sequential_expert, _grouped_expert)


def global_name(module: nn.Module, name: str) -> str:
    """What a parameter or buffer of this rank's part of a model is called in the whole model.

    Args:
        module: The model, without wrappers.
        name: The name in it.
    """
    words: list[str] = []
    owner: nn.Module | None = module
    path = name.split(".")
    for position, attribute in enumerate(path):
        if owner is None:
            words.append(attribute)
            continue
        child = owner._modules.get(attribute)
        step = Step(owner, attribute, child, tuple(path[:position]))
        words.append(next((word for rewrite in REWRITES if (word := rewrite(step)) is not None), attribute))
        owner = child
    return ".".join(words)


def renamed_in_checkpoints(module: nn.Module) -> dict[str, str]:
    """Beginnings of names that a checkpoint keeps from before Megatron-Core changed them, and what they were.

    A hybrid model's layer that predicts a further token holds layers of its own; it had no other name.
    """
    return {
        f"{path}.{PREDICTION.live}": f"{path}.{PREDICTION.stored}"
        for path, layer in module.named_modules()
        if PREDICTION.live.rstrip(".") in layer._modules and getattr(layer, "mtp_layer_pattern", None) is None
    }


# Rows ----------------------------------------------------------------------------------------------------------------


def layouts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RowLayout]:
    """Layouts of the parameters whose rows are not all of one kind, by name.

    Args:
        model: Without wrappers.
        shapes: Of the whole parameters, by name; a layout that has another number of rows is of something else.
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
    """Facts as text by name, with ``{}`` for numbers of layers and experts of which all is the same.

    Args:
        facts: By name.
        by_number: Layers may differ, on other pipeline stages too: leave the names as they are.
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
