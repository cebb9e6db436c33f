"""How names and shapes differ between the formats: one registry of rewrites, each with its inverse.

A rewrite takes all tensors of one kind (weights, or one optimizer state) and changes those that it knows. Reading a
format applies its rewrites in their order; writing applies the inverses in reverse order. In between stands the
canonical view, see :class:`megatron.fsdp.convert.canonical.TrainingState`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.fsdp.checkpoint import lazy
from megatron.fsdp.convert.canonical import Tensors, unsplit
from megatron.fsdp.naming.names import (
    DOWN_NORM,
    FUSED_DOWN,
    NORMS,
    live_prediction_name,
    stored_names,
    stored_prediction_name,
)

TORCH_DIST = "torch_dist"
FSDP_DTENSOR = "fsdp_dtensor"

_STACKED_LAYERS = re.compile(r"^(?P<block>(?:.*\.)?layers\.)(?!\d+\.)(?P<rest>.+)$")
_LAYER = re.compile(r"^(?P<block>(?:.*?\.)?layers\.)(?P<index>\d+)\.(?P<rest>.+)$")
_STORED_EXPERT = re.compile(
    r"^(?P<mlp>.*\.experts\.)experts\.(?:(?P<index>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)(?P<half>_[wv])?$"
)
_GROUPED_EXPERT = re.compile(
    r"^(?P<mlp>.*\.experts\.)(?P<module>linear_fc\d)\.(?P<kind>weight|bias)(?P<index>\d+)(?P<half>_[wv])?$"
)
_SINGLE_EXPERT = re.compile(
    r"^(?P<mlp>.*\.experts\.)local_experts\.(?P<index>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)(?P<half>_[wv])?$"
)
_QKV = "self_attention.linear_qkv.weight"
_FC1 = re.compile(r"^(?P<mlp>.*\.)linear_fc1\.(?P<kind>weight|bias)(?P<index>\d*)$")
_MAMBA_PARTS = re.compile(r"^(.*\.mixer\.)(in_proj\.weight|conv1d\.weight|conv1d\.bias)\.(z|x|B|C|dt)$")
_GDN_PARTS = re.compile(r"^(.*\.)(in_proj\.weight|conv1d\.weight|conv1d\.bias)\.(query|key|value|z|beta|alpha)$")
_PART_ORDER = ("z", "x", "B", "C", "dt"), ("query", "key", "value", "z", "beta", "alpha")


@dataclass(frozen=True)
class Facts:
    """What the rewrites cannot tell from a tensor's name.

    Attributes:
        stacked: Beginnings of keys whose layers are stored in one tensor, such as ``decoder.layers.``.
        separate_norms: Layer norms before linear layers are modules of their own, as in Megatron's local layers, though
            ``torch_dist`` names them as parts of the linear layers.
        grouped_experts: A layer's experts are parameters of one grouped linear layer: ``linear_fc1.weight3``.
        single_experts: Each expert is stored in a tensor of its own.
        stored_halves: Gate and up projections are stored apart.
        gated: Parameters made of gate and up projections, by canonical name without halves.
        sections: Parameters that are stored in several parts: rows of each part, by canonical name.
        q_lora_rank: Rows of a fused MLA down projection that belong to the queries.
        tensor_parallel: Ranks that each wrote a part of a layer.
        live_mtp: Multi-token prediction's layer has the name that it has in the model.
    """

    stacked: frozenset[str] = frozenset()
    separate_norms: bool = False
    grouped_experts: bool = False
    single_experts: bool = False
    stored_halves: bool = False
    gated: frozenset[str] = frozenset()
    sections: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    q_lora_rank: int = 0
    tensor_parallel: int = 1
    live_mtp: bool = False


class Rewrite(NamedTuple):
    """A difference between a format and the canonical view, and its inverse."""

    name: str
    format: str
    to_canonical: Callable[[Tensors, Facts], Tensors]
    from_canonical: Callable[[Tensors, Facts], Tensors]


class Layered(NamedTuple):
    """A name inside a transformer layer: ``decoder.layers.``, 3, ``mlp.linear_fc1.weight``."""

    block: str
    number: str
    rest: str

    @property
    def layer(self) -> str:
        """The beginning of every name in this layer, with the dot."""
        return f"{self.block}{self.number}."


def layered(name: str) -> Layered | None:
    """The parts of a canonical name inside a transformer layer; None for others, and for multi-token prediction's."""
    match = _LAYER.match(name)
    return None if match is None or "mtp." in match["block"] else Layered(match["block"], match["index"], match["rest"])


