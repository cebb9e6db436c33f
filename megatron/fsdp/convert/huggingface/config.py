"""Converts Hugging Face's config.json to a model's description and back."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from megatron.fsdp.convert.huggingface.model import Attention, Experts, Model, Rope, Router, Sizes
from megatron.fsdp.convert.huggingface.settings import Settings, latent_attention, router_groups

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

# Defaults of transformers for settings that config.json may leave out. Sizes have no defaults, except for positions.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}

# Constants in the code of Megatron's rotary embedding, which no argument sets.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_ORIGINAL = "original_max_position_embeddings"

# The keys in config.json of the fields of ``Sizes`` and ``Latent``.
_SIZES = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "positions": "max_position_embeddings",
}
_LATENT = {
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "plain": "qk_nope_head_dim",
    "rotary": "qk_rope_head_dim",
    "value": "v_head_dim",
}


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


# What values of config.json must be, unless they are None, which stands for a missing one. Other keys are not read.
_POSITIVE = """head_dim num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts n_group
    moe_intermediate_size num_experts_per_tok decoder_sparse_step topk_group original_max_position_embeddings """
_POSITIVE += " ".join((*_SIZES.values(), *_LATENT.values()))
_FINITE = """rms_norm_eps rope_theta routed_scaling_factor partial_rotary_factor factor mscale mscale_all_dim beta_fast
    beta_slow low_freq_factor high_freq_factor"""
_NATURAL = "first_k_dense_replace n_shared_experts num_nextn_predict_layers num_mtp_layers"
_LISTS = "mlp_only_layers weight_block_size"
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a positive integer", lambda v: _is_natural(v) and v > 0, _POSITIVE),
    ("a natural number", _is_natural, _NATURAL),
    ("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e30, _FINITE),
    ("true or false", lambda v: isinstance(v, bool), "attention_bias mlp_bias tie_word_embeddings norm_topk_prob"),
    ("an object", lambda v: isinstance(v, dict), "rope_parameters rope_scaling quantization_config"),
    ("a list of natural numbers", lambda v: type(v) is list and all(map(_is_natural, v)), _LISTS),
)
_KIND_OF = {key: (kind, check) for kind, check, keys in _KINDS for key in keys.split()}


def _check(values: Mapping[str, Any], counts: Mapping[str, int], inside: str = "") -> None:
    """Raise ValueError for the first value of another kind than expected, also in nested objects."""
    for key, value in values.items():
        if key not in _KIND_OF or value is None:
            continue
        kind, is_right = _KIND_OF[key]
        if not is_right(value):
            raise ValueError(f"config.json: {inside}{key}: expected {kind}; got {str(value)[:80]!r}.")
        if key in counts and value > counts[key]:
            raise ValueError(
                f"config.json: {inside}{key}: expected at most {counts[key]}, by the weights; got {value}."
            )
        if isinstance(value, dict):
            _check(value, counts, f"{inside}{key}.")


def _settings(values: Mapping[str, Any]) -> Settings:
    architecture = str(values.get("model_type"))
    if architecture not in CLASSES:
        raise NotImplementedError(
            f"config.json: expected model_type to be {', '.join(CLASSES)}; got {values.get('model_type')!r}."
        )
    given = {key: value for key, value in values.items() if value is not None}
    return Settings("config.json", architecture, _DEFAULTS[architecture] | given, partial=True)


def from_config(values: Mapping[str, Any], shapes: Collection[tuple[int, ...]] | None = None) -> Model:
    """Describe the model of a config.json.

    Args:
        values: The file's contents.
        shapes: Of the weights, which limit the numbers of layers and of experts. None: they are not known.

    Raises:
        NotImplementedError: The architecture is unknown, or Megatron-Core's GPT lacks some of its features. The message
            lists all of them.
        ValueError: A size is missing, or a value is of another kind than expected or contradicts the weights.
    """
    counts: dict[str, int] = {}
    if shapes is not None:
        # Each layer has tensors of its own. Each expert has, too, or an index in a tensor of all experts.
        counts = dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"), len(shapes))
        largest = max([len(shapes), *(size for shape in shapes for size in shape)])
        counts |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), largest)
    _check(values, counts)
    config = _settings(values)
    config.expect("hidden_act", "silu")
    config.expect("use_sliding_window", False)
    config.expect("pretraining_tp", 1)
    if config.architecture == "llama" and bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        config.problems.append("attention_bias and mlp_bias: expected both or neither; Megatron has one setting")
    sizes = Sizes(**{field: config.size(key) for field, key in _SIZES.items()})
    model = Model(
        architecture=config.architecture,
        sizes=sizes,
        attention=_attention(config, sizes),
        rope=_rope(config),
        experts=_experts(config, sizes),
        epsilon=float(config.get("rms_norm_eps")),
        tied=bool(config.get("tie_word_embeddings", False)),
        mtp_layers=int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))),
    )
    config.raise_problems("Megatron-Core's GPT does not support what config.json requires")
    return model


def _attention(config: Settings, sizes: Sizes) -> Attention:
    if config.architecture != "llama":
        config.expect("attention_bias", False)
    if config.architecture == "deepseek_v3":
        config.expect("rope_interleave", True)
        return latent_attention(config, _LATENT)
    heads = config.size("num_attention_heads")
    return Attention(
        heads=heads,
        groups=int(config.get("num_key_value_heads", heads)),
        head_size=int(config.get("head_dim", sizes.hidden // heads)),
        bias=bool(config.get("attention_bias")),
        norm=config.architecture != "llama",
    )


def _rope(config: Settings) -> Rope:
    # transformers 5 has one rope_parameters. Older versions have rope_theta and rope_scaling, which precedes it.
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = float(values.get("rope_theta") or config.get("rope_theta", 10000.0))
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor", 1.0)) != 1.0:
        config.problems.append("partial_rotary_factor: expected 1.0, the rotation of whole heads")
    if kind == "default":
        return Rope(base)
    if kind == "llama3" and config.architecture != "deepseek_v3":
        given = {**LLAMA3, **values, _ORIGINAL: _original(config, values)}
        for key, expected in LLAMA3.items():
            if given[key] != expected:
                config.problems.append(f"rope {key}: expected {expected}, Megatron's constant; got {given[key]}")
        if not values.get("factor"):
            raise ValueError(f"config.json: rope factor: expected a number with llama3; got {values.get('factor')!r}.")
        return Rope(base, "llama3", float(values["factor"]), int(LLAMA3["original_max_position_embeddings"]))
    if kind == "yarn":
        return _yarn(config, values, base)
    config.problems.append(f"rope_type: expected default, llama3 (not with latent attention) or yarn; got {kind!r}")
    return Rope(base)


def _original(config: Settings, values: Mapping[str, Any]) -> int:
    """The sequence length before its extension. As in transformers 5, a setting outside of rope's precedes it."""
    return int(config.get(_ORIGINAL) or values.get(_ORIGINAL) or config.get("max_position_embeddings"))


