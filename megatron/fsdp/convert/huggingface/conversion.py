"""All tensors of a model from one side's names and layouts to the other's, or an error that lists what does not fit."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.convert.huggingface.maps import ARCHITECTURES, FURTHER_COPIES, links
from megatron.fsdp.convert.huggingface.model import Model
from megatron.fsdp.convert.huggingface.rules import RULES, Context, dequantized
from megatron.fsdp.convert.huggingface.shapes import require_shapes

# Follow from the configuration; old versions of transformers wrote them.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_FUSED_EXPERTS = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$")
_SCALES = "_scale_inv"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_FURTHER_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
_COMPARED_AT_ONCE = 16 << 20


def readable(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Tensors of a Hugging Face folder as the tables know them: one per expert, in plain floating point.

    Args:
        tensors: As they are in the files.
        config: The folder's config.json.

    Raises:
        NotImplementedError: They are quantized in another way than blocks of 8-bit floats.
        ValueError: Scales do not go with their weights.
    """
    quantization = config.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "fp8":
        raise NotImplementedError(
            f"config.json: expected weights that are not quantized, or of quant_method fp8; got {quantization}."
        )
    rows, columns = quantization.get("weight_block_size") or (128, 128)
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) or _DERIVED.search(name):
            continue
        if (scales := tensors.get(name + _SCALES)) is not None:
            with _about(name):
                tensor = dequantized(tensor, scales, (int(rows), int(columns)))
        with _about(name):
            found |= _experts_apart(name, tensor)
    return found


def _experts_apart(name: str, tensor: LazyTensor) -> Tensors:
    """Experts that are fused in one tensor, [experts, gate and up rows or hidden, ...], as tensors of each."""
    match = _FUSED_EXPERTS.match(name)
    if match is None:
        return {name: tensor}
    if len(tensor.shape) != 3:
        raise ValueError(f"expected three dimensions, experts first; got shape {tensor.shape}")
    found: Tensors = {}
    for expert in range(tensor.shape[0]):
        one, prefix = tensor.select(0, expert), f"{match['experts']}.{expert}"
        if match["kind"] == "down_proj":
            found[f"{prefix}.down_proj.weight"] = one
        else:
            found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"] = one.chunk(2)
    return found


class Imported(NamedTuple):
    """A model under Megatron's canonical names.

    Attributes:
        weights: Parameters.
        buffers: Tensors that are no parameters.
        model: Its description, without layers that the files do not hold.
        notes: What the user should know.
    """

    weights: Tensors
    buffers: Tensors
    model: Model
    notes: list[str]


def to_megatron(
    tensors: Tensors, model: Model, layer_spec: str, padded_vocabulary: int, dtype: torch.dtype | None = None
) -> Imported:
    """Name and lay out a Hugging Face model's tensors as Megatron does.

    Args:
        tensors: By Hugging Face name; see :func:`readable`.
        model: Described by its config.json.
        layer_spec: ``local`` or ``transformer_engine``: whose layers are to load the result.
        padded_vocabulary: Rows of the embedding, at least the vocabulary.
        dtype: Of the weights; None: as they are.

    Raises:
        ValueError: Tensors without an entry in the tables, entries without tensors, or tensors of another shape than
            the model's; all of them are listed.
    """
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    model, notes = _with_present_layers(model, sum(layer >= model.sizes.layers for layer in layers))
    context = Context(model, padded_vocabulary)
    weights: Tensors = {}
    buffers: Tensors = {}
    missing: list[str] = []
    known = list(links(model, layer_spec))
    named = {name: tensors[name] for link in known for name in link.huggingface if name in tensors}
    require_shapes(named, model, "config.json")
    used = set(_checked_copies(tensors, model))
    for link in known:
        if absent := [name for name in link.huggingface if name not in tensors]:
            missing += absent
            continue
        used |= set(link.huggingface)
        with _about(", ".join(link.huggingface)):
            (tensor,) = RULES[link.rule].to_megatron([tensors[name] for name in link.huggingface], context)
        if link.buffer:
            buffers[link.megatron[0]] = tensor.to(torch.float32)
        else:
            weights[link.megatron[0]] = tensor if dtype is None else tensor.to(dtype)
    _require_all(model, missing, set(tensors) - used)
    return Imported(weights, buffers, model, notes)


