"""Converts Megatron's arguments to a model's description and back, and to flags for a training script."""

import argparse
import itertools
import shlex
from typing import Any

import torch

from megatron.fsdp.convert.huggingface.config import LLAMA3
from megatron.fsdp.convert.huggingface.model import Attention, Experts, Model, Rope, Router, Sizes
from megatron.fsdp.convert.huggingface.settings import Settings, latent_attention, router_groups

# Arguments that change what a model computes, and that Hugging Face's four architectures imply to be off, ...
_OFF = """rotary_interleaved add_qkv_bias apply_layernorm_1p layernorm_zero_centered_gamma
    apply_residual_connection_post_layernorm qk_l2_norm use_mup attention_output_gate moe_shared_expert_gate
    moe_apply_probs_on_input mtp_use_repeated_layer quick_geglu squared_relu moe_router_force_load_balancing"""
# ... not to be set, ...
_UNSET = """rotary_seq_len_interpolation_factor softmax_scale window_size no_rope_freq experimental_attention_variant
    heterogeneous_layers_config_path hybrid_layer_pattern activation_func_clamp_value moe_latent_size
    moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size mtp_hybrid_override_pattern linear_attention_freq
    heterogeneous_layers_config_encoded_json hybrid_override_pattern spec moe_expert_rank_capacity_factor
    moe_router_topk_limited_devices moe_router_force_biased"""
# ... or to have one of some values.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "rotary_percent": (1.0, 1),
    "softmax_type": ("vanilla",),
    "glu_linear_offset": (0.0,),
    # Tokens beyond the capacity of an expert skip it. A negative capacity is none.
    "moe_expert_capacity_factor": (None, -1),
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(_UNSET.split(), (None,)),
}
# Ways of balancing experts that do not choose those with the highest scores.
_OTHER_CHOICES = ("sinkhorn", "quantile_balancing")
# The arguments of fields of ``Rope`` for yarn, and Megatron's defaults. Without latent attention they begin with yarn_;
# with it, the training script cannot change the defaults.
_YARN = {
    "original": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
}
# The arguments of the fields of ``Latent``.
_LATENT = {
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "plain": "qk_head_dim",
    "rotary": "qk_pos_emb_head_dim",
    "value": "v_head_dim",
}

# Epsilon of the norms inside DeepSeek's attention in transformers, which ignores rms_norm_eps there.
LATENT_EPSILON = 1e-6
# The factor that Megatron's training script always builds the model with.
TRAINED_LLAMA3_FACTOR = 8.0

_FLAGS = {"layernorm_epsilon": "--norm-epsilon"}
_NEGATIVE_FLAGS = {"add_bias_linear": "--disable-bias-linear"}
# Arguments that follow from others, or that no flag sets.
_WITHOUT_FLAG = ("add_position_embedding", "params_dtype")


def architecture_of(args: argparse.Namespace) -> str:
    """Return the ``model_type`` whose tensors a model with these arguments would have."""
    if getattr(args, "multi_latent_attention", False):
        return "deepseek_v3"
    if getattr(args, "num_experts", None):
        return "qwen3_moe"
    return "qwen3" if getattr(args, "qk_layernorm", False) else "llama"


