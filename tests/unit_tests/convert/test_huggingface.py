"""Converting tensors between Hugging Face's and Megatron's names and layouts is exact and loses nothing."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor, of
from megatron.fsdp.convert.huggingface.config import from_config
from megatron.fsdp.convert.huggingface.conversion import readable, to_huggingface, to_megatron
from megatron.fsdp.convert.huggingface.folder import read_config, read_weights
from megatron.fsdp.convert.huggingface.live import to_huggingface_names
from megatron.fsdp.convert.huggingface.maps import ARCHITECTURES, links
from megatron.fsdp.convert.huggingface.model import Attention, Model, Rope, Sizes
from megatron.fsdp.convert.huggingface.rules import RULES, Context, dequantized
from megatron.fsdp.naming.names import without_half
from tests.huggingface_models import CASES, VOCABULARY, save, with_further_layer

PADDED = 32
SPECS = ("local", "transformer_engine")


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in safetensors.torch.load_file(path).items()}


def imported(folder: Path, spec: str = "local") -> tuple[dict[str, LazyTensor], Model]:
    config = read_config(folder)
    found = to_megatron(readable(read_weights(folder), config), from_config(config), spec, PADDED)
    return found.weights | found.buffers, found.model


def lazily(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    return {name: of(tensor) for name, tensor in tensors.items()}


def assert_equal(found: dict[str, LazyTensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        whole = found[name].full_tensor()
        assert (whole.dtype, whole.shape, found[name].shape) == (tensor.dtype, tensor.shape, tuple(tensor.shape)), name
        assert torch.equal(whole, tensor), name


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_identical(case: str, spec: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    tensors, model = imported(tmp_path, spec)
    assert tensors["embedding.word_embeddings.weight"].shape[0] == PADDED
    assert_equal(to_huggingface(tensors, model).tensors, files_of(tmp_path))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("case", CASES)
def test_parameters_of_a_live_model_get_the_same_names(case: str, spec: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    tensors, model = imported(tmp_path, spec)
    joined: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():  # a live model has both halves of a gated layer in one parameter
        joined.setdefault(without_half(name), []).append(tensor.full_tensor())
    convert = to_huggingface_names(model)
    found = dict(pair for name, parts in joined.items() for pair in convert(name, torch.cat(parts)))
    expected = files_of(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not [name for name in set(expected) - set(found) if "embed_tokens" not in name and "head" not in name]
    with pytest.raises(ValueError, match=r"other\.weight: expected a parameter of a .* model"):
        convert("other.weight", torch.zeros(1))
    with pytest.raises(ValueError, match=r"decoder.final_layernorm.weight: expected a part of shape"):
        convert("decoder.final_layernorm.weight", torch.zeros(1))


@pytest.mark.parametrize("case", CASES)
def test_both_specs_have_the_same_tensors_under_other_names(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    local, model = imported(tmp_path, "local")
    engine, _ = imported(tmp_path, "transformer_engine")
    assert len(local) == len(engine) and set(local) != set(engine)
    for one, other in zip(links(model, "local"), links(model, "transformer_engine"), strict=True):
        assert torch.equal(local[one.megatron[0]].full_tensor(), engine[other.megatron[0]].full_tensor())
        assert set(one.megatron) == set(other.megatron)


def test_reading_in_blocks_equals_reading_the_whole(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors, model = imported(tmp_path)
    for found in (tensors, to_huggingface(tensors, model).tensors):
        for name, tensor in found.items():
            blocks = [tensor.read(box).reshape(-1) for box in tensor.blocks(200)]
            assert torch.equal(torch.cat(blocks), tensor.full_tensor().reshape(-1)), name


# Layouts ---------------------------------------------------------------------------------------------------------


def model_with(heads: int, groups: int, head_size: int, vocabulary: int = 3) -> Model:
    sizes = Sizes(layers=1, hidden=1, ffn=1, vocabulary=vocabulary, positions=8)
    return Model("llama", sizes, Attention(heads, groups, head_size), Rope(1e4), None, 1e-5, False)


def column(*values: int) -> LazyTensor:
    return of(torch.tensor(values).unsqueeze(1))


def test_qkv_rows_are_interleaved_by_group() -> None:
    # Two groups of two query heads, heads of two rows. Query rows 0-7, key rows 100-103, value rows 200-203.
    context = Context(model_with(heads=4, groups=2, head_size=2), 0)
    query, key, value = column(*range(8)), column(100, 101, 102, 103), column(200, 201, 202, 203)
    fused = RULES["qkv"].to_megatron([query, key, value], context)
    expected = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert fused.full_tensor().flatten().tolist() == expected
    split = RULES["qkv"].to_huggingface(fused, context)
    assert [part.full_tensor().flatten().tolist() for part in split] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [100, 101, 102, 103],
        [200, 201, 202, 203],
    ]


def test_qkv_biases_are_interleaved_like_rows() -> None:
    context = Context(model_with(heads=2, groups=2, head_size=1), 0)
    fused = RULES["qkv"].to_megatron([of(torch.tensor(v)) for v in ([0, 1], [10, 11], [20, 21])], context)
    assert fused.full_tensor().tolist() == [0, 10, 20, 1, 11, 21]


@pytest.mark.parametrize("rows", [(7, 4, 4), (8, 2, 4), (8, 4, 8)])
def test_qkv_of_other_sizes_raises_an_error(rows: tuple[int, ...]) -> None:
    context = Context(model_with(heads=4, groups=2, head_size=2), 0)
    with pytest.raises(ValueError, match=r"expected [84] rows; got shape"):
        RULES["qkv"].to_megatron([of(torch.zeros(n, 1)) for n in rows], context)
    with pytest.raises(ValueError, match=r"expected 16 rows; got shape"):
        RULES["qkv"].to_huggingface(of(torch.zeros(sum(rows), 1)), context)


def test_the_vocabulary_is_padded_with_zeros_and_cut() -> None:
    context = Context(model_with(1, 1, 1, vocabulary=3), 5)
    padded = RULES["vocabulary"].to_megatron([column(7, 8, 9)], context)
    assert padded.full_tensor().flatten().tolist() == [7, 8, 9, 0, 0]
    (cut,) = RULES["vocabulary"].to_huggingface(column(7, 8, 9, 4, 5), context)
    assert cut.full_tensor().flatten().tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="expected at least 3 rows, one for each token; got 2"):
        RULES["vocabulary"].to_huggingface(column(7, 8), context)
    with pytest.raises(ValueError, match="expected 3 rows"):
        RULES["vocabulary"].to_megatron([column(7, 8)], context)


def test_names_of_a_llama_layer() -> None:
    model = model_with(4, 2, 2)
    found = {link.huggingface: link.megatron[0] for link in links(model, "transformer_engine")}
    layer = "model.layers.0.self_attn"
    assert found == {
        ("model.embed_tokens.weight",): "embedding.word_embeddings.weight",
        ("model.layers.0.input_layernorm.weight",): ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"),
        (f"{layer}.q_proj.weight", f"{layer}.k_proj.weight", f"{layer}.v_proj.weight"): (
            "decoder.layers.0.self_attention.linear_qkv.weight"
        ),
        (f"{layer}.o_proj.weight",): "decoder.layers.0.self_attention.linear_proj.weight",
        ("model.layers.0.post_attention_layernorm.weight",): "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        ("model.layers.0.mlp.gate_proj.weight",): "decoder.layers.0.mlp.linear_fc1.weight_w",
        ("model.layers.0.mlp.up_proj.weight",): "decoder.layers.0.mlp.linear_fc1.weight_v",
        ("model.layers.0.mlp.down_proj.weight",): "decoder.layers.0.mlp.linear_fc2.weight",
        ("model.norm.weight",): "decoder.final_layernorm.weight",
        ("lm_head.weight",): "output_layer.weight",
    }


def test_names_of_deepseeks_expert_layer(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    local, model = imported(tmp_path)
    layer = "decoder.layers.2."
    names = {name.removeprefix(layer) for name in local if name.startswith(layer)}
    experts = {name for name in names if ".experts." in name}
    assert names - experts == {
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.router.expert_bias",
        "mlp.shared_experts.linear_fc1.weight_w",
        "mlp.shared_experts.linear_fc1.weight_v",
        "mlp.shared_experts.linear_fc2.weight",
    }
    assert experts == {
        f"mlp.experts.local_experts.{e}.linear_{rest}"
        for e, rest in itertools.product(range(8), ("fc1.weight_w", "fc1.weight_v", "fc2.weight"))
    }
    engine, _ = imported(tmp_path, "transformer_engine")
    assert f"{layer}mlp.experts.linear_fc1.weight7_v" in engine
    assert f"{layer}self_attention.linear_kv_up_proj.layer_norm_weight" in engine
    assert f"{layer}input_layernorm.weight" in engine and f"{layer}pre_mlp_layernorm.weight" in engine
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in engine
    assert model.mtp_layers == 0


# Other input formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_experts_are_split(case: str, suffix: str, tmp_path: Path) -> None:
    transformers_model = save(case, tmp_path)
    expected, model = imported(tmp_path)
    fused = {
        name + (suffix if ".experts." in name else ""): of(tensor.detach())
        for name, tensor in transformers_model.state_dict().items()
    }
    assert any(len(tensor.shape) == 3 for tensor in fused.values())
    found = to_megatron(readable(fused, {}), model, "local", PADDED)
    assert_equal(found.weights | found.buffers, {name: tensor.full_tensor() for name, tensor in expected.items()})


def test_block_quantized_weights_are_dequantized() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    expected = torch.empty(10, 7)
    for row, col in itertools.product(range(10), range(7)):
        expected[row, col] = weight[row, col].float() * scales[row // 4, col // 4]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    found = readable(lazily({"a.weight": weight, "a.weight_scale_inv": scales, "b": torch.ones(1)}), config)
    assert set(found) == {"a.weight", "b"}
    assert torch.equal(found["a.weight"].full_tensor(), expected)
    for limit in (4, 28, 100):
        parts = [found["a.weight"].read(box).flatten() for box in found["a.weight"].blocks(limit)]
        assert torch.equal(torch.cat(parts), expected.flatten())
    with pytest.raises(ValueError, match=r"expected scales of shape \(2, 1\) for blocks of \(8, 8\); got \(3, 2\)"):
        dequantized(of(weight), of(scales), (8, 8))


def test_scales_without_weights_are_unknown_tensors(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = read_weights(tmp_path) | lazily({"lost.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ValueError, match="1 without an entry in the table of names:\n  lost.weight_scale_inv"):
        to_megatron(readable(tensors, {}), from_config(read_config(tmp_path)), "local", PADDED)


def test_other_quantizations_raise_an_error() -> None:
    with pytest.raises(NotImplementedError, match="quant_method fp8; got .*gptq"):
        readable({}, {"quantization_config": {"quant_method": "gptq"}})


def test_frequencies_in_old_files_are_ignored(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors = read_weights(tmp_path) | lazily({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    model = from_config(read_config(tmp_path))
    assert set(to_megatron(readable(tensors, {}), model, "local", PADDED).weights) == set(imported(tmp_path)[0])


def test_a_tied_output_layer_may_be_stored_but_must_not_differ(tmp_path: Path) -> None:
    save("llama-tied-biases", tmp_path)
    tensors, model = read_weights(tmp_path), from_config(read_config(tmp_path))
    embedding = tensors["model.embed_tokens.weight"].full_tensor()
    found = to_megatron(tensors | lazily({"lm_head.weight": embedding}), model, "local", PADDED)
    assert "output_layer.weight" not in found.weights
    other = embedding.clone()
    other[-1, -1] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected a copy of model\.embed_tokens\.weight"):
        to_megatron(tensors | lazily({"lm_head.weight": other}), model, "local", PADDED)


# Multi-token prediction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_multi_token_prediction_round_trip(spec: str, tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    expected, model = with_further_layer(files_of(tmp_path)), from_config(read_config(tmp_path))
    assert model.mtp_layers == 1
    found = to_megatron(lazily(expected), model, spec, PADDED)
    assert found.notes == []
    names = set(found.weights | found.buffers)
    for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"):
        assert f"mtp.layers.0.{name}" in names
    assert "mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj.weight" in names
    assert "mtp.layers.0.transformer_layer.mlp.router.expert_bias" in found.buffers
    assert_equal(to_huggingface(found.weights | found.buffers, found.model).tensors, expected)
    # The layer's name in a model in memory is accepted as well.
    live = {k.replace("transformer_layer", "mtp_model_layer"): v for k, v in (found.weights | found.buffers).items()}
    assert_equal(to_huggingface(live, found.model).tensors, expected)


def test_missing_multi_token_prediction_layers_are_noted(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    model = from_config(read_config(tmp_path))
    found = to_megatron(read_weights(tmp_path), model, "local", PADDED)
    assert found.model.mtp_layers == 0
    assert found.notes == ["1 of 1 multi-token prediction layers are missing and will be left out."]
    back = to_huggingface(found.weights | found.buffers, model)
    assert (back.model.mtp_layers, back.notes) == (0, found.notes)
    assert_equal(back.tensors, files_of(tmp_path))


def test_a_copy_that_differs_cannot_be_shared(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    tensors = with_further_layer(files_of(tmp_path))
    tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"shared_head\.head\.weight: expected a copy of lm_head\.weight"):
        to_megatron(lazily(tensors), from_config(read_config(tmp_path)), "local", PADDED)


# No silent loss --------------------------------------------------------------------------------------------------


def test_all_mismatched_names_are_listed(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors, model = read_weights(tmp_path), from_config(read_config(tmp_path))
    strange = {"model.layers.0.mlp.adapter.weight": of(torch.ones(1)), "score.weight": of(torch.ones(1))}
    kept = {k: v for k, v in tensors.items() if k not in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")}
    with pytest.raises(ValueError) as error:
        to_megatron(kept | strange, model, "local", PADDED)
    assert str(error.value).splitlines() == [
        "The tensors are not those of this llama model.",
        "2 without an entry in the table of names:",
        "  model.layers.0.mlp.adapter.weight",
        "  score.weight",
        "2 missing:",
        "  model.layers.1.mlp.up_proj.weight",
        "  model.norm.weight",
    ]
    found = to_megatron(tensors, model, "local", PADDED).weights
    del found["decoder.layers.0.input_layernorm.weight"]
    with pytest.raises(ValueError) as error:
        to_huggingface(found | {"decoder.layers.0.mlp.linear_fc3.weight": of(torch.ones(1))}, model)
    assert str(error.value).splitlines()[1:] == [
        "1 without an entry in the table of names:",
        "  decoder.layers.0.mlp.linear_fc3.weight",
        "1 missing:",
        "  decoder.layers.0.input_layernorm.weight or decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_shape_is_compared(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    files, model = files_of(tmp_path), from_config(read_config(tmp_path))
    for name, tensor in files.items():
        for dim in range(tensor.dim()):
            for more in (-1, 1):
                shape = [size + more * (d == dim) for d, size in enumerate(tensor.shape)]
                changed = readable(lazily(files | {name: torch.zeros(shape)}), {})
                with pytest.raises(ValueError, match=f"expected {re.escape(str(tuple(tensor.shape)))}"):
                    to_megatron(changed, model, "local", PADDED)
    with pytest.raises(ValueError, match=f"{len(files)} tensors have a different shape"):
        wrong = {name: torch.zeros([size + 2 for size in tensor.shape]) for name, tensor in files.items()}
        to_megatron(readable(lazily(wrong), {}), model, "local", PADDED)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 48}, {"intermediate_size": 8}, {"head_dim": 2}, {"num_key_value_heads": 1}], ids=str
)
def test_a_config_of_another_size(change: dict[str, int], tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = read_config(tmp_path) | change
    with pytest.raises(ValueError, match="a different shape than expected from config.json"):
        to_megatron(readable(read_weights(tmp_path), config), from_config(config), "local", PADDED)


def test_arguments_of_another_size(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors, model = imported(tmp_path)
    other = dataclasses.replace(model, sizes=dataclasses.replace(model.sizes, ffn=model.sizes.ffn + 4))
    with pytest.raises(ValueError, match=r"args:\n  model\.layers\.0\.mlp\.down_proj\.weight: expected"):
        to_huggingface(tensors, other)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_unique(architecture: str, tmp_path: Path) -> None:
    save(architecture, tmp_path)
    model = from_config(json.loads((tmp_path / "config.json").read_text()))
    found = list(links(model, "local"))
    for names in ([n for link in found for n in link.huggingface], [n for link in found for n in link.megatron]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast_and_the_routers_bias_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    tensors, model = read_weights(tmp_path), from_config(read_config(tmp_path))
    found = to_megatron(tensors, model, "local", PADDED, dtype)
    assert {tensor.dtype for tensor in found.weights.values()} == {dtype}
    assert {tensor.dtype for tensor in found.buffers.values()} == {torch.float32}
    assert set(found.buffers) == {f"decoder.layers.{i}.mlp.router.expert_bias" for i in (1, 2)}
    local, _ = imported(tmp_path)
    back = to_huggingface(local, model, dtype).tensors
    for name, tensor in back.items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        assert torch.equal(tensor.full_tensor(), tensors[name].full_tensor().to(wanted)), name
    assert back["model.embed_tokens.weight"].shape[0] == VOCABULARY


def test_finite_weights_do_not_become_infinite(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tensors, model = read_weights(tmp_path), from_config(read_config(tmp_path))
    norm = tensors["model.norm.weight"].full_tensor().clone()
    norm[0] = torch.inf
    found = to_megatron(tensors | lazily({"model.norm.weight": norm}), model, "local", PADDED, torch.float16)
    assert torch.equal(found.weights["decoder.final_layernorm.weight"].full_tensor(), norm.half())
    norm[1] = 1e5
    tensors |= lazily({"model.norm.weight": norm})
    found = to_megatron(tensors, model, "local", PADDED, torch.float16)
    with pytest.raises(ValueError, match=r"decoder\.final_layernorm\.weight: expected values within .*float16"):
        found.weights["decoder.final_layernorm.weight"].full_tensor()
    exact = to_megatron(tensors, model, "local", PADDED)
    back = to_huggingface(exact.weights, model, torch.float16).tensors
    with pytest.raises(ValueError, match=r"model\.norm\.weight: expected values within the range of torch\.float16"):
        back["model.norm.weight"].full_tensor()
