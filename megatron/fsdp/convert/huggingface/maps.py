"""Tables of Hugging Face's and Megatron's names of the same tensors, one for each part of a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.fsdp.convert.huggingface.model import Model

Names = str | tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """The names of a tensor on both sides. ``{e}`` in a name is an expert's index.

    Attributes:
        huggingface: Hugging Face's name, or several names if Megatron fuses the tensors.
        shape: Of Hugging Face's tensor, or of each of them: the size of each dimension as a word of
            ``Model.dimensions``.
        megatron: Megatron's name with its own layers (``local``).
        rule: Key of ``rules.RULES``.
        transformer_engine: Megatron's name with Transformer Engine's layers, if it differs.
        also: Further Megatron names that are read but never written.
        when: A word of ``Model.features``. Without this feature the tensors do not exist.
        buffer: Whether the tensor is a buffer instead of a parameter. Both sides keep buffers in float32, because small
            differences in a router's bias change which experts are chosen.
    """

    huggingface: Names
    shape: Names
    megatron: str
    rule: str = "same"
    transformer_engine: str = ""
    also: tuple[str, ...] = ()
    when: str = ""
    buffer: bool = False

    def names(self, layer_spec: str) -> tuple[str, ...]:
        """Return all Megatron names, first the one for ``layer_spec`` (``local`` or ``transformer_engine``)."""
        names = (self.megatron, self.transformer_engine) if self.transformer_engine else (self.megatron,)
        return (*(names if layer_spec == "local" else names[::-1]), *self.also)


def _gated_mlp(name: str, size: str, when: str = "") -> tuple[Entry, ...]:
    return (
        Entry(f"{name}.gate_proj.weight", f"{size} hidden", f"{name}.linear_fc1.weight_w", when=when),
        Entry(f"{name}.up_proj.weight", f"{size} hidden", f"{name}.linear_fc1.weight_v", when=when),
        Entry(f"{name}.down_proj.weight", f"hidden {size}", f"{name}.linear_fc2.weight", when=when),
    )


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FC1_NORM = "mlp.linear_fc1.layer_norm_weight"

ATTENTION = (
    Entry(
        "input_layernorm.weight",
        "hidden",
        "input_layernorm.weight",
        transformer_engine="self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(
        tuple(f"{name}.weight" for name in _QKV),
        ("queries hidden", "keys hidden", "keys hidden"),
        "self_attention.linear_qkv.weight",
        "qkv",
    ),
    Entry(
        tuple(f"{name}.bias" for name in _QKV),
        ("queries", "keys", "keys"),
        "self_attention.linear_qkv.bias",
        "qkv",
        when="bias",
    ),
    Entry("self_attn.q_norm.weight", "head", "self_attention.q_layernorm.weight", when="norm"),
    Entry("self_attn.k_norm.weight", "head", "self_attention.k_layernorm.weight", when="norm"),
    Entry("self_attn.o_proj.weight", "hidden attended", "self_attention.linear_proj.weight"),
    Entry("self_attn.o_proj.bias", "hidden", "self_attention.linear_proj.bias", when="bias"),
)

# Both sides store the rotary part of queries and keys as interleaved pairs, so rows need no permutation.
LATENT_ATTENTION = (
    Entry("input_layernorm.weight", "hidden", "input_layernorm.weight"),
    Entry("self_attn.q_proj.weight", "queries hidden", "self_attention.linear_q_proj.weight", when="no query rank"),
    Entry(
        "self_attn.q_a_proj.weight", "query_rank hidden", "self_attention.linear_q_down_proj.weight", when="query rank"
    ),
    Entry(
        "self_attn.q_a_layernorm.weight",
        "query_rank",
        "self_attention.q_layernorm.weight",
        transformer_engine="self_attention.linear_q_up_proj.layer_norm_weight",
        when="query rank",
    ),
    Entry(
        "self_attn.q_b_proj.weight", "queries query_rank", "self_attention.linear_q_up_proj.weight", when="query rank"
    ),
    Entry("self_attn.kv_a_proj_with_mqa.weight", "compressed hidden", "self_attention.linear_kv_down_proj.weight"),
    Entry(
        "self_attn.kv_a_layernorm.weight",
        "key_value_rank",
        "self_attention.kv_layernorm.weight",
        transformer_engine="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Entry("self_attn.kv_b_proj.weight", "expanded key_value_rank", "self_attention.linear_kv_up_proj.weight"),
    Entry("self_attn.o_proj.weight", "hidden attended", "self_attention.linear_proj.weight"),
)

DENSE_MLP = (
    Entry("post_attention_layernorm.weight", "hidden", "pre_mlp_layernorm.weight", transformer_engine=_FC1_NORM),
    *_gated_mlp("mlp", "ffn"),
    Entry("mlp.gate_proj.bias", "ffn", "mlp.linear_fc1.bias_w", when="bias"),
    Entry("mlp.up_proj.bias", "ffn", "mlp.linear_fc1.bias_v", when="bias"),
    Entry("mlp.down_proj.bias", "hidden", "mlp.linear_fc2.bias", when="bias"),
)

EXPERTS_MLP = (
    # A torch_dist checkpoint of local layers uses the dense MLP's name even for layers with experts.
    Entry("post_attention_layernorm.weight", "hidden", "pre_mlp_layernorm.weight", also=(_FC1_NORM,)),
    Entry("mlp.gate.weight", "experts hidden", "mlp.router.weight"),
    *_gated_mlp("mlp.shared_experts", "shared", when="shared expert"),
)

ROUTER_BIAS = (Entry("mlp.gate.e_score_correction_bias", "experts", "mlp.router.expert_bias", buffer=True),)

EXPERT = tuple(
    Entry(
        f"mlp.experts.{{e}}.{huggingface}.weight",
        shape,
        f"mlp.experts.local_experts.{{e}}.{linear}.weight{half}",
        transformer_engine=f"mlp.experts.{linear}.weight{{e}}{half}",
    )
    for huggingface, shape, linear, half in (
        ("gate_proj", "expert hidden", "linear_fc1", "_w"),
        ("up_proj", "expert hidden", "linear_fc1", "_v"),
        ("down_proj", "hidden expert", "linear_fc2", ""),
    )
)

EMBEDDING = (Entry("model.embed_tokens.weight", "vocabulary hidden", "embedding.word_embeddings.weight", "vocabulary"),)
OUTPUT = (
    Entry("model.norm.weight", "hidden", "decoder.final_layernorm.weight"),
    Entry("lm_head.weight", "vocabulary hidden", "output_layer.weight", "vocabulary", when="output"),
)

# Tensors of a multi-token prediction layer besides those of a decoder layer. Hugging Face numbers such layers after the
# decoder's. In eh_proj, both sides put the embedding's half first.
FURTHER = (
    Entry("enorm.weight", "hidden", "enorm.weight"),
    Entry("hnorm.weight", "hidden", "hnorm.weight"),
    Entry("eh_proj.weight", "hidden both", "eh_proj.weight"),
    Entry("shared_head.norm.weight", "hidden", "final_layernorm.weight"),
)
# Hugging Face's files repeat these tensors in every such layer.
FURTHER_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
_FURTHER_BLOCKS = ("transformer_layer", "mtp_model_layer")


@dataclass(frozen=True)
class Architecture:
    """The name tables of one of Hugging Face's architectures.

    Attributes:
        attention: For every layer.
        experts: For a layer with experts, except for the experts themselves; empty without experts.
        further: For a multi-token prediction layer; empty if the architecture has none.
    """

    attention: tuple[Entry, ...]
    experts: tuple[Entry, ...] = ()
    further: tuple[Entry, ...] = field(default=())


ARCHITECTURES = {
    "llama": Architecture(ATTENTION),
    "qwen3": Architecture(ATTENTION),
    "qwen3_moe": Architecture(ATTENTION, EXPERTS_MLP),
    "deepseek_v3": Architecture(LATENT_ATTENTION, (*EXPERTS_MLP, *ROUTER_BIAS), FURTHER),
}


class Link(NamedTuple):
    """An entry with complete names.

    Attributes:
        huggingface: Hugging Face's names.
        shapes: The shapes of Hugging Face's tensors.
        megatron: Megatron's names of the one tensor, the preferred name first.
        rule: Key of ``rules.RULES``.
        buffer: See :class:`Entry`.
    """

    huggingface: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    megatron: tuple[str, ...]
    rule: str
    buffer: bool


def links(model: Model, layer_spec: str) -> Iterator[Link]:
    """Yield all tensors of a model, in Hugging Face's order.

    Args:
        model: The model.
        layer_spec: ``local`` or ``transformer_engine``: the layers whose Megatron names come first.
    """
    tables = ARCHITECTURES[model.architecture]
    yield from _links(EMBEDDING, model, layer_spec)
    for layer in range(model.sizes.layers):
        yield from _layer(model, layer, layer_spec, f"model.layers.{layer}.", (f"decoder.layers.{layer}.",))
    yield from _links(OUTPUT, model, layer_spec)
    for further in range(model.mtp_layers):
        layer = model.sizes.layers + further
        yield from _links(tables.further, model, layer_spec, f"model.layers.{layer}.", (f"mtp.layers.{further}.",))
        blocks = tuple(f"mtp.layers.{further}.{block}." for block in _FURTHER_BLOCKS)
        yield from _layer(model, layer, layer_spec, f"model.layers.{layer}.", blocks)


def _layer(model: Model, layer: int, layer_spec: str, huggingface: str, megatron: tuple[str, ...]) -> Iterator[Link]:
    tables = ARCHITECTURES[model.architecture]
    yield from _links(tables.attention, model, layer_spec, huggingface, megatron)
    if model.experts is None or not model.has_experts(layer):
        yield from _links(DENSE_MLP, model, layer_spec, huggingface, megatron)
        return
    yield from _links(tables.experts, model, layer_spec, huggingface, megatron)
    for expert in range(model.experts.count):
        yield from _links(EXPERT, model, layer_spec, huggingface, megatron, expert)


def _links(
    table: tuple[Entry, ...],
    model: Model,
    layer_spec: str,
    huggingface: str = "",
    megatron: tuple[str, ...] = ("",),
    expert: int = 0,
) -> Iterator[Link]:
    dimensions = model.dimensions
    for entry in table:
        if entry.when and entry.when not in model.features:
            continue
        names = entry.huggingface if isinstance(entry.huggingface, tuple) else (entry.huggingface,)
        shapes = entry.shape if isinstance(entry.shape, tuple) else (entry.shape,)
        yield Link(
            tuple(huggingface + name.format(e=expert) for name in names),
            tuple(tuple(dimensions[word] for word in shape.split()) for shape in shapes),
            tuple(prefix + name.format(e=expert) for name in entry.names(layer_spec) for prefix in megatron),
            entry.rule,
            entry.buffer,
        )
