"""Rewrites between the names and shapes of a format and the canonical ones, each with its inverse.

A rewrite takes all weights, or all tensors of one optimizer state, and changes those that it applies to. Reading a
format applies its rewrites in order and gives the canonical view, a
:class:`~megatron.fsdp.convert.canonical.TrainingState`. Writing applies the inverses in reverse order.
:mod:`megatron.fsdp.naming` has the names and kinds of parameters.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from megatron.fsdp.checkpoint import lazy
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.naming.names import (
    DOWN_NORM,
    FUSED_DOWN,
    GROUPED,
    LOCAL,
    NORMS,
    STORED,
    Name,
    live_prediction_name,
    stored_names,
    stored_prediction_name,
    without_half,
)
from megatron.fsdp.naming.table import HALVES, KINDS, Kind, Part, kind_of

TORCH_DIST = "torch_dist"
FSDP_DTENSOR = "fsdp_dtensor"

_QKV = "self_attention.linear_qkv.weight"
_FC1 = re.compile(r"linear_fc1\.(?:weight|bias)(\d*)$")
# Kinds that torch_dist stores in parts, and the kind that the canonical view has in parts.
_SECTIONS = {kind: kind.torch_dist for kind in KINDS if kind.torch_dist}
_HALVES = {HALVES: HALVES.fsdp_dtensor}


@dataclass(frozen=True)
class Facts:
    """Facts about a checkpoint that a tensor's name does not tell.

    Attributes:
        stacked: Prefixes of keys that store all layers in one tensor, such as ``decoder.layers.``.
        separate_norms: Norms before linear layers are separate modules, as in Megatron's local layers, although
            ``torch_dist`` names them as parameters of the linear layers.
        grouped_experts: The experts of a layer are parameters of one grouped linear layer: ``linear_fc1.weight3``.
        single_experts: Each expert is stored in a separate tensor.
        stored_halves: Gate and up projections are stored in separate tensors.
        gated: Canonical names, without halves, of the parameters that consist of gate and up projections.
        sections: The number of rows of each part of the parameters that are stored in parts, by canonical name.
        q_lora_rank: The number of rows of a fused MLA down projection that belong to the queries.
        tensor_parallel: The number of tensor-parallel ranks that wrote the checkpoint.
        live_mtp: Give the layer of multi-token prediction its name in the model.
    """

    stacked: frozenset[str] = frozenset()
    separate_norms: bool = False
    grouped_experts: bool = False
    single_experts: bool = False
    stored_halves: bool = False
    gated: frozenset[str] = frozenset()
    sections: Mapping[str, Sequence[int]] = field(default_factory=dict)
    q_lora_rank: int = 0
    tensor_parallel: int = 1
    live_mtp: bool = False


class Rewrite(NamedTuple):
    """A difference between a format and the canonical view, and its inverse."""

    to_canonical: Callable[[Tensors, Facts], Tensors]
    from_canonical: Callable[[Tensors, Facts], Tensors]


def _renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


def _unstack(tensors: Tensors, index: str, is_stacked: Callable[[Name], bool]) -> Tensors:
    """Replace each stacked tensor by the tensors of its first dimension.

    Args:
        tensors: By name.
        index: The field of a name that tells these tensors apart: ``layer`` or ``expert``.
        is_stacked: Whether a tensor is stacked, by its name.
    """
    found: Tensors = {}
    for key, tensor in tensors.items():
        name = Name.parse(key)
        if not is_stacked(name):
            found[key] = tensor
            continue
        for number in range(tensor.shape[0]):
            found[str(replace(name, **{index: str(number)}))] = tensor.select(number)
    return found


def _stack(tensors: Tensors, index: str, is_single: Callable[[Name], bool]) -> Tensors:
    """Store tensors whose names differ in one index together; the inverse of :func:`_unstack`."""
    found: Tensors = {}
    stacks: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        name = Name.parse(key)
        if is_single(name):
            stacks.setdefault(str(replace(name, **{index: ""})), {})[getattr(name, index)] = tensor
        else:
            found[key] = tensor
    return found | {key: _stacked(parts, key) for key, parts in stacks.items()}


def _unstack_layers(tensors: Tensors, facts: Facts) -> Tensors:
    return _unstack(tensors, "layer", lambda name: bool(name.block) and not name.layer)


def _stack_layers(tensors: Tensors, facts: Facts) -> Tensors:
    return _stack(tensors, "layer", lambda name: name.is_stackable and name.block in facts.stacked)


def _stacked(parts: Tensors, key: str) -> lazy.LazyTensor:
    """Stack tensors by index."""
    wanted = [str(index) for index in range(len(parts))]
    if set(wanted) != set(parts) or len({tensor.shape for tensor in parts.values()}) != 1:
        raise ValueError(
            f"{key}: expected equal shapes at indices 0 to {len(parts) - 1} to store them in one tensor; got "
            f"{ {index: tensor.shape for index, tensor in parts.items()} }."
        )
    return lazy.stack([parts[index] for index in wanted])


def _unstack_experts(tensors: Tensors, facts: Facts) -> Tensors:
    style = GROUPED if facts.grouped_experts else LOCAL
    single = _unstack(tensors, "expert", lambda name: name.style == STORED and not name.expert)
    return _renamed(single, lambda name: _with_style(name, style))


def _stack_experts(tensors: Tensors, facts: Facts) -> Tensors:
    stored = _renamed(tensors, lambda name: _with_style(name, STORED))
    return stored if facts.single_experts else _stack(stored, "expert", lambda name: name.style == STORED)


def _with_style(key: str, style: str) -> str:
    """The name with experts counted in another style; names of other parameters stay."""
    name = Name.parse(key)
    return str(replace(name, style=style)) if name.expert else key


def gated_parameters(tensors: Tensors) -> frozenset[str]:
    """Names, without halves, of the first layers of gated MLPs: they have twice as many rows as the second has columns.

    Args:
        tensors: By canonical name.
    """
    found = set()
    for name, tensor in tensors.items():
        whole = without_half(name)
        if kind_of(whole) is not HALVES:
            continue
        second = tensors.get(_FC1.sub(r"linear_fc2.weight\1", whole))
        if whole != name or (second is not None and tensor.shape[0] == 2 * second.shape[-1]):
            found.add(whole)
    return frozenset(found)


def _split_gates(tensors: Tensors, facts: Facts) -> Tensors:
    # The canonical view splits SwiGLU only: join the stored halves of other gates.
    joined = _join(tensors, _HALVES, lambda whole: whole not in facts.gated)
    return _split(joined, _HALVES, {name: [joined[name].shape[0] // 2] * 2 for name in facts.gated & joined.keys()})


def _join_gates(tensors: Tensors, facts: Facts) -> Tensors:
    return tensors if facts.stored_halves else _join(tensors, _HALVES)


def _join(
    tensors: Tensors, parts: Mapping[Kind, Sequence[Part]], is_joined: Callable[[str], bool] = lambda whole: True
) -> Tensors:
    """Put the parts of parameters together.

    Args:
        tensors: By name.
        parts: The tensors that parameters of a kind are stored as.
        is_joined: Whether to put a parameter together, by its name.

    Raises:
        ValueError: One half of a parameter is missing.
    """
    found: Tensors = {}
    kinds: dict[str, Kind] = {}
    for name, tensor in tensors.items():
        place = _parameter_of(name, parts)
        if place is None or not is_joined(place[0]):
            found[name] = tensor
        else:
            whole, kinds[place[0]] = place
            found[whole] = tensor  # keeps the place of the first part
    for whole, kind in kinds.items():
        names = [part.of(whole) for part in parts[kind]]
        missing = [name for name in names if name not in tensors]
        # Layers may lack sections, such as the convolution of a gated delta network, but never half of a projection.
        if missing and kind is HALVES:
            raise ValueError(f"{whole}: expected {' and '.join(names)}; {missing[0]} is missing.")
        found[whole] = lazy.cat([tensors[name] for name in names if name in tensors])
    return found


def _parameter_of(name: str, parts: Mapping[Kind, Sequence[Part]]) -> tuple[str, Kind] | None:
    """The parameter that a tensor is a part of, and its kind; None if it is no part of any."""
    for kind, of_kind in parts.items():
        for part in of_kind:
            if name.endswith(part.suffix) and kind.pattern.fullmatch(part.full_name(name)):
                return part.full_name(name), kind
    return None


def _split(tensors: Tensors, parts: Mapping[Kind, Sequence[Part]], rows: Mapping[str, Sequence[int]]) -> Tensors:
    """Replace parameters by their parts; the inverse of :func:`_join`.

    Args:
        tensors: By name.
        parts: The tensors that parameters of a kind are stored as.
        rows: The number of rows of each part, by name of the parameter; others stay.

    Raises:
        ValueError: A parameter has a different number of rows.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        kind = kind_of(name) if name in rows else None
        if kind is None:
            found[name] = tensor
            continue
        if sum(rows[name]) != tensor.shape[0]:
            raise ValueError(f"{name}: expected parts with {tensor.shape[0]} rows in all; got {list(rows[name])}.")
        starts = accumulate(rows[name], initial=0)
        for part, start, count in zip(parts[kind], starts, rows[name], strict=False):
            found[part.of(name)] = tensor.narrow(0, start, count)
    return found


