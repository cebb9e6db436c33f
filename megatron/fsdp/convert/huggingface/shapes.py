"""The expected shape of every tensor of a Hugging Face model."""

import re
from collections.abc import Mapping

from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.convert.huggingface.model import Model

# Names without layer and expert numbers, and the size of each dimension as a word of ``_sizes``.
_SHAPES = {
    "embed_tokens.weight": "vocabulary hidden",
    "norm.weight": "hidden",
    "lm_head.weight": "vocabulary hidden",
    "input_layernorm.weight": "hidden",
    "post_attention_layernorm.weight": "hidden",
    "self_attn.q_proj.weight": "queries hidden",
    "self_attn.q_proj.bias": "queries",
    "self_attn.k_proj.weight": "keys hidden",
    "self_attn.k_proj.bias": "keys",
    "self_attn.v_proj.weight": "keys hidden",
    "self_attn.v_proj.bias": "keys",
    "self_attn.o_proj.weight": "hidden attended",
    "self_attn.o_proj.bias": "hidden",
    "self_attn.q_norm.weight": "head",
    "self_attn.k_norm.weight": "head",
    "self_attn.q_a_proj.weight": "query_rank hidden",
    "self_attn.q_a_layernorm.weight": "query_rank",
    "self_attn.q_b_proj.weight": "queries query_rank",
    "self_attn.kv_a_proj_with_mqa.weight": "compressed hidden",
    "self_attn.kv_a_layernorm.weight": "key_value_rank",
    "self_attn.kv_b_proj.weight": "expanded key_value_rank",
    "mlp.gate_proj.weight": "ffn hidden",
    "mlp.gate_proj.bias": "ffn",
    "mlp.up_proj.weight": "ffn hidden",
    "mlp.up_proj.bias": "ffn",
    "mlp.down_proj.weight": "hidden ffn",
    "mlp.down_proj.bias": "hidden",
    "mlp.gate.weight": "experts hidden",
    "mlp.gate.e_score_correction_bias": "experts",
    "mlp.shared_experts.gate_proj.weight": "shared hidden",
    "mlp.shared_experts.up_proj.weight": "shared hidden",
    "mlp.shared_experts.down_proj.weight": "hidden shared",
    "mlp.experts.gate_proj.weight": "expert hidden",
    "mlp.experts.up_proj.weight": "expert hidden",
    "mlp.experts.down_proj.weight": "hidden expert",
    "enorm.weight": "hidden",
    "hnorm.weight": "hidden",
    "eh_proj.weight": "hidden both",
    "shared_head.norm.weight": "hidden",
    "shared_head.head.weight": "vocabulary hidden",
}
_NUMBERS = re.compile(r"^model\.(?:layers\.\d+\.)?|(?<=experts\.)\d+\.")


def shape_of(name: str, model: Model) -> tuple[int, ...]:
    """Return the expected shape of a tensor.

    Args:
        name: Hugging Face's name, from one of the name tables.
        model: The model.

    Raises:
        KeyError: The model has no such tensor.
    """
    sizes = _sizes(model)
    return tuple(sizes[word] for word in _SHAPES[_NUMBERS.sub("", name)].split())


def require_shapes(tensors: Mapping[str, LazyTensor], model: Model, source: str) -> None:
    """Compare the shapes of tensors with the expected shapes.

    Args:
        tensors: By Hugging Face's name.
        model: The model.
        source: What the model's description was made from, for the message.

    Raises:
        ValueError: Shapes differ. The message lists all of them.
    """
    shapes = {name: (shape_of(name, model), tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name}: expected {want}; got {have}" for name, (want, have) in sorted(shapes.items()) if want != have]
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(f"{len(wrong)} tensors have another shape than expected from {source}:\n  {lines}")


def _sizes(model: Model) -> dict[str, int]:
    """Sizes of dimensions, by the words of ``_SHAPES``."""
    sizes, attention = model.sizes, model.attention
    found = {
        "vocabulary": sizes.vocabulary,
        "hidden": sizes.hidden,
        "both": 2 * sizes.hidden,
        "ffn": sizes.ffn,
        "head": attention.head_size,
        "queries": attention.heads * attention.head_size,
        "keys": attention.groups * attention.head_size,
        "attended": attention.heads * attention.head_size,
    }
    if (latent := attention.latent) is not None:
        found |= {
            "attended": attention.heads * latent.value,
            "key_value_rank": latent.key_value_rank,
            "compressed": latent.key_value_rank + latent.rotary,
            "expanded": attention.heads * (latent.plain + latent.value),
        }
        if latent.query_rank is not None:
            found["query_rank"] = latent.query_rank
    if (experts := model.experts) is not None:
        found |= {"experts": experts.count, "expert": experts.ffn, "shared": experts.shared_ffn}
    return found
