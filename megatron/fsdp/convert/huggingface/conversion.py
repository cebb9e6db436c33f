"""Converts all tensors of a model between Hugging Face's and Megatron's names and layouts.

No tensor is dropped silently: tensors without a counterpart raise an error that lists them all.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.convert.huggingface.maps import ARCHITECTURES, FURTHER_COPIES, Link, links
from megatron.fsdp.convert.huggingface.model import Model
from megatron.fsdp.convert.huggingface.rules import RULES, Context, dequantized

# Written by old versions of transformers, although they follow from the configuration.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_FUSED_EXPERTS = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$")
_SCALES = "_scale_inv"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_FURTHER_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.")
_COMPARED_AT_ONCE = 16 << 20


def readable(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Bring the tensors of a Hugging Face folder into the form of the name tables: one per expert, not quantized.

    Args:
        tensors: As stored in the files.
        config: The folder's config.json.

    Raises:
        NotImplementedError: The quantization is not blocks of 8-bit floats.
        ValueError: The shapes of weights and scales contradict each other.
    """
    quantization = config.get("quantization_config") or {}
    if quantization and quantization.get("quant_method") != "fp8":
        raise NotImplementedError(
            f"config.json: expected weights that are not quantized, or of quant_method fp8; got {quantization}."
        )
    block = quantization.get("weight_block_size") or [128, 128]
    if len(block) != 2 or 0 in block:
        raise ValueError(f"config.json: weight_block_size: expected two positive integers; got {block}.")
    rows, columns = block
    found: Tensors = {}
    for name, tensor in tensors.items():
        if (name.endswith(_SCALES) and name.removesuffix(_SCALES) in tensors) or _DERIVED.search(name):
            continue
        if (scales := tensors.get(name + _SCALES)) is not None:
            with _errors_name(name):
                tensor = dequantized(tensor, scales, (rows, columns))
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name}: expected a weight of {', '.join(map(str, _DTYPES))}; got {tensor.dtype}.")
        with _errors_name(name):
            found |= _split_experts(name, tensor)
    return found


def _split_experts(name: str, tensor: LazyTensor) -> Tensors:
    """Split a tensor of all experts, [experts, gate and up rows or hidden, ...], into one tensor per expert."""
    match = _FUSED_EXPERTS.match(name)
    if match is None:
        return {name: tensor}
    if len(tensor.shape) != 3:
        raise ValueError(f"expected three dimensions, experts first; got shape {tensor.shape}")
    found: Tensors = {}
    for expert in range(tensor.shape[0]):
        one, prefix = tensor.select(expert), f"{match['experts']}.{expert}"
        if match["kind"] == "down_proj":
            found[f"{prefix}.down_proj.weight"] = one
        else:
            found[f"{prefix}.gate_proj.weight"], found[f"{prefix}.up_proj.weight"] = one.chunk(2)
    return found


class Imported(NamedTuple):
    """A model under Megatron's canonical names.

    Attributes:
        weights: Parameters, by name.
        buffers: Buffers, by name.
        model: Its description, without layers that the files lack.
        notes: Remarks for the user.
    """

    weights: Tensors
    buffers: Tensors
    model: Model
    notes: list[str]


def to_megatron(
    tensors: Tensors, model: Model, layer_spec: str, padded_vocabulary: int, dtype: torch.dtype | None = None
) -> Imported:
    """Convert a Hugging Face model's tensors to Megatron's names and layouts.

    Args:
        tensors: By Hugging Face name, from :func:`readable`.
        model: Description from config.json.
        layer_spec: ``local`` or ``transformer_engine``: the layers that will load the result.
        padded_vocabulary: Rows of the embedding, at least the vocabulary.
        dtype: Of the weights; None keeps their dtypes.

    Raises:
        ValueError: Tensors are missing, unknown or of a different shape. The message lists all of them.
    """
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    model, notes = _with_present_layers(model, sum(layer >= model.sizes.layers for layer in layers))
    context = Context(model, padded_vocabulary)
    weights: Tensors = {}
    buffers: Tensors = {}
    missing: list[str] = []
    known = list(links(model, layer_spec))
    _require_shapes(tensors, known, "config.json")
    used = set(_checked_copies(tensors, model))
    for link in known:
        if absent := [name for name in link.huggingface if name not in tensors]:
            missing += absent
            continue
        used |= set(link.huggingface)
        with _errors_name(", ".join(link.huggingface)):
            tensor = RULES[link.rule].to_megatron([tensors[name] for name in link.huggingface], context)
        if link.buffer:
            buffers[link.megatron[0]] = tensor.to(torch.float32)
        else:
            weights[link.megatron[0]] = _cast(tensor, dtype, link.megatron[0])
    _require_all(model, missing, set(tensors) - used)
    return Imported(weights, buffers, model, notes)


