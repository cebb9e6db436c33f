"""Prepares model and optimizer state for an ``fsdp_dtensor`` checkpoint, without communication.

Names in a checkpoint are those of the whole model: layers, experts and tied weights are named as if there were one
pipeline stage and one expert-parallel rank. :mod:`megatron.fsdp.mcore.parameter_names` translates a parameter's name in
this rank's model, and describes the rows of fused parameters.
"""

import argparse
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.fsdp.api.uneven_dtensor import narrow_rows
from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.convert.canonical import SCALER
from megatron.fsdp.convert.groups import scaler_as_numbers, scaler_as_tensors
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.mcore.adapter import ShardedModule
from megatron.fsdp.mcore.parameter_names import described, global_name, layouts, renamed_in_checkpoints
from megatron.fsdp.naming.names import DOWN_NORM, EMBEDDING, FUSED_DOWN, TIED_OUTPUT, Name
from megatron.fsdp.naming.table import Part, RowLayout, Sections

# The checkpoint's key for the description of the rows of fused parameters.
LAYOUTS_KEY = "layouts"


class Names:
    """The names that a model chunk's parameters and buffers have in a checkpoint.

    Args:
        chunk: The model chunk.

    Attributes:
        params: The chunk's parameters by their names in the model itself, without wrappers. A tied one has several.

    Raises:
        NotImplementedError: Expert-parallel ranks have different parameters of the same name.
    """

    def __init__(self, chunk: ShardedModule) -> None:
        model: Any = chunk.module
        while isinstance(model, Float16Module):
            model = model.module
        self._model: nn.Module = model
        self.params: dict[str, ShardedParameter] = {bare_name(n): e for e in chunk.engine.params() for n in e.names}
        _require_numbers([name for name, param in self.params.items() if param.key.expert])
        self._layouts = layouts(model, {name: param.shape for name, param in self.params.items()})
        self._renamed = renamed_in_checkpoints(model)

    def of(self, name: str) -> str:
        """The name in the whole model, where tied weights have one name. Optimizer groups are stored under it."""
        param = self.params.get(name)
        if param is not None and param.key.repeated and name.endswith(TIED_OUTPUT):
            return name.removesuffix(TIED_OUTPUT) + EMBEDDING
        return self.untied(name)

    def untied(self, name: str) -> str:
        """The name in the whole model, where each of several tied weights has its own name."""
        return global_name(self._model, name)

    def is_left_out(self, name: str, saving: bool) -> bool:
        """Whether a checkpoint does not have the parameter under this name, or another pipeline stage saves it."""
        param = self.params.get(name)
        # The last stage computes tied logits with the copy of the embedding that prediction layers need.
        tied = getattr(self._model, "share_embeddings_and_output_weights", False) and name.endswith(TIED_OUTPUT)
        first = getattr(self._model, "pre_process", True)
        return param is not None and not first and (saving if param.key.repeated else tied)

    def stored(self, name: str) -> str:
        """The key of a weight, and of the optimizer's state for it, in a checkpoint."""
        key = self.of(name)
        for now, before in self._renamed.items():
            if key.startswith(now):
                key = before + key.removeprefix(now)
        return DOWN_NORM.to_stored(key)

    def apart(self, name: str) -> tuple[tuple[Part, Sections], ...]:
        """The tensors that a checkpoint has in place of a fused parameter; empty if it has the parameter itself."""
        return self._layouts[name].apart if name in self._layouts else ()

    @property
    def spread(self) -> list[str]:
        """Parameters of which every tensor-parallel rank has a slice of each section."""
        return [name for name, layout in self._layouts.items() if layout.spread]

    @property
    def described(self) -> dict[str, str]:
        """Facts that names and shapes in a checkpoint do not tell, by name; ``{}`` stands for any number."""
        facts: dict[str, dict[str, Any]] = {}
        for name, param in self.params.items():
            layout = self._layouts.get(name)
            of_name = layout.facts if layout is not None else {}
            if layout is not None and name.split(".")[-2] == FUSED_DOWN:
                # They are stored as a model stores them that does not fuse them, so each is described by itself.
                parts = [(part.of(self.stored(name)), RowLayout(sections)) for part, sections in layout.apart]
                facts |= {key: of_part.facts for key, of_part in parts if len(of_part.sections) > 1}
                continue
            if param.key.expert:
                of_name["experts"] = "numbered over all ranks"
            if of_name:
                facts[self.stored(name)] = of_name
        if getattr(self._model, "share_embeddings_and_output_weights", False):
            facts[TIED_OUTPUT] = {"tied to": EMBEDDING}
        config = getattr(self._model, "config", None)
        return described(facts, by_number=bool(getattr(config, "heterogeneous_block_specs", False)))