def _yarn(config: Settings, values: Mapping[str, Any], base: float) -> Rope:
    original = _original(config, values)
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    if mscale_all and not mscale:
        config.problems.append("rope mscale_all_dim: expected mscale as well")
    if values.get("attention_factor") is not None:
        config.problems.append("rope attention_factor: expected none; it is derived from factor and mscale")
    if values.get("truncate", True) is not True:
        config.problems.append("rope truncate: expected True")
    return Rope(
        base,
        "yarn",
        factor=float(values.get("factor") or config.size("max_position_embeddings") / original),
        original=original,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        # Unless both are set, transformers ignores them. Megatron's defaults have the same effect.
        mscale=float(mscale) if mscale and mscale_all else 1.0,
        mscale_all=float(mscale_all) if mscale and mscale_all else 0.0,
    )


def _experts(config: Settings, sizes: Sizes) -> Experts | None:
    if config.architecture == "qwen3_moe":
        step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers", [])
        return Experts(
            count=config.size("num_experts", "num_local_experts"),
            ffn=config.size("moe_intermediate_size"),
            shared_ffn=0,
            layers=tuple((i + 1) % step == 0 and i not in dense for i in range(sizes.layers)),
            router=Router(config.size("num_experts_per_tok"), normalized=bool(config.get("norm_topk_prob", False))),
        )
    if config.architecture == "deepseek_v3":
        config.expect("moe_layer_freq", 1)
        dense_layers = config.size("first_k_dense_replace")
        ffn = config.size("moe_intermediate_size")
        return Experts(
            count=config.size("n_routed_experts"),
            ffn=ffn,
            shared_ffn=ffn * int(config.get("n_shared_experts", 0)),
            layers=tuple(i >= dense_layers for i in range(sizes.layers)),
            router=_sigmoid_router(config),
        )
    return None


def _sigmoid_router(config: Settings) -> Router:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    # Megatron always normalizes the scores if it chooses several experts, and never the score of a single expert.
    config.expect("norm_topk_prob", True)
    chosen = config.size("num_experts_per_tok")
    if chosen < 2:
        config.problems.append("num_experts_per_tok: expected at least 2; Megatron does not normalize a single weight")
    groups = router_groups(config, "num_experts_per_tok", chosen, config.size("n_group"), config.size("topk_group"))
    return Router(chosen, "sigmoid", True, float(config.get("routed_scaling_factor")), *groups)


def to_config(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a model, for transformers 4 and 5.

    Args:
        model: Of one of the architectures in ``CLASSES``.
        dtype: Of the tensors.
    """
    attention = model.attention
    values: dict[str, Any] = {
        "architectures": [CLASSES[model.architecture]],
        "model_type": model.architecture,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key: getattr(model.sizes, field) for field, key in _SIZES.items()},
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "hidden_act": "silu",
        "rms_norm_eps": model.epsilon,
        "tie_word_embeddings": model.tied,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "rope_theta": model.rope.base,
        "rope_scaling": _rope_scaling(model.rope),
        "use_cache": True,
        # Without these keys, transformers takes its own defaults for tokens of the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.architecture == "llama":
        values["mlp_bias"] = attention.bias
    if attention.latent is None:
        values["head_dim"] = attention.head_size
    else:
        values |= {key: getattr(attention.latent, field) for field, key in _LATENT.items()}
        values["rope_interleave"] = True
    if model.experts is not None:
        values |= _expert_values(model, model.experts)
    return values


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "llama3":
        return {"rope_type": "llama3", "factor": rope.factor, **LLAMA3}
    values = {
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
    return values | ({"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all} if rope.mscale_all else {})


def _expert_values(model: Model, experts: Experts) -> dict[str, Any]:
    router = experts.router
    values = {
        "moe_intermediate_size": experts.ffn,
        "num_experts_per_tok": router.chosen,
        "norm_topk_prob": router.normalized,
    }
    if model.architecture == "qwen3_moe":
        return values | {
            "num_experts": experts.count,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(experts.layers) if not sparse],
        }
    return values | {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "first_k_dense_replace": experts.layers.index(True),
        "moe_layer_freq": 1,
        "n_group": router.groups,
        "topk_group": router.chosen_groups,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": router.scale,
        "num_nextn_predict_layers": model.mtp_layers,
    }