def _separate_norms(tensors: Tensors, facts: Facts) -> Tensors:
    for alias in NORMS if facts.separate_norms else ():
        tensors = _renamed(tensors, alias.to_stored)
    return tensors


def layers_with_own_norms(names: Iterable[str]) -> set[str]:
    """Prefixes of layers whose norms are modules, although torch_dist names them as parameters of linear layers.

    Layers with other attention than a fused QKV projection, such as MLA, keep their norms' names.

    Args:
        names: Canonical names.
    """
    return _layers_with(NORMS[0].stored, set(names))


def _layers_with(norm: str, names: Collection[str]) -> set[str]:
    layers = {name.removesuffix(_QKV) for name in names if name.endswith(_QKV)}
    return {layer for layer in layers if f"{layer}{norm}weight" in names}


def has_own_layers(names: Iterable[str]) -> bool | None:
    """Whether layers are Megatron's local ones, by the names of their norms; None if that is not clear.

    Args:
        names: Canonical names.
    """
    known = set(names)
    own, fused = (bool(_layers_with(norm, known)) for norm in NORMS[0])
    return own if own != fused else None


def _fuse_norms(tensors: Tensors, facts: Facts) -> Tensors:
    layers = layers_with_own_norms(tensors)

    def fused(name: str) -> str:
        for alias in NORMS:
            if name.partition(alias.stored)[0] in layers:
                name = alias.to_live(name)
        return name

    return _renamed(tensors, fused)