def _require_numbers(names: Iterable[str]) -> None:
    """Raise an error if a rank's experts share a parameter: other ranks' would have its name in the checkpoint."""
    unnumbered = [name for name in names if not Name.parse(name).expert]
    if unnumbered and parallel_state.get_expert_model_parallel_world_size() > 1:
        raise NotImplementedError(
            f"{unnumbered[0]}: all experts of a rank share this parameter, and those of other expert-parallel ranks "
            f"have another of the same name, so a checkpoint would hold one of them ({len(unnumbered)} such "
            "parameters). Give each expert a parameter of its own, or set expert_model_parallel_size to 1."
        )


def optimizer_names(chunks: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The name of every main weight in optimizer state: its name in the whole model, behind its wrappers' prefixes.

    Args:
        chunks: Wrapped model chunks.
    """
    found: dict[nn.Parameter, str] = {}
    for chunk in chunks:
        names = Names(chunk.module)  # type: ignore[arg-type]
        for name, param in names.params.items():
            wrappers = param.name.removesuffix(bare_name(param.name))
            found.setdefault(param.main, f"module.module.{wrappers}{names.of(name)}")
    return found


# State ---------------------------------------------------------------------------------------------------------------


class CheckpointState(dict[str, Any]):
    """A state dict with a checkpoint's keys, which remembers what Megatron made and the model chunks it belongs to.

    Args:
        state: The state dict.
        chunks: The model chunks.
        loading: Whether a checkpoint is to be loaded into it.

    Attributes:
        raw: What Megatron made and expects back after loading, by key: models and optimizers.
        scalers: fp16's gradient scalers. Megatron stores their state in no ``fsdp_dtensor`` checkpoint.
    """

    def __init__(self, state: Mapping[str, Any], chunks: Sequence[ShardedModule], loading: bool = False) -> None:
        super().__init__(state)
        self.chunks, self.loading = chunks, loading
        self.raw: dict[str, Any] = {}
        self.scalers: list[Any] = state.scalers if isinstance(state, CheckpointState) else []

    def add_scalers(self, optimizer: Any) -> None:
        """Add the state of the optimizer's gradient scalers. They all scale one loss, and have one state."""
        found = [getattr(each, SCALER, None) for each in getattr(optimizer, "chained_optimizers", [optimizer])]
        self.scalers = [scaler for scaler in found if scaler is not None]
        if numbers := scaler_as_numbers(scaler.state_dict() for scaler in self.scalers):
            self[SCALER] = numbers

    def restore(self) -> None:
        """Put back what Megatron made; its tensors share the memory of those that were loaded."""
        self.pop("model", None)
        self.update(self.raw)
        if numbers := self.pop(SCALER, None):
            for scaler in self.scalers:
                scaler.load_state_dict(scaler_as_tensors(numbers))


def preprocess_fsdp_dtensor_state_dict(
    args: argparse.Namespace,
    raw_state_dict: dict[str, Any],
    model: ShardedModule,
    chunks: Sequence[ShardedModule] = (),
    saving: bool = False,
) -> CheckpointState:
    """A state dict ready for torch.distributed.checkpoint, for saving or for loading in place.

    Names become those of the whole model. A fused gate and up projection becomes two keys, ``_w`` and ``_v``, and a
    fused down projection of latent attention becomes ``linear_q_down_proj`` and ``linear_kv_down_proj``, so that a
    shard of each is a contiguous range. Tensors keep their memory.

    Args:
        args: Megatron's arguments.
        raw_state_dict: With ``model``, or ``model0``, ``model1`` ... (by parameter name), and maybe ``optimizer``
            (``state`` and ``param_to_group_meta`` by parameter name, or several such dicts by number).
        model: The first chunk of the model.
        chunks: All chunks. Empty: only the first.
        saving: Leave out what another pipeline stage saves.
    """
    chunks = chunks or [model]
    names = [Names(chunk) for chunk in chunks]
    prepared = CheckpointState(raw_state_dict, chunks)
    prepared.raw = {key: value for key, value in raw_state_dict.items() if re.fullmatch(r"model\d*|optimizer", key)}
    for key in prepared.raw:
        del prepared[key]
    models = [prepared.raw[key] for key in sorted(prepared.raw.keys() - {"optimizer"})]
    prepared["model"] = {}
    for of_chunk, state in zip(names, models, strict=True):
        prepared["model"].update(_weights(of_chunk, state, saving))
    if saving:
        prepared[LAYOUTS_KEY] = {name: text for of_chunk in names for name, text in of_chunk.described.items()}
    if "optimizer" in prepared.raw:
        prepared["optimizer"] = _optimizers(names, prepared.raw["optimizer"], saving)
    return prepared


def _weights(names: Names, state: Mapping[str, Any], saving: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = bare_name(key)
        if name.endswith("._extra_state") or names.is_left_out(name, saving):
            continue
        found.update(_described(names, name, f"module.{names.stored(name)}", value))
    return found


def _optimizers(names: Sequence[Names], raw: dict[Any, Any], saving: bool) -> dict[str, Any]:
    """Merge the state of all optimizers, and give every parameter its own dict of settings."""
    found: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
    local = {names_of.of(name): (names_of, name) for names_of in names for name in names_of.params}
    for state in [raw] if "state" in raw else [raw[number] for number in sorted(raw)]:
        # In place: Megatron keeps the dict of these, and reads loaded values from it.
        groups = state["param_to_group_meta"]
        for key in groups:
            groups[key] = dict(groups[key])
            if saving:
                # It depends on the parallel sizes of the run. Megatron-Core's FSDP, which puts experts and other
                # parameters into one group, would find that they differ.
                groups[key]["is_expert_parallel"] = False
            names_of, name = local[bare_name(key)]
            if not names_of.is_left_out(name, saving):
                found["param_to_group_meta"][key] = groups[key]
            elif not saving:
                groups[key] = groups[key.removesuffix(TIED_OUTPUT) + EMBEDDING]
        for key, value in state["state"].items():
            names_of, name = local[bare_name(key)]
            if not names_of.is_left_out(name, saving):
                stored = key.removesuffix(names_of.of(name)) + names_of.stored(name)
                found["state"].update(_described(names_of, name, stored, value))
    return found


def _described(names: Names, name: str, key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that a checkpoint has for a weight, or for the optimizer's state of it.

    Args:
        names: The names of the model chunk.
        name: The parameter's name in the model itself.
        key: Its key in the checkpoint, if it is not stored as several tensors.
        value: A tensor, or the optimizer's dict of state.
    """
    param = names.params.get(name)
    if param is None:
        yield key, value
        return
    parts = names.apart(name)
    if not parts:
        yield key, _rows(value, param, None)
    first = 0
    for part, sections in parts:
        rows = sum(count for _, count in sections)
        yield part.of(key), _rows(value, param, range(first, first + rows))
        first += rows
    if parts and first != param.main.shape[0]:
        raise RuntimeError(f"{name}: expected parts with {param.main.shape[0]} rows in all; got {first}.")


def _rows(value: Any, param: ShardedParameter, rows: range | None) -> Any:
    """Some of a tensor's rows as a DTensor that shares the tensor's memory; None for all rows.

    A dict is copied, with its tensors treated like that: loading replaces other values in the copy only.
    """
    if isinstance(value, dict):
        return {key: _rows(of_key, param, rows) for key, of_key in value.items()}
    if rows is None or not isinstance(value, DTensor):
        return value
    # A tensor-parallel rank has the same fraction of all rows as of any that belong together.
    start, stop = (row * math.prod(param.local_shape) // value.shape[0] for row in (rows.start, rows.stop))
    return narrow_rows(value, start, stop, (len(rows), *value.shape[1:]))
