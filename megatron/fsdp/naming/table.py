"""The kinds of parameters whose rows compute several things: one row of :data:`KINDS` each.

A row says which names a kind has, what its rows are, and which tensors a checkpoint stores in its place.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.fsdp.naming.names import DOWN, FUSED_DOWN, without_indices

# What rows compute, and how many of them do, in their order.
Sections = tuple[tuple[str, int], ...]


class Part(NamedTuple):
    """A tensor of a checkpoint that stores some of a parameter's sections.

    Attributes:
        suffix: What the tensor's name has at its end.
        renamed: What in the parameter's name differs, and what it is in the tensor's.
        sections: The number of sections.
    """

    suffix: str = ""
    renamed: tuple[str, str] = ("", "")
    sections: int = 1

    def of(self, name: str) -> str:
        """The tensor's name, or key, for that of the parameter."""
        return name.replace(*self.renamed) + self.suffix

    def whole(self, name: str) -> str:
        """The parameter's name for that of the tensor."""
        return name.removesuffix(self.suffix).replace(*self.renamed[::-1])


@dataclass(frozen=True)
class RowLayout:
    """The rows of one parameter.

    Attributes:
        sections: The sections of a group, in their order.
        groups: How often the sections follow each other. Tensor-parallel ranks have whole groups.
        apart: Tensors that an ``fsdp_dtensor`` checkpoint has instead of the parameter, and the number of rows of each;
            tensor-parallel ranks have a shard of each.
        spread: Tensor-parallel ranks have a shard of each section instead.
    """

    sections: Sections
    groups: int = 1
    apart: tuple[tuple[Part, Sections], ...] = ()
    spread: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of the whole parameter."""
        return self.groups * sum(rows for _, rows in self.sections)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint says about the rows."""
        return {"sections": dict(self.sections), "groups": self.groups, "stored apart": bool(self.apart)}


class Owner(NamedTuple):
    """What the rows of a parameter depend on.

    Attributes:
        module: The module that the parameter's kind belongs to, such as the attention of a projection.
        gated: Whether a module around the parameter has a configuration with gated linear units.
        parameter: The parameter itself.
        rows: The number of rows of the whole parameter.
    """

    module: Any
    gated: bool
    parameter: Any
    rows: int

    @property
    def config(self) -> Any:
        """The module's configuration; None if it has none."""
        return getattr(self.module, "config", None)


# Sections and groups; None if the parameter is not of the kind, whatever its name.
Rows = Callable[[Owner], tuple[Sections, int] | None]


def _attention(owner: Owner) -> tuple[Sections, int] | None:
    """Query heads, key and value of each query group."""
    config = owner.config
    if config is None or getattr(config, "multi_latent_attention", False):
        return None
    groups, size = config.num_query_groups or config.num_attention_heads, config.kv_channels
    queries = config.num_attention_heads // groups * size
    gate = (("gate", queries),) if getattr(config, "attention_output_gate", False) else ()
    return (("query", queries), *gate, ("key", size), ("value", size)), groups


def _latent(by_head: bool = False, **settings: str) -> Rows:
    """Rows whose numbers are settings of DeepSeek's attention, https://arxiv.org/abs/2405.04434."""

    def rows(owner: Owner) -> tuple[Sections, int] | None:
        config = owner.config
        if not getattr(config, "multi_latent_attention", False):
            return None
        sections = tuple((name.replace("_", " "), getattr(config, setting)) for name, setting in settings.items())
        return sections, config.num_attention_heads if by_head else 1

    return rows