def from_args(args: argparse.Namespace, vocabulary: int | None = None) -> Model:
    """Describe the model that was trained with these arguments.

    Args:
        args: Of the checkpoint.
        vocabulary: Number of tokens without padding. None: ``vocab_size`` in the arguments, else the padded number.

    Raises:
        NotImplementedError: None of the four architectures computes the same. The message lists all reasons.
        ValueError: A size is missing, or the vocabulary lacks tokens that the model was trained with.
    """
    architecture = architecture_of(args)
    known = Settings("args of the checkpoint", architecture, vars(args), partial=False)
    if vocabulary and vocabulary < (trained := int(known.get("vocab_size", 0))):
        raise ValueError(
            f"args of the checkpoint: expected a vocab_size of at most {vocabulary}, as in the original's config.json "
            f"or --vocab-size; got {trained}. Give the size of the vocabulary that the model was trained with."
        )
    for name, allowed in _EXPECTED.items():
        if name in known.values:
            known.expect(name, *allowed)
    sizes = Sizes(
        layers=known.size("num_layers"),
        hidden=known.size("hidden_size"),
        ffn=int(known.get("ffn_hidden_size") or 4 * known.size("hidden_size")),
        vocabulary=vocabulary or known.get("vocab_size") or known.size("padded_vocab_size"),
        positions=int(known.get("max_position_embeddings") or known.size("seq_length")),
    )
    experts = _experts(known, sizes.layers)
    model = Model(
        architecture=architecture,
        sizes=sizes,
        attention=_attention(known, sizes),
        rope=_latent_rope(known) if architecture == "deepseek_v3" else _rope(known),
        experts=experts,
        epsilon=float(known.get("layernorm_epsilon", known.get("norm_epsilon", 1e-5))),
        tied=not known.get("untie_embeddings_and_output_weights", False),
        mtp_layers=int(known.get("mtp_num_layers", 0)),
    )
    known.raise_problems(f"Hugging Face's {architecture} does not support what the checkpoint's args require")
    return model