def _unfuse_down_projection(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        name = DOWN_NORM.to_stored(name)
        if f".{FUSED_DOWN}." not in name:
            found[name] = tensor
            continue
        if facts.tensor_parallel > 1:
            raise ValueError(
                f"{name}: it is stored fused and was written with tensor parallelism: the order of its rows is unknown."
                " Load it with the version that wrote it, with tensor_model_parallel_size 1, and save it again."
            )
        queries = facts.q_lora_rank
        if not 0 < queries < tensor.shape[0]:
            raise ValueError(f"{name}: expected q_lora_rank in the arguments, to split it; got {queries}.")
        parts = tensor.narrow(0, 0, queries), tensor.narrow(0, queries, tensor.shape[0] - queries)
        found |= zip(stored_names(name), parts, strict=True)
    return found


def _live_mtp(tensors: Tensors, facts: Facts) -> Tensors:
    return _renamed(tensors, live_prediction_name) if facts.live_mtp else tensors


# Reading applies them in this order. MLA's projections are always written separately, which every version reads.
_REWRITES = {
    TORCH_DIST: (
        Rewrite(_unstack_layers, _stack_layers),
        Rewrite(_unstack_experts, _stack_experts),
        Rewrite(_separate_norms, _fuse_norms),
        Rewrite(
            lambda tensors, facts: _join(tensors, _SECTIONS),
            lambda tensors, facts: _split(tensors, _SECTIONS, facts.sections),
        ),
        Rewrite(_split_gates, _join_gates),
    ),
    FSDP_DTENSOR: (
        Rewrite(_unfuse_down_projection, lambda tensors, facts: tensors),
        Rewrite(lambda tensors, facts: _renamed(tensors, stored_prediction_name), _live_mtp),
    ),
}


def to_canonical(tensors: Tensors, format: str, facts: Facts) -> Tensors:
    """Convert a format's tensors to canonical names and shapes.

    Raises:
        ValueError: A tensor has the wrong shape for its name.
    """
    for rewrite in _REWRITES[format]:
        tensors = rewrite.to_canonical(tensors, facts)
    return tensors


def from_canonical(tensors: Tensors, format: str, facts: Facts) -> Tensors:
    """Convert tensors with canonical names to those that a format stores.

    Raises:
        ValueError: Tensors that the format stacks differ in shape, or one is missing.
    """
    for rewrite in reversed(_REWRITES[format]):
        tensors = rewrite.from_canonical(tensors, facts)
    return tensors