def _halves(owner: Owner) -> tuple[Sections, int] | None:
    """Gate and up projection."""
    return ((("w", owner.rows // 2), ("v", owner.rows // 2)), 1) if owner.gated else None


def _mamba(names: tuple[str, ...]) -> Rows:
    """Rows of Mamba-2, https://arxiv.org/abs/2405.21060; Megatron-Core notes on the parameter how many a rank has."""

    def rows(owner: Owner) -> tuple[Sections, int] | None:
        sizes = getattr(owner.parameter, "partition_sizes", ())
        return _spread(names, sizes, owner.module.pg_collection.tp.size()) if len(sizes) == len(names) else None

    return rows


def _gated_delta(owner: Owner) -> tuple[Sections, int] | None:
    """Rows of gated delta networks, https://arxiv.org/abs/2412.06464, as the module itself splits them."""
    names = getattr(owner.module, "in_proj_split_names", None)
    return names and _spread(names, owner.module.in_proj_split_sections, owner.module.tp_size)


def _gated_delta_convolution(owner: Owner) -> tuple[Sections, int] | None:
    module = owner.module
    if not hasattr(module, "in_proj_split_names"):
        return None
    return _spread(_QKV, (module.qk_dim_local_tp, module.qk_dim_local_tp, module.v_dim_local_tp), module.tp_size)


def _spread(names: Iterable[str], local: Iterable[int], ranks: int) -> tuple[Sections, int]:
    return tuple((name, rows * ranks) for name, rows in zip(names, local, strict=True)), 1


@dataclass(frozen=True)
class Kind:
    """A kind of parameter.

    Attributes:
        name: The end of its canonical name: a regular expression.
        rows: What its rows are, in a model.
        owner: The path before ``name``, as far as that decides: a regular expression.
        spread: Tensor-parallel ranks have a shard of each section, not whole groups of sections.
        fsdp_dtensor: The tensors that the canonical view and an ``fsdp_dtensor`` checkpoint have in its place.
        torch_dist: The tensors that a ``torch_dist`` checkpoint has in its place.
    """

    name: str
    rows: Rows
    owner: str = ""
    spread: bool = False
    fsdp_dtensor: tuple[Part, ...] = ()
    torch_dist: tuple[Part, ...] = ()

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the canonical name; the group is the path of the owner."""
        return re.compile(rf"((?:.*\.)?{self.owner}){self.name}")

    def owner_of(self, name: str) -> str:
        """The path of the module that the rows of a parameter of this kind depend on, without the last dot."""
        found = self.pattern.fullmatch(name)
        assert found is not None
        return found[1].rstrip(".")

    def layout(self, owner: Owner) -> RowLayout | None:
        """The rows of one parameter; None if it only has a name like this kind's."""
        found = self.rows(owner)
        if found is None:
            return None
        sections, groups = found
        apart, first = [], 0
        for part in self.fsdp_dtensor:
            apart.append((part, sections[first : first + part.sections]))
            first += part.sections
        layout = RowLayout(sections, groups, tuple(apart), self.spread)
        return layout if layout.rows == owner.rows else None


def _each(names: Iterable[str], renamed: tuple[str, str] = ("", "")) -> tuple[Part, ...]:
    return tuple(Part(f".{name}", renamed) for name in names)


_ZXBC, _QKV = ("z", "x", "B", "C", "dt"), ("query", "key", "value")
_XBC, _QKVZ = _ZXBC[1:4], (*_QKV, "z", "beta", "alpha")
# The model holds the weights of a Mamba layer's convolution itself.
_CONVOLUTION = ("conv1d_", "conv1d.")

HALVES = Kind(
    r"linear_fc1\.(?:weight|bias)\d*",
    _halves,
    owner=r"mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?",
    fsdp_dtensor=(Part("_w"), Part("_v")),
)
KINDS: tuple[Kind, ...] = (
    HALVES,
    Kind(r"linear_qkv\.(?:weight|bias)", _attention),
    Kind(
        rf"{FUSED_DOWN}\.(?:weight|bias)",
        _latent(query="q_lora_rank", key_and_value="kv_lora_rank", rope="qk_pos_emb_head_dim"),
        fsdp_dtensor=(Part(renamed=(FUSED_DOWN, DOWN[0])), Part(renamed=(FUSED_DOWN, DOWN[1]), sections=2)),
    ),
    Kind(
        rf"{DOWN[1]}\.(?:weight|bias)",
        _latent(key_and_value="kv_lora_rank", rope="qk_pos_emb_head_dim"),
    ),
    Kind(
        r"linear_q_(?:up_)?proj\.(?:weight|bias)",
        _latent(by_head=True, query="qk_head_dim", rope="qk_pos_emb_head_dim"),
    ),
    Kind(r"linear_kv_up_proj\.(?:weight|bias)", _latent(by_head=True, key="qk_head_dim", value="v_head_dim")),
    Kind(r"in_proj\.weight", _mamba(_ZXBC), owner=r"mixer\.", spread=True, torch_dist=_each(_ZXBC)),
    Kind(r"conv1d_(?:weight|bias)", _mamba(_XBC), owner=r"mixer\.", spread=True, torch_dist=_each(_XBC, _CONVOLUTION)),
    Kind(r"in_proj\.weight", _gated_delta, spread=True, torch_dist=_each(_QKVZ)),
    Kind(r"conv1d\.(?:weight|bias)", _gated_delta_convolution, spread=True, torch_dist=_each(_QKV)),
)


def kind_of(name: str) -> Kind | None:
    """The kind of a parameter by its canonical name; None if all its rows are alike."""
    return _kind_of(without_indices(name).replace("{}", "0"))


@functools.cache
def _kind_of(name: str) -> Kind | None:
    return next((kind for kind in KINDS if kind.pattern.fullmatch(name)), None)