def _unstack_layers(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for key, tensor in tensors.items():
        match = _STACKED_LAYERS.match(key)
        if match is None:
            found[key] = tensor
            continue
        for index in range(tensor.shape[0]):
            found[f"{match['block']}{index}.{match['rest']}"] = tensor.select(0, index)
    return found


def _stack_layers(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    layers: dict[tuple[str, str], Tensors] = {}
    for name, tensor in tensors.items():
        place = layered(name)
        if place is None or place.block not in facts.stacked:
            found[name] = tensor
        else:
            layers.setdefault((place.block, place.rest), {})[place.number] = tensor
    for (block, rest), parts in layers.items():
        found[f"{block}{rest}"] = _stacked(parts, f"{block}{rest}")
    return found


def _stacked(parts: Tensors, key: str) -> lazy.LazyTensor:
    """Tensors by index, from 0 on, in one."""
    wanted = [str(index) for index in range(len(parts))]
    if set(wanted) != set(parts) or len({tensor.shape for tensor in parts.values()}) != 1:
        raise ValueError(
            f"{key}: expected equal shapes at indices 0 to {len(parts) - 1} to store them in one tensor; got "
            f"{ {index: tensor.shape for index, tensor in parts.items()} }."
        )
    return lazy.stack([parts[index] for index in wanted])


def expert_name(facts: Facts, mlp: str, module: str, kind: str, index: str) -> str:
    """The canonical name of one expert's parameter, without its half."""
    if facts.grouped_experts:
        return f"{mlp}{module}.{kind}{index}"
    return f"{mlp}local_experts.{index}.{module}.{kind}"


def _unstack_experts(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for key, tensor in tensors.items():
        match = _STORED_EXPERT.match(key)
        if match is None:
            found[key] = tensor
            continue
        half = match["half"] or ""
        if match["index"] is not None:
            found[expert_name(facts, match["mlp"], match["module"], match["kind"], match["index"]) + half] = tensor
            continue
        for index in range(tensor.shape[0]):
            name = expert_name(facts, match["mlp"], match["module"], match["kind"], str(index))
            found[name + half] = tensor.select(0, index)
    return found


def _stack_experts(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    experts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        match = _GROUPED_EXPERT.match(name) or _SINGLE_EXPERT.match(name)
        if match is None:
            found[name] = tensor
            continue
        rest = f"{match['module']}.{match['kind']}{match['half'] or ''}"
        if facts.single_experts:
            found[f"{match['mlp']}experts.{match['index']}.{rest}"] = tensor
        else:
            experts.setdefault(f"{match['mlp']}experts.{rest}", {})[match["index"]] = tensor
    return found | {key: _stacked(parts, key) for key, parts in experts.items()}


def gated_parameters(tensors: Tensors) -> frozenset[str]:
    """The first layers of gated MLPs, by name without halves: they have twice the rows that the second has columns.

    Args:
        tensors: By canonical name.
    """
    found = set()
    for name, tensor in tensors.items():
        match = _FC1.match(unsplit(name))
        if match is None:
            continue
        second = tensors.get(f"{match['mlp']}linear_fc2.weight{match['index']}")
        if unsplit(name) != name or (second is not None and tensor.shape[0] == 2 * second.shape[-1]):
            found.add(unsplit(name))
    return frozenset(found)


def _split_gates(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name in facts.gated:
            found[f"{name}_w"], found[f"{name}_v"] = tensor.chunk(2)
        elif unsplit(name) != name and unsplit(name) not in facts.gated:
            # Stored apart, but one tensor in the other format: its gate is no SwiGLU.
            found[unsplit(name)] = lazy.cat([tensors[f"{unsplit(name)}_{half}"] for half in "wv"])
        else:
            found[name] = tensor
    return found


def _join_gates(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        whole = unsplit(name)
        if whole == name or facts.stored_halves:
            found[name] = tensor
        elif whole not in found:
            found[whole] = lazy.cat([tensors[f"{whole}_w"], tensors[f"{whole}_v"]])
    return found


def _separate_norms(tensors: Tensors, facts: Facts) -> Tensors:
    if not facts.separate_norms:
        return tensors
    for alias in NORMS:
        tensors = {alias.to_stored(name): tensor for name, tensor in tensors.items()}
    return tensors


def layers_with_own_norms(names: Iterable[str]) -> set[str]:
    """Beginnings of the layers whose norms are modules, though torch_dist names them as parts of the linear layers.

    Layers with other attention than a fused QKV projection, such as MLA, keep their norms' names.

    Args:
        names: Canonical names.
    """
    return _layers_with(NORMS[0].stored, set(names))


def _layers_with(norm: str, names: Collection[str]) -> set[str]:
    layers = {name.removesuffix(_QKV) for name in names if name.endswith(_QKV)}
    return {layer for layer in layers if f"{layer}{norm}weight" in names}


def has_own_layers(names: Iterable[str]) -> bool | None:
    """Whether layers are Megatron's own, by what their norms are called; None if nothing tells.

    Args:
        names: Canonical names.
    """
    known = set(names)
    own, fused = (bool(_layers_with(norm, known)) for norm in NORMS[0])
    return own if own != fused else None


def _fuse_norms(tensors: Tensors, facts: Facts) -> Tensors:
    layers = layers_with_own_norms(tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        for alias in NORMS:
            if name.partition(alias.stored)[0] in layers:
                name = alias.to_live(name)
        found[name] = tensor
    return found


class Part(NamedTuple):
    """A part of a parameter that torch_dist stores apart: the parameter's canonical name, and the part's."""

    whole: str
    part: str
    order: tuple[str, ...]


def stored_part(key: str) -> Part | None:
    """Which part of a state-space layer's fused projection a stored tensor is; None for every other."""
    match = _MAMBA_PARTS.match(key)
    if match is not None:
        # The model holds the convolution's weights itself.
        return Part(match[1] + match[2].replace("conv1d.", "conv1d_"), match[3], _PART_ORDER[0])
    match = _GDN_PARTS.match(key)
    return Part(match[1] + match[2], match[3], _PART_ORDER[1]) if match is not None else None


def _join_sections(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    parts: dict[str, Tensors] = {}
    order: dict[str, tuple[str, ...]] = {}
    for key, tensor in tensors.items():
        part = stored_part(key)
        if part is None:
            found[key] = tensor
        else:
            parts.setdefault(part.whole, {})[part.part] = tensor
            order[part.whole] = part.order
    return found | {
        whole: lazy.cat([stored[part] for part in order[whole] if part in stored]) for whole, stored in parts.items()
    }


def _split_sections(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        sections = facts.sections.get(name)
        if sections is None:
            found[name] = tensor
            continue
        start = 0
        for part, rows in sections.items():
            key = f"{name.replace('mixer.conv1d_', 'mixer.conv1d.')}.{part}"
            found[key] = tensor.narrow(0, start, rows)
            start += rows
        if start != tensor.shape[0]:
            raise ValueError(f"{name}: expected parts with {tensor.shape[0]} rows; got {dict(sections)}.")
    return found


def _unfuse_down_projection(tensors: Tensors, facts: Facts) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        name = DOWN_NORM.to_stored(name)
        if f".{FUSED_DOWN}." not in name:
            found[name] = tensor
            continue
        if facts.tensor_parallel > 1:
            raise ValueError(
                f"{name}: it is stored fused, and was written with tensor parallelism: whether each rank's rows of "
                "queries, keys and values follow each other is not said. Load it with the version that wrote it, "
                "with tensor_model_parallel_size 1, and save it."
            )
        queries = facts.q_lora_rank
        if not 0 < queries < tensor.shape[0]:
            raise ValueError(f"{name}: expected q_lora_rank in the arguments, to split it; got {queries}.")
        parts = tensor.narrow(0, 0, queries), tensor.narrow(0, queries, tensor.shape[0] - queries)
        found |= zip(stored_names(name), parts, strict=True)
    return found


def _canonical_mtp(tensors: Tensors, facts: Facts) -> Tensors:
    return {stored_prediction_name(name): tensor for name, tensor in tensors.items()}


def _live_mtp(tensors: Tensors, facts: Facts) -> Tensors:
    return {live_prediction_name(name): tensor for name, tensor in tensors.items()} if facts.live_mtp else tensors


def _unchanged(tensors: Tensors, facts: Facts) -> Tensors:
    return tensors


# In the order in which reading applies them. MLA's projections stay apart when written: every version reads that.
REWRITES = (
    Rewrite("layers", TORCH_DIST, _unstack_layers, _stack_layers),
    Rewrite("experts", TORCH_DIST, _unstack_experts, _stack_experts),
    Rewrite("norms", TORCH_DIST, _separate_norms, _fuse_norms),
    Rewrite("sections", TORCH_DIST, _join_sections, _split_sections),
    Rewrite("gates", TORCH_DIST, _split_gates, _join_gates),
    Rewrite("mla", FSDP_DTENSOR, _unfuse_down_projection, _unchanged),
    Rewrite("mtp", FSDP_DTENSOR, _canonical_mtp, _live_mtp),
)


def to_canonical(tensors: Tensors, format: str, facts: Facts) -> Tensors:
    """A format's tensors under canonical names.

    Raises:
        ValueError: A tensor does not have the shape that its name promises.
    """
    for rewrite in REWRITES:
        if rewrite.format == format:
            tensors = rewrite.to_canonical(tensors, facts)
    return tensors


def from_canonical(tensors: Tensors, format: str, facts: Facts) -> Tensors:
    """Tensors under canonical names as a format stores them.

    Raises:
        ValueError: Tensors that are to be stored in one differ in shape, or one is missing.
    """
    for rewrite in reversed(REWRITES):
        if rewrite.format == format:
            tensors = rewrite.from_canonical(tensors, facts)
    return tensors
