"""Prepares model and optimizer state for an ``fsdp_dtensor`` checkpoint, without any communication.

Names in a checkpoint are those of the whole model: layers, experts and tied weights are called as if there were one
pipeline stage and one expert-parallel rank. ``REWRITES`` lists what makes a parameter's own name differ from that.
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.fsdp.mcore.adapter import ShardedModule
from megatron.fsdp.names import bare_name
from megatron.fsdp.parameter import ParameterEntry
from megatron.fsdp.uneven_dtensor import describe_part, is_sharded, local_part, make_dtensor

# Weights of the first linear layer of an MLP, whose rows are [gate | up] where the activation is gated.
GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.local_experts\.\d+\.|experts\.)?linear_fc1\.(?:weight|bias)\d*$"
)
# Names of the parameters of one expert among others in one module.
_GROUPED = re.compile(r"(weight|bias)(\d+)")
TIED_OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


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


class Names:
    """Names in a checkpoint of everything that a model chunk has.

    Args:
        chunk: The chunk.
    """

    def __init__(self, chunk: ShardedModule) -> None:
        model: Any = chunk.module
        while isinstance(model, Float16Module):
            model = model.module
        self._model: nn.Module = model
        self.entries: dict[str, ParameterEntry] = {bare_name(n): e for e in chunk.entries() for n in e.names}
        configs = ((name, getattr(part, "config", None)) for name, part in model.named_modules())
        self._gated = [name for name, config in configs if getattr(config, "gated_linear_unit", False)]

    def of(self, name: str) -> str:
        """The name in a checkpoint of what is called so in the model itself."""
        entry = self.entries.get(name)
        if entry is not None and entry.key.repeated and name.endswith(TIED_OUTPUT):
            return name.removesuffix(TIED_OUTPUT) + EMBEDDING
        return global_name(self._model, name)

    def is_copy(self, name: str) -> bool:
        """Whether another pipeline stage has the same parameter, and saves it."""
        entry = self.entries.get(name)
        return entry is not None and entry.key.repeated and not getattr(self._model, "pre_process", True)

    def is_gated(self, name: str) -> bool:
        """Whether its rows are those of a gate, and then those of what is gated."""
        return bool(GATED.search(name)) and any(not path or name.startswith(f"{path}.") for path in self._gated)


def optimizer_names(chunks: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The name of every main weight in an optimizer's part of a checkpoint: the global one, behind its wrappers.

    Args:
        chunks: Model chunks in our wrapper.
    """
    found: dict[nn.Parameter, str] = {}
    for chunk in chunks:
        names = Names(chunk.module)  # type: ignore[arg-type]
        for name, entry in names.entries.items():
            wrappers = entry.name.removesuffix(bare_name(entry.name))
            found.setdefault(entry.main, f"module.module.{wrappers}{names.of(name)}")
    return found


# State ---------------------------------------------------------------------------------------------------------------


class Prepared(dict[str, Any]):
    """A state dict as it is in a checkpoint.

    Attributes:
        raw: What Megatron made and expects back after loading, by key: models and optimizers.
        chunks: The model chunks.
        loading: Whether a checkpoint is to be loaded into it.
    """

    raw: dict[str, Any]
    chunks: Sequence[ShardedModule]
    loading: bool = False

    def restore(self) -> None:
        """Put back what Megatron made; its tensors are the same."""
        self.pop("model", None)
        self.update(self.raw)


def preprocess_fsdp_dtensor_state_dict(
    args: argparse.Namespace,
    raw_state_dict: dict[str, Any],
    model: ShardedModule,
    chunks: Sequence[ShardedModule] = (),
    saving: bool = False,
) -> Prepared:
    """A state dict ready for torch.distributed.checkpoint, for saving or for loading in place.

    Names become those of the whole model. Fused gate and up projections become two keys, ``_w`` and ``_v``, so that
    each can be cut anywhere; every DTensor is told which part of the whole this rank holds. Tensors keep their memory.

    Args:
        args: Megatron's arguments.
        raw_state_dict: With ``model``, or ``model0``, ``model1`` ... (by parameter name), and maybe ``optimizer``
            (``state`` and ``param_to_group_meta`` by parameter name, or several such by number).
        model: The first chunk of the model.
        chunks: All chunks. None: only the first.
        saving: Leave out what another pipeline stage saves.
    """
    chunks = chunks or [model]
    names = [Names(chunk) for chunk in chunks]
    prepared = Prepared(raw_state_dict)
    prepared.chunks = chunks
    prepared.raw = {key: value for key, value in raw_state_dict.items() if re.fullmatch(r"model\d*|optimizer", key)}
    for key in prepared.raw:
        del prepared[key]
    models = [prepared.raw[key] for key in sorted(prepared.raw.keys() - {"optimizer"})]
    prepared["model"] = {}
    for of_chunk, state in zip(names, models, strict=True):
        prepared["model"].update(_weights(of_chunk, state, saving))
    if "optimizer" in prepared.raw:
        prepared["optimizer"] = _optimizers(names, prepared.raw["optimizer"], saving)
    return prepared


