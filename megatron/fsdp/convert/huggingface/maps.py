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
        megatron: Megatron's name with its own layers (``local``).
        rule: Key of ``rules.RULES``.
        transformer_engine: Megatron's name with Transformer Engine's layers, if it differs.
        also: Further Megatron names that are read but never written.
        when: A word of ``Model.features``. Without this feature the tensors do not exist.
        buffer: Whether the tensor is a buffer instead of a parameter. Both sides keep buffers in float32, because small
            differences in a router's bias change which experts are chosen.
    """

    huggingface: Names
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


def _linear(huggingface: str, megatron: str, when: str = "") -> tuple[Entry, ...]:
    """A linear layer, with a bias if the model has biases."""
    return (
        Entry(f"{huggingface}.weight", f"{megatron}.weight", when=when),
        Entry(f"{huggingface}.bias", f"{megatron}.bias", when="bias"),
    )


def _gated_mlp(huggingface: str, megatron: str, when: str = "") -> tuple[Entry, ...]:
    return (
        Entry(f"{huggingface}.gate_proj.weight", f"{megatron}.linear_fc1.weight_w", when=when),
        Entry(f"{huggingface}.up_proj.weight", f"{megatron}.linear_fc1.weight_v", when=when),
        Entry(f"{huggingface}.down_proj.weight", f"{megatron}.linear_fc2.weight", when=when),
    )


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FC1_NORM = "mlp.linear_fc1.layer_norm_weight"

ATTENTION = (
    Entry(
        "input_layernorm.weight",
        "input_layernorm.weight",
        transformer_engine="self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(tuple(f"{name}.weight" for name in _QKV), "self_attention.linear_qkv.weight", "qkv"),
    Entry(tuple(f"{name}.bias" for name in _QKV), "self_attention.linear_qkv.bias", "qkv", when="bias"),
    Entry("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", when="norm"),
    Entry("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", when="norm"),
    *_linear("self_attn.o_proj", "self_attention.linear_proj"),
)

# Both sides store the rotary part of queries and keys as interleaved pairs, so rows need no permutation.
LATENT_ATTENTION = (
    Entry("input_layernorm.weight", "input_layernorm.weight"),
    Entry("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", when="no query rank"),
    Entry("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", when="query rank"),
    Entry(
        "self_attn.q_a_layernorm.weight",
        "self_attention.q_layernorm.weight",
        transformer_engine="self_attention.linear_q_up_proj.layer_norm_weight",
        when="query rank",
    ),
    Entry("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", when="query rank"),
    Entry("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight"),
    Entry(
        "self_attn.kv_a_layernorm.weight",
        "self_attention.kv_layernorm.weight",
        transformer_engine="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Entry("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight"),
    Entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
)

DENSE_MLP = (
    Entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", transformer_engine=_FC1_NORM),
    *_gated_mlp("mlp", "mlp"),
    Entry("mlp.gate_proj.bias", "mlp.linear_fc1.bias_w", when="bias"),
    Entry("mlp.up_proj.bias", "mlp.linear_fc1.bias_v", when="bias"),
    Entry("mlp.down_proj.bias", "mlp.linear_fc2.bias", when="bias"),
)

EXPERTS_MLP = (
    # A torch_dist checkpoint of local layers uses the dense MLP's name even for layers with experts.
    Entry("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", also=(_FC1_NORM,)),
    Entry("mlp.gate.weight", "mlp.router.weight"),
    *_gated_mlp("mlp.shared_experts", "mlp.shared_experts", when="shared expert"),
)

ROUTER_BIAS = (Entry("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", buffer=True),)

EXPERT = tuple(
    Entry(
        f"mlp.experts.{{e}}.{huggingface}.weight",
        f"mlp.experts.local_experts.{{e}}.{linear}.weight{half}",
        transformer_engine=f"mlp.experts.{linear}.weight{{e}}{half}",
    )
    for huggingface, linear, half in (
        ("gate_proj", "linear_fc1", "_w"),
        ("up_proj", "linear_fc1", "_v"),
        ("down_proj", "linear_fc2", ""),
    )
)

EMBEDDING = (Entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", "vocabulary"),)
OUTPUT = (
    Entry("model.norm.weight", "decoder.final_layernorm.weight"),
    Entry("lm_head.weight", "output_layer.weight", "vocabulary", when="output"),
)

# Tensors of a multi-token prediction layer besides those of a decoder layer. Hugging Face numbers such layers after the
# decoder's. In eh_proj, both sides put the embedding's half first.
FURTHER = (
    Entry("enorm.weight", "enorm.weight"),
    Entry("hnorm.weight", "hnorm.weight"),
    Entry("eh_proj.weight", "eh_proj.weight"),
    Entry("shared_head.norm.weight", "final_layernorm.weight"),
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
        megatron: Megatron's names of the one tensor, the preferred name first.
        rule: Key of ``rules.RULES``.
        buffer: See :class:`Entry`.
    """

    huggingface: tuple[str, ...]
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
    for entry in table:
        if entry.when and entry.when not in model.features:
            continue
        names = entry.huggingface if isinstance(entry.huggingface, tuple) else (entry.huggingface,)
        yield Link(
            tuple(huggingface + name.format(e=expert) for name in names),
            tuple(prefix + name.format(e=expert) for name in entry.names(layer_spec) for prefix in megatron),
            entry.rule,
            entry.buffer,
        )