def _attention(known: Settings, sizes: Sizes) -> Attention:
    heads = known.size("num_attention_heads")
    bias = bool(known.get("add_bias_linear", True))
    if bias and known.architecture != "llama":
        known.expect("add_bias_linear", False)
    if known.architecture == "deepseek_v3":
        known.expect("qk_layernorm", True)
        return latent_attention(known, _LATENT)
    if known.architecture == "qwen3_moe":
        known.expect("qk_layernorm", True)
    return Attention(
        heads=heads,
        groups=known.size("num_query_groups") if known.get("group_query_attention") else heads,
        head_size=int(known.get("kv_channels") or sizes.hidden // heads),
        bias=bias,
        norm=known.architecture != "llama",
    )


def _rope(known: Settings) -> Rope:
    if known.get("use_rotary_position_embeddings"):
        kind = "rope"
    else:
        known.expect("position_embedding_type", "rope", "yarn")
        kind = str(known.get("position_embedding_type"))
    base = float(known.get("rotary_base", 10000))
    if kind == "yarn":
        return _yarn(known, base, "yarn_")
    if known.get("use_rope_scaling"):
        factor = float(known.get("rope_scaling_factor", 8.0))
        return Rope(base, "llama3", factor, int(LLAMA3["original_max_position_embeddings"]))
    return Rope(base)


def _latent_rope(known: Settings) -> Rope:
    base, factor = float(known.get("rotary_base", 10000)), float(known.get("rotary_scaling_factor", 1.0))
    # With a factor of 1, yarn is plain rotation.
    if known.get("rope_type", "yarn") == "rope" or factor == 1.0:
        if factor != 1.0:
            # Megatron scales attention scores by mscale_all_dim even without yarn.
            known.expect("mscale_all_dim", 0.0, None)
        return Rope(base)
    return _yarn(known, base)


def _yarn(known: Settings, base: float, prefix: str = "") -> Rope:
    mscale, mscale_all = float(known.get("mscale", 1.0)), float(known.get("mscale_all_dim", 0.0))
    if not mscale_all:
        known.expect("mscale", 1.0, None)
    known.expect("yarn_correction_range_round_to_int", True, None)
    given: dict[str, Any] = {
        field: type(default)(known.get(prefix + name, default)) for field, (name, default) in _YARN.items()
    }
    factor = float(known.get("rotary_scaling_factor", 1.0))
    return Rope(base, "yarn", factor, **given, mscale=mscale, mscale_all=mscale_all)


def _experts(known: Settings, layers: int) -> Experts | None:
    count = known.get("num_experts")
    if not count:
        if known.architecture == "deepseek_v3":
            known.problems.append("num_experts: expected experts; got none")
        return None
    experts = Experts(
        count=int(count),
        ffn=int(known.get("moe_ffn_hidden_size") or known.size("ffn_hidden_size")),
        shared_ffn=int(known.get("moe_shared_expert_intermediate_size", 0)),
        layers=_expert_layers(known, layers),
        router=_router(known),
    )
    if known.architecture == "qwen3_moe":
        known.expect("moe_router_score_function", "softmax", None)
        known.expect("moe_shared_expert_intermediate_size", None, 0)
        known.expect("moe_router_enable_expert_bias", False, None)
        known.expect("moe_router_topk_scaling_factor", None, 1.0)
        known.expect("moe_router_group_topk", None)
        return experts
    known.expect("moe_router_score_function", "sigmoid")
    known.expect("moe_router_enable_expert_bias", True)
    if not experts.shared_ffn or experts.shared_ffn % experts.ffn:
        known.problems.append(
            "moe_shared_expert_intermediate_size: expected a multiple of moe_ffn_hidden_size; "
            f"got {experts.shared_ffn}, {experts.ffn}"
        )
    if list(experts.layers) != sorted(experts.layers) or not any(experts.layers):
        known.problems.append("moe_layer_freq: expected dense layers before those with experts, and one with experts")
    return experts


def _expert_layers(known: Settings, layers: int) -> tuple[bool, ...]:
    frequency = known.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(i % frequency == 0 for i in range(layers))
    if not isinstance(frequency, list) or len(frequency) != layers:
        raise ValueError(f"args of the checkpoint: expected moe_layer_freq to list {layers} layers; got {frequency!r}.")
    return tuple(bool(entry) for entry in frequency)


def _router(known: Settings) -> Router:
    score = str(known.get("moe_router_score_function", "softmax"))
    chosen, groups = int(known.get("moe_router_topk", 2)), int(known.get("moe_router_num_groups", 1))
    groups, chosen_groups = router_groups(known, "moe_router_topk", chosen, groups, known.get("moe_router_group_topk"))
    balancing = known.get("moe_router_load_balancing_type", ())
    for other in _OTHER_CHOICES:
        if other in balancing:
            known.problems.append(f"moe_router_load_balancing_type: expected a loss or none; got {other}")
    if score == "sigmoid" and chosen < 2:
        known.problems.append(f"moe_router_topk: expected at least 2; got {chosen}")
    return Router(
        chosen=chosen,
        score=score,
        # The weights sum to one after a softmax over the chosen experts. With pre_softmax, it is over all experts.
        normalized=score == "sigmoid" or not known.get("moe_router_pre_softmax", False),
        scale=float(known.get("moe_router_topk_scaling_factor", 1.0)),
        groups=groups,
        chosen_groups=chosen_groups,
    )


def to_args(model: Model, layer_spec: str, padded_vocabulary: int, dtype: torch.dtype) -> argparse.Namespace:
    """Return arguments that build the model, as Megatron's training script stores them in a checkpoint.

    Args:
        model: The model.
        layer_spec: ``local`` or ``transformer_engine``: the layers to build.
        padded_vocabulary: Rows of the embedding.
        dtype: Compute dtype.

    Raises:
        NotImplementedError: Megatron's training script lacks an argument for a setting. The message lists all of them.
    """
    if problems := _without_argument(model):
        raise NotImplementedError("Megatron has no arguments for what the model needs:\n  " + "\n  ".join(problems))
    sizes, attention = model.sizes, model.attention
    values: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": attention.heads,
        "max_position_embeddings": sizes.positions,
        "vocab_size": sizes.vocabulary,
        "padded_vocab_size": padded_vocabulary,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.epsilon,
        "swiglu": True,
        "add_bias_linear": attention.bias,
        "untie_embeddings_and_output_weights": not model.tied,
        "qk_layernorm": attention.norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": layer_spec,
        "add_position_embedding": True,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
    }
    if attention.latent is not None:
        values |= {"multi_latent_attention": True}
        values |= {name: getattr(attention.latent, field) for field, name in _LATENT.items()}
    else:
        values["kv_channels"] = attention.head_size
        if attention.groups != attention.heads:
            values |= {"group_query_attention": True, "num_query_groups": attention.groups}
    values |= _rope_arguments(model.rope, attention.latent is not None)
    if model.experts is not None:
        values |= _expert_arguments(model.experts, layer_spec)
    if model.mtp_layers:
        values["mtp_num_layers"] = model.mtp_layers
    return argparse.Namespace(**values)