class Exported(NamedTuple):
    """A model under Hugging Face's names.

    Attributes:
        tensors: By name, in Hugging Face's order.
        model: Its description, without layers that the checkpoint lacks.
        notes: Remarks for the user.
    """

    tensors: Tensors
    model: Model
    notes: list[str]


def to_huggingface(tensors: Tensors, model: Model, dtype: torch.dtype | None = None) -> Exported:
    """Convert a Megatron model's tensors to Hugging Face's names and layouts.

    Args:
        tensors: Weights and buffers by canonical name, of Megatron's own layers or of Transformer Engine's.
        model: Description from the checkpoint's arguments.
        dtype: Of the weights; None keeps their dtypes.

    Raises:
        ValueError: Tensors are missing, unknown or of a different shape. The message lists all of them.
    """
    present = {match[1] for name in tensors if (match := _FURTHER_LAYER.match(name))}
    model, notes = _with_present_layers(model, len(present))
    context = Context(model, 0)
    found: Tensors = {}
    missing: list[str] = []
    used: set[str] = set()
    known = list(links(model, "local"))
    for link in known:
        source = next((name for name in link.megatron if name in tensors), None)
        if source is None:
            missing.append(" or ".join(link.megatron))
            continue
        used.add(source)
        with _errors_name(source):
            parts = RULES[link.rule].to_huggingface(tensors[source], context)
        for name, part in zip(link.huggingface, parts, strict=True):
            found[name] = _cast(part, torch.float32 if link.buffer else dtype, name)
    _require_all(model, missing, set(tensors) - used)
    _require_shapes(found, known, "the checkpoint's args")
    for name, original in _copies(model):
        found[name] = found[original]
    return Exported(found, model, notes)


def _cast(tensor: LazyTensor, dtype: torch.dtype | None, name: str) -> LazyTensor:
    """Cast a tensor, unless ``dtype`` is None. Reading raises ValueError if a finite value would become infinite."""
    return tensor if dtype is None else tensor.within(dtype, name).to(dtype)


def _with_present_layers(model: Model, present: int) -> tuple[Model, list[str]]:
    """Limit the model to the multi-token prediction layers that are present, and note how many are missing."""
    if not ARCHITECTURES[model.architecture].further:
        return dataclasses.replace(model, mtp_layers=0), []
    if present >= model.mtp_layers:
        return model, []
    missing = model.mtp_layers - present
    note = f"{missing} of {model.mtp_layers} multi-token prediction layers are missing and will be left out."
    return dataclasses.replace(model, mtp_layers=present), [note]


def _copies(model: Model) -> Iterator[tuple[str, str]]:
    """Yield the tensors that Hugging Face's files repeat: the name of the copy and of the original."""
    output = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
    for further in range(model.mtp_layers):
        for name, original in FURTHER_COPIES.items():
            source = output if original == "lm_head.weight" else original
            yield f"model.layers.{model.sizes.layers + further}.{name}", source


def _checked_copies(tensors: Tensors, model: Model) -> Iterator[str]:
    """Yield the names of the copies in the files. Megatron shares the original, so a copy must not differ."""
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


def _require_shapes(tensors: Tensors, known: Iterable[Link], source: str) -> None:
    """Compare the shapes of Hugging Face's tensors with those that ``source``, the model's description, implies."""
    expected = {name: shape for link in known for name, shape in zip(link.huggingface, link.shapes, strict=True)}
    wrong = [
        f"{name}: expected {expected[name]}; got {tensors[name].shape}"
        for name in sorted(expected.keys() & tensors.keys())
        if expected[name] != tensors[name].shape
    ]
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(f"{len(wrong)} tensors have a different shape than expected from {source}:\n  {lines}")


def _require_all(model: Model, missing: Iterable[str], unknown: Iterable[str]) -> None:
    lines: list[str] = []
    for what, names in (("without an entry in the table of names", unknown), ("missing", missing)):
        if found := sorted(names):
            lines += [f"{len(found)} {what}:", *(f"  {name}" for name in found)]
    if lines:
        raise ValueError("\n".join([f"The tensors are not those of this {model.architecture} model.", *lines]))


@contextmanager
def _errors_name(name: str) -> Iterator[None]:
    """Prefix errors about a tensor's shape with the tensor's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}.") from error
