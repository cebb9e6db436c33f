"""config.json, a model's description and Megatron's arguments are equivalent, or the conversion raises an error."""

import argparse
import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.checkpoint.lazy import of
from megatron.fsdp.convert.huggingface.arguments import flags, from_args, script, to_args
from megatron.fsdp.convert.huggingface.config import from_config, to_config
from megatron.fsdp.convert.huggingface.conversion import readable
from megatron.fsdp.convert.huggingface.model import Model, differences
from tests.huggingface_models import CASES, build, save

ROOT = Path(__file__).resolve().parents[3]


def described(case: str, folder: Path) -> Model:
    save(case, folder)
    return from_config(json.loads((folder / "config.json").read_text()))


LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize("case", CASES)
def test_converting_to_arguments_and_back_changes_nothing(case: str, tmp_path: Path) -> None:
    model = described(case, tmp_path)
    for spec in ("local", "transformer_engine"):
        args = to_args(model, spec, 128, torch.float32)
        assert differences(from_args(args), model) == []


@pytest.mark.parametrize("case", CASES)
def test_transformers_builds_the_same_model_from_the_written_configuration(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = described(case, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_config(model, torch.float32)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.dtype == torch.float32
    original, rebuilt = build(case), transformers.AutoModelForCausalLM.from_config(config)
    assert type(rebuilt) is type(original)
    shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (original, rebuilt)]
    assert shapes[0] == shapes[1]
    for name, buffer in original.named_buffers():
        if "inv_freq" in name:
            assert torch.equal(buffer, dict(rebuilt.named_buffers())[name])
    assert original.model.rotary_emb.attention_scaling == rebuilt.model.rotary_emb.attention_scaling
    scalings = [getattr(m.model.layers[0].self_attn, "scaling", None) for m in (original, rebuilt)]
    assert scalings[0] == scalings[1]
    # transformers' own serialization leads to the same description.
    assert differences(from_config(config.to_diff_dict()), model) == []


@pytest.mark.parametrize("case", CASES)
def test_tokens_that_are_not_known_are_not_those_of_transformers(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(to_config(described(case, tmp_path), torch.float32)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert [config.bos_token_id, config.eos_token_id, config.pad_token_id] == [None] * 3


def test_defaults_of_old_files() -> None:
    model = from_config(LLAMA)
    assert (model.attention.groups, model.attention.head_size, model.rope.base) == (4, 8, 10000.0)
    assert (model.tied, model.epsilon, model.attention.bias) == (False, 1e-6, False)
    old = from_config({**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert (old.rope.base, old.rope.kind, old.rope.factor, old.rope.original) == (500000.0, "yarn", 2.0, 2048)
    assert from_config({**LLAMA, "model_type": "qwen3"}).attention.head_size == 128


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LLAMA, "model_type": "gpt2"}, "expected model_type to be llama, qwen3, qwen3_moe, deepseek_v3; got 'gpt2'"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act: expected 'silu'; got 'gelu'"),
        ({**LLAMA, "attention_bias": True}, "attention_bias and mlp_bias: expected both or neither"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: expected .* got 'dynamic'"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rope low_freq_factor: expected 1.0, Megatron's constant; got 2.0",
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
        ({**LLAMA, "model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window: expected False"),
        ({**LLAMA, "model_type": "qwen3", "attention_bias": True}, "attention_bias: expected False"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave: expected True"),
        ({**DEEPSEEK, "norm_topk_prob": False}, "norm_topk_prob: expected True"),
        ({**DEEPSEEK, "num_experts_per_tok": 6}, "num_experts_per_tok: expected 8, twice the chosen groups; got 6"),
        ({**DEEPSEEK, "num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok: expected at least 2"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
    ],
)
def test_models_that_megatron_does_not_support_raise_an_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        from_config(values)


def test_all_reasons_are_reported_at_once() -> None:
    with pytest.raises(NotImplementedError) as error:
        from_config({**LLAMA, "hidden_act": "gelu", "mlp_bias": True, "partial_rotary_factor": 0.5})
    assert len(str(error.value).splitlines()) == 4


def test_a_missing_size_is_named() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    with pytest.raises(ValueError, match="expected an integer num_hidden_layers"):
        from_config(values)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"swiglu": False}, "swiglu: expected True; got False"),
        ("llama", {"glu_linear_offset": 1.0}, "glu_linear_offset: expected 0.0; got 1.0"),
        ("llama", {"linear_attention_freq": 2}, "linear_attention_freq"),
        ("llama", {"hybrid_override_pattern": "M-*"}, "hybrid_override_pattern"),
        ("llama", {"heterogeneous_layers_config_encoded_json": "{}"}, "heterogeneous_layers_config_encoded_json"),
        ("llama", {"spec": ["my.layers", "spec"]}, "spec: expected None"),
        ("qwen3_moe", {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ("qwen3_moe", {"moe_expert_rank_capacity_factor": 1.0}, "moe_expert_rank_capacity_factor"),
        ("qwen3_moe", {"moe_router_topk_limited_devices": 2}, "moe_router_topk_limited_devices"),
        ("qwen3_moe", {"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing"),
        ("qwen3_moe", {"moe_router_force_biased": 1.0}, "moe_router_force_biased"),
        ("qwen3_moe", {"moe_router_load_balancing_type": "sinkhorn"}, "got sinkhorn"),
        ("qwen3_moe", {"moe_router_load_balancing_type": ["quantile_balancing"]}, "got quantile_balancing"),
        ("llama", {"normalization": "LayerNorm"}, "normalization: expected 'RMSNorm'"),
        ("llama", {"add_qkv_bias": True}, "add_qkv_bias: expected False"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent: expected 1.0"),
        ("llama", {"position_embedding_type": "learned_absolute"}, "position_embedding_type: expected 'rope'"),
        ("llama", {"apply_layernorm_1p": True}, "apply_layernorm_1p: expected False"),
        ("qwen3", {"add_bias_linear": True}, "add_bias_linear: expected False"),
        ("qwen3_moe", {"qk_layernorm": False}, "qk_layernorm: expected True"),
        ("qwen3_moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function: expected 'softmax'"),
        ("qwen3_moe", {"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size: expected None"),
        ("deepseek_v3", {"moe_layer_freq": [1, 0, 1]}, "moe_layer_freq: expected dense layers before"),
        ("deepseek_v3", {"moe_shared_expert_intermediate_size": 15}, "expected a multiple of moe_ffn_hidden_size"),
        ("deepseek_v3", {"num_experts": None}, "num_experts: expected experts"),
        ("deepseek_v3", {"mscale": 0.7, "rotary_scaling_factor": 4.0, "rope_type": "yarn"}, "mscale: expected 1.0"),
    ],
)
def test_models_that_transformers_does_not_support_raise_an_error(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = to_args(described(case, tmp_path), "local", 128, torch.float32)
    vars(args).update(changes)
    with pytest.raises(NotImplementedError, match=message):
        from_args(args)


def test_arguments_of_other_versions(tmp_path: Path) -> None:
    model = described("llama", tmp_path)
    args = to_args(model, "local", 128, torch.float32)
    vars(args)["norm_epsilon"] = vars(args).pop("layernorm_epsilon")
    del args.vocab_size, args.add_position_embedding
    args.position_embedding_type, args.use_rotary_position_embeddings = "learned_absolute", True
    assert differences(from_args(args, vocabulary=model.sizes.vocabulary), model) == []
    assert from_args(args).sizes.vocabulary == 128


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": 10000.5}, "rope_theta: expected an integer for --rotary-base"),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            "rope original: expected 4096 with latent attention; got 100",
        ),
    ],
)
def test_settings_without_an_argument_raise_an_error(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        to_args(from_config({**DEEPSEEK, "rope_parameters": rope}), "local", 128, torch.float32)


def test_yarn_without_mscale() -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    assert (from_config({**DEEPSEEK, "rope_parameters": rope}).rope.mscale_all) == 0.0
    weighted = from_config({**DEEPSEEK, "rope_parameters": {**rope, "mscale": 0.7, "mscale_all_dim": 0.9}}).rope
    assert (weighted.mscale, weighted.mscale_all) == (0.7, 0.9)
    with pytest.raises(NotImplementedError, match="mscale_all_dim: expected mscale as well"):
        from_config({**DEEPSEEK, "rope_parameters": {**rope, "mscale_all_dim": 1.0}})


def test_flags_for_the_training_script() -> None:
    model = from_config(DEEPSEEK)
    words = flags(to_args(model, "transformer_engine", 128, torch.bfloat16))
    text = " ".join(words)
    for expected in (
        "--num-layers 2",
        "--hidden-size 32",
        "--norm-epsilon 1e-06",
        "--disable-bias-linear",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--multi-latent-attention",
        "--rope-type rope",
        "--moe-layer-freq ([0]*1+[1]*1)",
        "--moe-router-enable-expert-bias",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-num-groups 8",
        "--padded-vocab-size 128",
        "--bf16",
    ):
        assert expected in text
    assert "--add-bias-linear" not in text and "--fp16" not in text and "None" not in text and "params" not in text
    # A shell parses the file into the same words.
    lines = script(to_args(model, "transformer_engine", 128, torch.bfloat16)).splitlines()
    assert (lines[0], lines[-1]) == ("MODEL_ARGS=(", ")")
    assert shlex.split("\n".join(lines[1:-1])) == words


def test_differences_at_every_level() -> None:
    model = from_config(DEEPSEEK)
    assert model.experts is not None
    other = dataclasses.replace(
        model, tied=True, experts=dataclasses.replace(model.experts, count=8), sizes=dataclasses.replace(model.sizes)
    )
    assert differences(model, model) == []
    assert differences(model, other) == ["experts.count: 16, 8", "tied: False, True"]
    assert differences(model, dataclasses.replace(model, experts=None))[0].startswith("experts: ")


_SCALED = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": _SCALED, "max_position_embeddings": 4096},
        {"rope_scaling": _SCALED, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_scaling": {**_SCALED, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
    ],
)
def test_rotary_settings_mean_what_they_mean_in_transformers(rope: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.LlamaConfig(**json.loads(json.dumps({**LLAMA, **rope})))
    config.standardize_rope_params()  # as the model calls it
    understood = config.to_dict()["rope_parameters"]
    assert from_config({**LLAMA, **rope}).rope == from_config({**LLAMA, "rope_parameters": understood}).rope


def test_without_a_length_before_the_extension_llama3_extends_the_present_one() -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.raises(NotImplementedError, match="original_max_position_embeddings: expected 8192, .*; got 2048"):
        from_config({**LLAMA, "rope_scaling": scaled})
    assert from_config({**LLAMA, "rope_scaling": scaled, "max_position_embeddings": 8192}).rope.kind == "llama3"


def test_tokens_that_a_smaller_vocabulary_lacks_are_not_left_out(tmp_path: Path) -> None:
    args = to_args(described("llama", tmp_path), "local", 128, torch.float32)
    with pytest.raises(ValueError, match=rf"expected a vocab_size of at most \d+, .*; got {args.vocab_size}\. Give"):
        from_args(args, vocabulary=args.vocab_size - 1)
    assert from_args(args, vocabulary=args.vocab_size + 1).sizes.vocabulary == args.vocab_size + 1


def test_arguments_without_sizes_raise_an_error() -> None:
    with pytest.raises(ValueError, match="args of the checkpoint: expected an integer num_layers; got None"):
        from_args(argparse.Namespace())


# Published configurations, without settings that do not affect the model.
LLAMA3_70B = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def settings(words: list[str]) -> dict[str, Any]:
    """Flags by name; numbers as numbers, and lists of layers written out."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, True
        elif re.fullmatch(r"[\d+*()\[\]]+", word) and "[" in word:
            runs = re.findall(r"\[(\d)\](?:\*(\d+))?", word)
            found[name] = [int(value) for value, count in runs for _ in range(int(count or 1))]
        else:
            found[name] = float(word) if re.fullmatch(r"[\d.]+(e-?\d+)?", word) else word
    return found


@pytest.mark.parametrize(
    ("config", "script_name", "alike"),
    [(LLAMA3_70B, "llama3_70b.sbatch", 20), (DEEPSEEK_V3, "sbatch_mfsdp_deepseek_v3.sh", 39)],
    ids=["llama3-70b", "deepseek-v3"],
)
def test_published_models_get_the_flags_of_the_example_scripts(
    config: dict[str, Any], script_name: str, alike: int
) -> None:
    path = ROOT / "examples" / "megatron_fsdp" / script_name
    environment = {**os.environ, "DRY_RUN": "1"}
    output = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True, env=environment).stdout
    expected = settings(output.splitlines()[2:])
    found = settings(flags(to_args(from_config(config), "transformer_engine", config["vocab_size"], torch.bfloat16)))
    # The example scripts use shorter sequences.
    both = (set(expected) & set(found)) - {"--max-position-embeddings"}
    assert {name: found[name] for name in both} == {name: expected[name] for name in both}
    assert len(both) == alike
    # For these, the example scripts rely on equal defaults.
    assert set(found) - set(expected) - {"--padded-vocab-size"} <= {
        "--rotary-percent",
        "--rope-type",
        "--mtp-num-layers",
    }


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("num_hidden_layers", {**LLAMA, "num_hidden_layers": 10**9}),
        ("n_routed_experts", {**DEEPSEEK, "n_routed_experts": 10**9}),
        ("num_attention_heads", {**LLAMA, "num_attention_heads": 0}),
        ("hidden_size", {**LLAMA, "hidden_size": True}),
        ("rope_parameters", {**LLAMA, "rope_parameters": "x"}),
        ("rope_scaling", {**LLAMA, "rope_scaling": [1]}),
        ("rope_scaling.factor", {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": "2"}}),
        ("rope factor", {**LLAMA, "rope_scaling": {"rope_type": "llama3"}}),
        ("quantization_config", {**LLAMA, "quantization_config": "fp8"}),
        ("rms_norm_eps", {**LLAMA, "rms_norm_eps": float("inf")}),
        ("mlp_only_layers", {**LLAMA, "mlp_only_layers": 3}),
        ("decoder_sparse_step", {**LLAMA, "decoder_sparse_step": 0}),
    ],
)
def test_values_of_another_kind_are_refused(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {key}: expected"):
        from_config(values, [(100, 32)] * 30)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"model.norm.weight: expected a weight of .*; got {dtype}"):
        readable({"model.norm.weight": of(torch.ones(3).to(dtype))}, {})