def _without_argument(model: Model) -> list[str]:
    rope, problems = model.rope, []
    if not rope.base.is_integer():
        problems.append(f"rope_theta: expected an integer for --rotary-base; got {rope.base}")
    if model.attention.latent is not None and rope.kind == "yarn":
        for field, (_, expected) in _YARN.items():
            if getattr(rope, field) != expected:
                problems.append(f"rope {field}: expected {expected} with latent attention; got {getattr(rope, field)}")
    return problems


def _rope_arguments(rope: Rope, latent: bool) -> dict[str, Any]:
    values: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": int(rope.base), "rotary_percent": 1.0}
    if latent:
        values["rope_type"] = "yarn" if rope.kind == "yarn" else "rope"
    if rope.kind == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": rope.factor}
    if rope.kind == "yarn":
        values |= {"rotary_scaling_factor": rope.factor, "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all}
        if not latent:
            values["position_embedding_type"] = "yarn"
            values |= {f"yarn_{name}": getattr(rope, field) for field, (name, _) in _YARN.items()}
    return values


def _expert_arguments(experts: Experts, layer_spec: str) -> dict[str, Any]:
    router = experts.router
    values: dict[str, Any] = {
        "num_experts": experts.count,
        "moe_layer_freq": 1 if all(experts.layers) else [int(layer) for layer in experts.layers],
        "moe_ffn_hidden_size": experts.ffn,
        "moe_grouped_gemm": layer_spec == "transformer_engine",
        "moe_router_topk": router.chosen,
        "moe_router_score_function": router.score,
        "moe_router_pre_softmax": router.score == "softmax" and not router.normalized,
        "moe_router_dtype": "fp32",
    }
    if experts.shared_ffn:
        values["moe_shared_expert_intermediate_size"] = experts.shared_ffn
    if router.scale != 1.0:
        values["moe_router_topk_scaling_factor"] = router.scale
    if router.groups > 1:
        values |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.chosen_groups}
    if router.score == "sigmoid":
        values["moe_router_enable_expert_bias"] = True
    return values


def flags(args: argparse.Namespace) -> list[str]:
    """Return the arguments from :func:`to_args` as flags for the command line of Megatron's training script."""
    words: list[str] = []
    for name, value in vars(args).items():
        if name in _WITHOUT_FLAG or value is None:
            continue
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if name in _NEGATIVE_FLAGS:
            words += [] if value else [_NEGATIVE_FLAGS[name]]
        elif isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(value, list):
            words += [flag, _pattern(value)]
        else:
            words += [flag, str(value)]
    return words


def _pattern(layers: list[int]) -> str:
    """Abbreviate a list of layers in the form that Megatron evaluates: ``([0]*3+[1]*58)``."""
    runs = [(key, len(list(group))) for key, group in itertools.groupby(layers)]
    return "(" + "+".join(f"[{key}]*{count}" for key, count in runs) + ")"


def script(args: argparse.Namespace) -> str:
    """Return a shell script that sets ``MODEL_ARGS`` to :func:`flags`, for a training script to source."""
    lines: list[str] = []
    for word in flags(args):
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "\n".join(["MODEL_ARGS=(", *lines, ")", ""])


def notes(model: Model) -> list[str]:
    """List where megatron-core 0.19.2 computes something else than transformers, although all tensors convert."""
    found, latent = [], model.attention.latent
    if latent is not None and latent.query_rank is None:
        found.append(
            "q_lora_rank is null: megatron-core 0.19.2 normalizes the input of linear_q_proj a second time, with "
            "weights that Hugging Face's model does not have (Transformer Engine's layers), or cannot build the layer "
            "(its own)."
        )
    if latent is not None and model.epsilon != LATENT_EPSILON:
        found.append(
            f"rms_norm_eps is {model.epsilon}: transformers uses {LATENT_EPSILON} for the norms of the compressed "
            "queries, keys and values; Megatron uses one value for all norms."
        )
    if model.rope.kind == "llama3" and model.rope.factor != TRAINED_LLAMA3_FACTOR:
        found.append(
            f"The factor of rotary scaling is {model.rope.factor}: Megatron's training script ignores "
            f"--rope-scaling-factor and uses {TRAINED_LLAMA3_FACTOR}. Set the factor in the model's configuration."
        )
    return found
