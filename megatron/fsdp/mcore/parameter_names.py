"""What a parameter is called in the whole model, and what its rows are: the registry behind checkpoints.

Layers and experts are numbered as if there were one pipeline stage and one expert-parallel rank (``REWRITES``). Rows of
fused projections are told apart (``LAYOUTS``); a checkpoint says so itself, under ``layouts``, and a tensor-parallel
rank's rows find their places in the whole by it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from megatron.core import parallel_state
from megatron.fsdp.naming.names import FUSED_DOWN, PREDICTION, without_indices

# Weights of the first linear layer of an MLP, whose rows are [gate | up] where the activation is gated.
GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.local_experts\.\d+\.|experts\.)?linear_fc1\.(?:weight|bias)\d*$"
)
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


class Stored(NamedTuple):
    """A tensor of a checkpoint that has some of a parameter's rows.

    Attributes:
        ending: What of the parameter's name is another in the tensor's: a regular expression.
        name: What it is there.
        sections: As of :class:`Layout`.
    """

    ending: str
    name: str
    sections: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        """Of the tensor."""
        return sum(rows for _, rows in self.sections)

    def of(self, key: str) -> str:
        """The tensor's key.

        Args:
            key: What the parameter's would be.
        """
        return re.sub(self.ending, self.name, key, count=1)


@dataclass(frozen=True)
class Layout:
    """What the rows of a fused parameter are.

    Attributes:
        sections: Rows of each section of a group, by what they compute, in their order.
        groups: How often the sections follow each other. Tensor-parallel ranks have whole groups.
        apart: Tensors that the checkpoint has instead of the parameter; tensor-parallel ranks have a part of each.
        spread: Tensor-parallel ranks have a part of each section instead.
    """

    sections: tuple[tuple[str, int], ...]
    groups: int = 1
    apart: tuple[Stored, ...] = ()
    spread: bool = False

    @property
    def rows(self) -> int:
        """Of the whole parameter."""
        return self.groups * sum(rows for _, rows in self.sections)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"sections": dict(self.sections), "groups": self.groups, "stored apart": bool(self.apart)}


def _attention(module: Any, config: Any) -> Iterator[tuple[str, Layout]]:
    """Query heads, key and value of each query group."""
    if "linear_qkv" in module._modules and not getattr(config, "multi_latent_attention", False):
        groups, size = config.num_query_groups or config.num_attention_heads, config.kv_channels
        queries = config.num_attention_heads // groups * size
        gate = (("gate", queries),) if getattr(config, "attention_output_gate", False) else ()
        yield "linear_qkv", Layout((("query", queries), *gate, ("key", size), ("value", size)), groups)


def _latent_attention(module: Any, config: Any) -> Iterator[tuple[str, Layout]]:
    """Projections of DeepSeek's attention, https://arxiv.org/abs/2405.04434."""
    if getattr(config, "multi_latent_attention", False):
        heads, rope = config.num_attention_heads, ("rope", config.qk_pos_emb_head_dim)
        latent = (("key and value", config.kv_lora_rank), rope)
        yield "linear_kv_down_proj", Layout(latent)
        if config.q_lora_rank:
            apart = (
                Stored(FUSED_DOWN, "linear_q_down_proj", (("query", config.q_lora_rank),)),
                Stored(FUSED_DOWN, "linear_kv_down_proj", latent),
            )
            yield FUSED_DOWN, Layout((("query", config.q_lora_rank), *latent), apart=apart)
        for name in ("linear_q_up_proj", "linear_q_proj"):
            yield name, Layout((("query", config.qk_head_dim), rope), heads)
        yield "linear_kv_up_proj", Layout((("key", config.qk_head_dim), ("value", config.v_head_dim)), heads)


def _mamba(module: Any, config: Any) -> Iterator[tuple[str, Layout]]:
    """Projections of Mamba-2, https://arxiv.org/abs/2405.21060; Megatron-Core says how many rows a rank has of each."""
    for child, names in (("in_proj.weight", "z x B C dt"), ("conv1d_weight", "x B C"), ("conv1d_bias", "x B C")):
        parameter = _parameter(module, child)
        sizes = getattr(parameter, "partition_sizes", None)
        if sizes is not None and len(sizes) == len(names.split()):
            yield child, _spread(names.split(), sizes, module.pg_collection.tp.size())


def _gated_delta(module: Any, config: Any) -> Iterator[tuple[str, Layout]]:
    """Projections of gated delta networks, https://arxiv.org/abs/2412.06464."""
    names = getattr(module, "in_proj_split_names", None)
    if names is not None:
        yield "in_proj.weight", _spread(names, module.in_proj_split_sections, module.tp_size)
        sizes = (module.qk_dim_local_tp, module.qk_dim_local_tp, module.v_dim_local_tp)
        for child in ("conv1d.weight", "conv1d.bias"):
            yield child, _spread(("query", "key", "value"), sizes, module.tp_size)


def _spread(names: Iterable[str], local: Iterable[int], ranks: int) -> Layout:
    return Layout(tuple((name, rows * ranks) for name, rows in zip(names, local, strict=True)), spread=True)


# Each yields names below a module, of linear layers or of parameters, and their layouts.
LAYOUTS: tuple[Callable[[Any, Any], Iterator[tuple[str, Layout]]], ...] = (
    _attention,
    _latent_attention,
    _mamba,
    _gated_delta,
)


def layouts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layout]:
    """Layouts of the parameters whose rows are not all of one kind, by name.

    Args:
        model: Without wrappers.
        shapes: Of the whole parameters, by name; a layout that has another number of rows is of something else.
    """
    found: dict[str, Layout] = {}
    gated: list[str] = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        prefix = f"{path}." if path else ""
        if getattr(config, "gated_linear_unit", False):
            gated.append(prefix)
        for rule in LAYOUTS:
            for child, layout in rule(module, config):
                names = [f"{prefix}{child}", f"{prefix}{child}.weight", f"{prefix}{child}.bias"]
                found |= {name: layout for name in names if name in shapes and shapes[name][:1] == (layout.rows,)}
    for name, shape in shapes.items():
        if GATED.search(name) and name.startswith(tuple(gated)):
            halves = (("w", shape[0] // 2), ("v", shape[0] // 2))
            found[name] = Layout(halves, apart=tuple(Stored("$", f"_{half[0]}", (half,)) for half in halves))
    return found


def _parameter(module: nn.Module, path: str) -> nn.Parameter | None:
    owner, _, name = path.rpartition(".")
    child = module._modules.get(owner) if owner else module
    return None if child is None else child._parameters.get(name)


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