class Exported(NamedTuple):
    """A model under Hugging Face's names, in their order.

    Attributes:
        tensors: All of them.
        model: Its description, without layers that the checkpoint does not hold.
        notes: What the user should know.
    """

    tensors: Tensors
    model: Model
    notes: list[str]


def to_huggingface(tensors: Tensors, model: Model, dtype: torch.dtype | None = None) -> Exported:
    """Name and lay out a Megatron model's tensors as Hugging Face does.

    Args:
        tensors: Weights and buffers by canonical name, of Megatron's own layers or of Transformer Engine's.
        model: Described by the checkpoint's arguments.
        dtype: Of the weights; None: as they are.

    Raises:
        ValueError: As :func:`to_megatron`.
    """
    present = {match[1] for name in tensors if (match := _FURTHER_LAYER.match(name))}
    model, notes = _with_present_layers(model, len(present))
    context = Context(model, 0)
    found: Tensors = {}
    missing: list[str] = []
    used: set[str] = set()
    for link in links(model, "local"):
        source = next((name for name in link.megatron if name in tensors), None)
        if source is None:
            missing.append(" or ".join(link.megatron))
            continue
        used.add(source)
        with _about(source):
            parts = RULES[link.rule].to_huggingface([tensors[source]], context)
        for name, part in zip(link.huggingface, parts, strict=True):
            wanted = torch.float32 if link.buffer else dtype
            found[name] = part if wanted is None else part.to(wanted)
    _require_all(model, missing, set(tensors) - used)
    require_shapes(found, model, "the checkpoint's args")
    for name, original in _copies(model):
        found[name] = found[original]
    return Exported(found, model, notes)


def _with_present_layers(model: Model, present: int) -> tuple[Model, list[str]]:
    """The model with as many layers for further tokens as there are, and a note if it should have more."""
    if not ARCHITECTURES[model.architecture].further:
        return dataclasses.replace(model, mtp_layers=0), []
    if present >= model.mtp_layers:
        return model, []
    note = f"{model.mtp_layers - present} of {model.mtp_layers} multi-token prediction layers are not there: left out."
    return dataclasses.replace(model, mtp_layers=present), [note]


def _copies(model: Model) -> Iterator[tuple[str, str]]:
    """Tensors that Hugging Face's files repeat: their names, and the original's."""
    output = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
    for further in range(model.mtp_layers):
        for name, original in FURTHER_COPIES.items():
            source = output if original == "lm_head.weight" else original
            yield f"model.layers.{model.sizes.layers + further}.{name}", source


def _checked_copies(tensors: Tensors, model: Model) -> Iterator[str]:
    """Names of the copies that are there, which Megatron shares in place of repeating them."""
    expected = list(_copies(model))
    if model.tied:
        expected.append(("lm_head.weight", "model.embed_tokens.weight"))
    for name, original in expected:
        if name in tensors:
            if original in tensors and not _equal(tensors[name], tensors[original]):
                raise ValueError(f"{name}: expected a copy of {original}, which Megatron shares; they differ.")
            yield name


def _equal(first: LazyTensor, second: LazyTensor) -> bool:
    return first.shape == second.shape and all(
        torch.equal(first.read(box), second.read(box)) for box in first.blocks(_COMPARED_AT_ONCE)
    )


def _require_all(model: Model, missing: Iterable[str], unknown: Iterable[str]) -> None:
    lines: list[str] = []
    for what, names in (("without an entry in the table of names", unknown), ("missing", missing)):
        if found := sorted(names):
            lines += [f"{len(found)} {what}:", *(f"  {name}" for name in found)]
    if lines:
        raise ValueError("\n".join([f"The tensors are not those of this {model.architecture} model.", *lines]))


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Errors about a tensor's shape name the tensor."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from error
