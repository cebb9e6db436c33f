"""Tiny random models of transformers, built from their configurations: no download."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 27
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
_EXPERTS = {"num_experts": 5, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_hidden_layers": 3}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1000,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK_YARN = {
    **_YARN,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# By a name of the case: the architecture and its settings. Heads are not hidden_size / num_attention_heads wherever
# the architecture allows that.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 10}),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama-one-group-scaled": ("llama", {"num_key_value_heads": 1, "rope_parameters": _LLAMA3}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3-tied-yarn": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-some-dense": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**_LATENT, "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-no-query-rank": ("deepseek_v3", {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}


def build(case: str, seed: int = 0) -> Any:
    """A model of transformers in float32, in evaluation mode, all of whose tensors are random, norms and biases too."""
    import transformers

    architecture, changes = CASES[case]
    # A copy: transformers fills in dictionaries that it is given.
    settings = {k: dict(v) if isinstance(v, dict) else v for k, v in {**_SIZES, **changes}.items()}
    config = transformers.AutoConfig.for_model(architecture, **settings)
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
            elif "inv_freq" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def save(case: str, folder: Path, seed: int = 0, **options: Any) -> Any:
    """Write a model as transformers does, and return it.

    Args:
        case: A key of ``CASES``.
        folder: Where to.
        seed: Of the values.
        options: For ``save_pretrained``.
    """
    model = build(case, seed)
    model.save_pretrained(folder, **options)
    return model


def with_further_layer(tensors: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """A DeepSeek model's tensors and those of a layer that predicts the token after the next, as they are published.

    The layer follows the decoder's, of which it is a variation, and repeats the embedding and the output layer.
    """
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    last, further = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(seed)

    def varied(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    extra = {further + k.removeprefix(last): v + varied(*v.shape) for k, v in tensors.items() if k.startswith(last)}
    hidden = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{further}{name}.weight"] = 1 + varied(hidden)
    return {
        **tensors,
        **extra,
        f"{further}eh_proj.weight": varied(hidden, 2 * hidden),
        f"{further}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{further}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