def _weights(names: Names, state: Mapping[str, Any], saving: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = bare_name(key)
        if name.endswith("._extra_state") or (saving and names.is_copy(name)):
            continue
        found.update(_described(names, name, f"module.{names.of(name)}", value))
    return found


def _optimizers(names: Sequence[Names], raw: dict[Any, Any], saving: bool) -> dict[str, Any]:
    """The state of all optimizers as that of one; and a dict of its own for every parameter's settings."""
    found: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
    local = {names_of.of(name): (names_of, name) for names_of in names for name in names_of.entries}
    for state in [raw] if "state" in raw else [raw[number] for number in sorted(raw)]:
        # In place: Megatron keeps the dict that these are in, and looks for what was loaded there.
        groups = state["param_to_group_meta"]
        for key in groups:
            groups[key] = dict(groups[key])
            if saving:
                # Which rank has an expert is not the checkpoint's matter; Megatron-Core's FSDP, which has experts and
                # others in one group, would find them to differ.
                groups[key]["is_expert_parallel"] = False
            names_of, name = local[bare_name(key)]
            if not (saving and names_of.is_copy(name)):
                found["param_to_group_meta"][key] = groups[key]
        for key, value in state["state"].items():
            names_of, name = local[bare_name(key)]
            if not (saving and names_of.is_copy(name)):
                found["state"].update(_described(names_of, name, key, value))
    return found


def _described(names: Names, name: str, key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is saved of a parameter, or of an optimizer's state of it, and under which keys.

    Args:
        names: Of the model chunk.
        name: Of the parameter in the model itself.
        key: In the checkpoint.
        value: A tensor, or a dict of an optimizer's.
    """
    entry = names.entries.get(name)
    if entry is None:
        yield key, value
    elif names.is_gated(name):
        yield f"{key}_w", _on_tensors(value, entry, 0)
        yield f"{key}_v", _on_tensors(value, entry, 1)
    else:
        yield key, _on_tensors(value, entry, None)


def _on_tensors(value: Any, entry: ParameterEntry, half: int | None) -> Any:
    if isinstance(value, dict):
        return {k: _on_tensors(v, entry, half) for k, v in value.items()}
    if not isinstance(value, DTensor):
        return value
    if half is not None:
        return _half(value, entry, half)
    if is_sharded(value):
        entry.describe(value)
    return value


def _half(tensor: DTensor, entry: ParameterEntry, half: int) -> DTensor:
    """The first or second half of a tensor's rows, as a DTensor on the same memory."""
    shape = (tensor.shape[0] // 2, *tensor.shape[1:])
    # A tensor-parallel rank has rows of both halves, the first half's first.
    mine = (entry.local_shape[0] // 2, *entry.local_shape[1:])
    numel, piece = math.prod(mine), entry.piece
    first = half * numel
    # This rank's part of the half, counted within the flattened half.
    start = min(max(piece.start - first, 0), numel)
    stop = min(max(piece.stop - first, start), numel)
    begin = max(first - piece.start, 0)
    local: torch.Tensor = local_part(tensor).reshape(-1)[begin : begin + stop - start]
    if piece.whole_rows:
        local = local.view(-1, *mine[1:])
    part = make_dtensor(local, tensor.device_mesh, shape, tensor.placements)
    if is_sharded(part):
        offset = (entry.offset[0] // 2, *entry.offset[1:])
        describe_part(part, start, stop, mine, offset)
    return part
