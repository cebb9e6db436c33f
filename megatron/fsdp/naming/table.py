"""The kinds of fused parameters, whose rows belong to several projections: one entry of :data:`KINDS` each.

An entry gives the names of a kind, its rows in a model, and the tensors that checkpoints store in its place. To support
another kind of fused parameter, add an entry: training, checkpoints and conversion all use the table.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.fsdp.naming.names import DOWN, FUSED_DOWN, without_indices

# The name of each section of rows and its number of rows, in order.
Sections = tuple[tuple[str, int], ...]


class Part(NamedTuple):
    """A tensor of a checkpoint that stores some of a parameter's sections.

    Attributes:
        suffix: The end of the tensor's name.
        renamed: A word of the parameter's name, and the word of the tensor's name in its place.
        sections: The number of sections that the tensor stores.
    """

    suffix: str = ""
    renamed: tuple[str, str] = ("", "")
    sections: int = 1

    def of(self, name: str) -> str:
        """The name, or key, of the tensor for that of the parameter."""
        return name.replace(*self.renamed) + self.suffix

    def full_name(self, name: str) -> str:
        """The name of the parameter for that of the tensor."""
        return name.removesuffix(self.suffix).replace(*self.renamed[::-1])


@dataclass(frozen=True)
class RowLayout:
    """The rows of one parameter.

    Attributes:
        sections: The sections of a group, in their order.
        groups: How often the sections follow each other. Tensor-parallel ranks have whole groups.
        apart: The tensors that an ``fsdp_dtensor`` checkpoint stores instead of it, with their sections.
            Tensor-parallel ranks have a shard of each.
        spread: Tensor-parallel ranks have a shard of each section, not whole groups.
    """

    sections: Sections
    groups: int = 1
    apart: tuple[tuple[Part, Sections], ...] = ()
    spread: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of the full parameter."""
        return self.groups * sum(rows for _, rows in self.sections)

    @property
    def facts(self) -> dict[str, Any]:
        """The description of the rows that a checkpoint stores."""
        return {"sections": dict(self.sections), "groups": self.groups, "stored apart": bool(self.apart)}


class Owner(NamedTuple):
    """The facts about a model that the rows of a parameter depend on.

    Attributes:
        module: The module that contains the parameter's layer, such as the attention of a projection.
        gated: Whether the configuration of a module around the parameter asks for gated linear units.
        parameter: The parameter itself.
        rows: The number of rows of the full parameter.
    """

    module: Any
    gated: bool
    parameter: Any
    rows: int

    @property
    def config(self) -> Any:
        """The module's configuration; None if it has none."""
        return getattr(self.module, "config", None)


# Returns sections and groups; None if the parameter is of another kind despite its name.
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


def _latent(settings: Mapping[str, str], by_head: bool = False) -> Rows:
    """Rows of DeepSeek's latent attention, https://arxiv.org/abs/2405.04434.

    Args:
        settings: For each section, the setting that gives its number of rows.
        by_head: Every head has these sections.
    """

    def rows(owner: Owner) -> tuple[Sections, int] | None:
        config = owner.config
        if not getattr(config, "multi_latent_attention", False):
            return None
        sections = tuple((name, getattr(config, setting)) for name, setting in settings.items())
        return sections, config.num_attention_heads if by_head else 1

    return rows


def _halves(owner: Owner) -> tuple[Sections, int] | None:
    """Gate and up projection."""
    return ((("w", owner.rows // 2), ("v", owner.rows // 2)), 1) if owner.gated else None


def _mamba(names: tuple[str, ...]) -> Rows:
    """Rows of Mamba-2, https://arxiv.org/abs/2405.21060: an attribute of the parameter gives those of a rank."""

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
        rows: Computes the sections of its rows in a model.
        owner: The end of the path before ``name``, if it matters: a regular expression.
        spread: Tensor-parallel ranks have a shard of each section, not whole groups of sections.
        fsdp_dtensor: The tensors that an ``fsdp_dtensor`` checkpoint and the canonical view of conversions have in its
            place. Empty: they store it unchanged.
        torch_dist: The tensors that a ``torch_dist`` checkpoint has in its place. Empty: it stores it unchanged.
    """

    name: str
    rows: Rows
    owner: str = ""
    spread: bool = False
    fsdp_dtensor: tuple[Part, ...] = ()
    torch_dist: tuple[Part, ...] = ()

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches canonical names. Its group is the path of the owner."""
        return re.compile(rf"((?:.*\.)?{self.owner}){self.name}")

    def owner_of(self, name: str) -> str:
        """The path of the module that the rows of a parameter of this kind depend on, without the last dot."""
        found = self.pattern.fullmatch(name)
        assert found is not None
        return found[1].rstrip(".")

    def layout(self, owner: Owner) -> RowLayout | None:
        """The rows of one parameter; None if only its name is like this kind's."""
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


def _linear(name: str) -> str:
    return rf"{name}\.(?:weight|bias)"


def _each(names: Iterable[str], renamed: tuple[str, str] = ("", "")) -> tuple[Part, ...]:
    return tuple(Part(f".{name}", renamed) for name in names)


_ZXBC, _QKV = ("z", "x", "B", "C", "dt"), ("query", "key", "value")
_XBC, _QKVZ = _ZXBC[1:4], (*_QKV, "z", "beta", "alpha")
# A Mamba layer's module holds the weights of its convolution directly.
_CONVOLUTION = ("conv1d_", "conv1d.")

HALVES = Kind(
    # Megatron-Bridge's adapters: the layer that they are added to, and the second matrix, which has the layer's rows.
    _linear(r"linear_fc1(?:\.to_wrap|\.adapter\.linear_out)?") + r"\d*",
    _halves,
    owner=r"mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?",
    fsdp_dtensor=(Part("_w"), Part("_v")),
)
_DOWN_PARTS = Part(renamed=(FUSED_DOWN, DOWN[0])), Part(renamed=(FUSED_DOWN, DOWN[1]), sections=2)
_KEY_AND_VALUE = {"key and value": "kv_lora_rank", "rope": "qk_pos_emb_head_dim"}
KINDS: tuple[Kind, ...] = (
    HALVES,
    Kind(_linear("linear_qkv"), _attention),
    Kind(_linear(FUSED_DOWN), _latent({"query": "q_lora_rank", **_KEY_AND_VALUE}), fsdp_dtensor=_DOWN_PARTS),
    Kind(_linear(DOWN[1]), _latent(_KEY_AND_VALUE)),
    Kind(_linear("linear_q_(?:up_)?proj"), _latent({"query": "qk_head_dim", "rope": "qk_pos_emb_head_dim"}, True)),
    Kind(_linear("linear_kv_up_proj"), _latent({"key": "qk_head_dim", "value": "v_head_dim"}, True)),
    Kind(r"in_proj\.weight", _mamba(_ZXBC), r"mixer\.", spread=True, torch_dist=_each(_ZXBC)),
    Kind(r"conv1d_(?:weight|bias)", _mamba(_XBC), r"mixer\.", spread=True, torch_dist=_each(_XBC, _CONVOLUTION)),
    Kind(r"in_proj\.weight", _gated_delta, spread=True, torch_dist=_each(_QKVZ)),
    Kind(_linear("conv1d"), _gated_delta_convolution, spread=True, torch_dist=_each(_QKV)),
)


def kind_of(name: str) -> Kind | None:
    """The kind of a parameter by its canonical name; None if all its rows are alike."""
    return _kind_of(without_indices(name).replace("{}", "0"))


@functools.cache
def _kind_of(name: str) -> Kind | None:
    return next((kind for kind in KINDS if kind.pattern.fullmatch(name)), None)
