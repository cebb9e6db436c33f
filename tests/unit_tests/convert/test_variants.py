"""Synthetic torch_dist checkpoints that store models in every way; the converter must recognize each."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import (
    DECAYED,
    EXPERTS,
    PLAIN,
    optimizer_of,
    plain_common,
    plain_metadata,
    plain_objects,
    plain_tensors,
    random_tensors,
    same,
    with_optimizer,
    write_torch_dist,
)
from tests.small_checkpoints import write_checkpoint

TE = argparse.Namespace(transformer_impl="transformer_engine", bf16=True, swiglu=True)
LOCAL = argparse.Namespace(transformer_impl="local", bf16=True, swiglu=True)
OPTIMIZER = "optimizer.state.module.module.module."


def args(base: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(base), **changes})


def model_weights(path: Path) -> dict[str, torch.Tensor]:
    return {k.removeprefix("model.module."): v for k, v in plain_tensors(path).items() if k.startswith("model.")}


def converted(tmp_path: Path, model: Mapping[str, torch.Tensor], common: Mapping[str, Any], **options: Any) -> Path:
    source = write_torch_dist(tmp_path / "source", model, common)
    write_state(read_state(source, ReadOptions(**options)), tmp_path / "target", "fsdp_dtensor")
    return tmp_path / "target"


def trained(
    tmp_path: Path,
    model: Mapping[str, torch.Tensor],
    *groups: Mapping[str, Any],
    base: argparse.Namespace = TE,
    **changes: Any,
) -> Path:
    """Convert main weights with an optimizer of these groups; one group if there are none."""
    common = {"args": args(base, **changes), "optimizer": optimizer_of(*(groups or [DECAYED]))}
    return converted(tmp_path, with_optimizer(model), common)


def written_as_by_a_run(tmp_path: Path) -> Path:
    """Write ``target`` as torch_dist without what its conversion has kept, which a run's own checkpoint has not."""
    state = read_state(tmp_path / "target")
    state.torch_dist.clear()
    write_state(state, tmp_path / "fresh", "torch_dist")
    return tmp_path / "fresh"


def assert_returns(tmp_path: Path) -> None:
    """Converting ``target`` back gives ``source``."""
    write_state(read_state(tmp_path / "target"), tmp_path / "back", "torch_dist")
    found, expected = plain_tensors(tmp_path / "back"), plain_tensors(tmp_path / "source")
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert same(found[key], tensor), key
    assert same(plain_common(tmp_path / "back").get("optimizer"), plain_common(tmp_path / "source").get("optimizer"))


def test_layers_stored_separately(tmp_path: Path) -> None:
    layers = {f"decoder.layers.{i}.mlp.linear_fc1.weight": (8, 4) for i in range(3)}
    layers |= {f"decoder.layers.{i}.mlp.linear_fc2.weight": (4, 4) for i in range(3)}
    model = random_tensors(layers)
    weights = model_weights(trained(tmp_path, model))
    assert len(weights) == 9
    for i in range(3):
        fc1 = model[f"decoder.layers.{i}.mlp.linear_fc1.weight"]
        assert torch.equal(weights[f"decoder.layers.{i}.mlp.linear_fc1.weight_w"], fc1[:4])
        assert torch.equal(weights[f"decoder.layers.{i}.mlp.linear_fc1.weight_v"], fc1[4:])
    assert_returns(tmp_path)


def test_separate_layers_of_stacked_experts_in_grouped_modules(tmp_path: Path) -> None:
    model = random_tensors(
        {
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (3, 8, 6),
            "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (3, 6, 4),
            "decoder.layers.1.mlp.router.weight": (3, 6),
            "decoder.layers.0.mlp.linear_fc1.weight": (8, 6),
            "decoder.layers.0.mlp.linear_fc2.weight": (6, 4),
        }
    )
    weights = model_weights(trained(tmp_path, model, DECAYED, EXPERTS, moe_grouped_gemm=True))
    first, second = (model[f"decoder.layers.1.mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    for expert in range(3):
        prefix = "decoder.layers.1.mlp.experts.linear_fc"
        assert torch.equal(weights[f"{prefix}1.weight{expert}_w"], first[expert][:4])
        assert torch.equal(weights[f"{prefix}1.weight{expert}_v"], first[expert][4:])
        assert torch.equal(weights[f"{prefix}2.weight{expert}"], second[expert])
    assert len(weights) == 9 + 1 + 3
    assert_returns(tmp_path)


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_and_gate_halves_stored_separately(tmp_path: Path, grouped: bool) -> None:
    shapes: dict[str, tuple[int, ...]] = {"decoder.layers.0.mlp.router.weight": (2, 6)}
    for expert in range(2):
        prefix = f"decoder.layers.0.mlp.experts.experts.{expert}."
        shapes |= {f"{prefix}linear_fc1.weight_{half}": (4, 6) for half in "wv"}
        shapes |= {f"{prefix}linear_fc2.weight": (6, 4)}
    model = random_tensors(shapes)
    weights = model_weights(trained(tmp_path, model, moe_grouped_gemm=grouped))
    for expert in range(2):
        for half in "wv":
            live = f"linear_fc1.weight{expert}" if grouped else f"local_experts.{expert}.linear_fc1.weight"
            stored = f"decoder.layers.0.mlp.experts.experts.{expert}.linear_fc1.weight_{half}"
            assert torch.equal(weights[f"decoder.layers.0.mlp.experts.{live}_{half}"], model[stored])
    assert_returns(tmp_path)


def test_expert_state_is_not_mistaken_for_tensor_parallel_shards(tmp_path: Path) -> None:
    # The ratio of rows and columns looks like a number of tensor-parallel ranks.
    model = random_tensors(
        {
            "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 2, 16, 4),
            "decoder.layers.mlp.experts.experts.linear_fc2.weight": (2, 2, 4, 8),
        }
    )
    tensors = plain_tensors(trained(tmp_path, model, DECAYED, EXPERTS, base=LOCAL))
    second = model["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    for layer in range(2):
        for expert in range(2):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            assert torch.equal(tensors[f"{OPTIMIZER}{name}.exp_avg"], second[layer, expert] * 3 + 1)
            assert torch.equal(tensors[f"{OPTIMIZER}{name}.exp_avg_sq"], second[layer, expert] ** 2)
    assert_returns(tmp_path)


def test_weights_only(tmp_path: Path) -> None:
    model = {k: v.bfloat16() for k, v in random_tensors({"decoder.layers.mlp.linear_fc2.weight": (2, 4, 8)}).items()}
    target = converted(tmp_path, model, {"args": TE})
    weights = model_weights(target)
    assert torch.equal(
        weights["decoder.layers.1.mlp.linear_fc2.weight"], model["decoder.layers.mlp.linear_fc2.weight"][1]
    )
    keys = set(plain_metadata(target).state_dict_metadata)
    assert not [key for key in keys if key.startswith("optimizer.")]
    assert {"args", "iteration", "checkpoint_version"} <= keys
    assert_returns(tmp_path)


def test_gates_other_than_swiglu_are_split(tmp_path: Path) -> None:
    model = random_tensors(
        {"decoder.layers.mlp.linear_fc1.weight": (1, 8, 4), "decoder.layers.mlp.linear_fc2.weight": (1, 4, 4)}
    )
    assert set(model_weights(trained(tmp_path, model, swiglu=False))) == {
        "decoder.layers.0.mlp.linear_fc1.weight_v",
        "decoder.layers.0.mlp.linear_fc1.weight_w",
        "decoder.layers.0.mlp.linear_fc2.weight",
    }
    assert_returns(tmp_path)


def test_only_gated_layers_are_split(tmp_path: Path) -> None:
    model = random_tensors(
        {
            "vision_model.decoder.layers.mlp.linear_fc1.weight": (2, 8, 4),
            "vision_model.decoder.layers.mlp.linear_fc2.weight": (2, 4, 8),
            "decoder.layers.mlp.linear_fc1.weight": (1, 8, 4),
            "decoder.layers.mlp.linear_fc1.bias": (1, 8),
            "decoder.layers.mlp.linear_fc2.weight": (1, 4, 4),
        }
    )
    weights = model_weights(trained(tmp_path, model, DECAYED, PLAIN))
    assert weights["vision_model.decoder.layers.1.mlp.linear_fc1.weight"].shape == (8, 4)
    assert weights["decoder.layers.0.mlp.linear_fc1.weight_w"].shape == (4, 4)
    assert torch.equal(
        weights["decoder.layers.0.mlp.linear_fc1.bias_v"], model["decoder.layers.mlp.linear_fc1.bias"][0, 4:]
    )
    assert_returns(tmp_path)


def test_multi_token_prediction_keeps_its_name_unless_asked(tmp_path: Path) -> None:
    model = random_tensors(
        {
            "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (8, 4),
            "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight": (4, 4),
            "mtp.layers.0.eh_proj.weight": (4, 8),
        }
    )
    trained(tmp_path, model)
    source = tmp_path / "source"
    write_state(read_state(source), tmp_path / "live", "fsdp_dtensor", WriteOptions(rename_mtp_keys=True))
    stored, live = (set(plain_metadata(tmp_path / name).state_dict_metadata) for name in ("target", "live"))
    groups = {key for key in stored if "param_to_group_meta" in key}
    assert groups == {key for key in live if "param_to_group_meta" in key}
    # Groups have the names in the model, of which older versions had others.
    assert {key for key in groups if "mtp_model_layer" in key} == {
        key.replace(".transformer_layer.", ".mtp_model_layer.") for key in groups if "mtp.layers.0.eh" not in key
    }
    stored, live = stored - groups, live - groups
    assert "model.module.mtp.layers.0.transformer_layer.mlp.linear_fc1.weight_w" in stored
    assert not [key for key in stored if "mtp_model_layer" in key]
    assert {key.replace(".transformer_layer.", ".mtp_model_layer.") for key in stored} == live
    assert_returns(tmp_path)
    write_state(read_state(tmp_path / "live"), tmp_path / "live_back", "torch_dist")
    assert set(plain_tensors(tmp_path / "live_back")) == set(plain_tensors(source))


def test_parts_of_state_space_projections_are_fused_as_in_the_model(tmp_path: Path) -> None:
    mixer, attention = "decoder.layers.0.mixer.", "decoder.layers.1.self_attention."
    rows = {"z": 6, "x": 6, "B": 4, "C": 4, "dt": 3}
    shapes: dict[str, tuple[int, ...]] = {f"{mixer}in_proj.weight.{k}": (n, 5) for k, n in rows.items()}
    shapes |= {f"{mixer}conv1d.weight.{k}": (rows[k], 1, 2) for k in "xBC"} | {f"{mixer}A_log": (3,)}
    shapes |= {f"{mixer}conv1d.bias.{k}": (rows[k],) for k in "xBC"}
    linear = {"query": 4, "key": 4, "value": 6, "z": 6, "beta": 2, "alpha": 2}
    shapes |= {f"{attention}in_proj.weight.{k}": (n, 5) for k, n in linear.items()} | {f"{attention}A_log": (2,)}
    shapes |= {f"{attention}conv1d.weight.{k}": (linear[k], 1, 2) for k in ("query", "key", "value")}
    model = random_tensors(shapes)
    weights = model_weights(trained(tmp_path, model, DECAYED, PLAIN))
    assert set(weights) == {f"{mixer}{k}" for k in ("in_proj.weight", "conv1d_weight", "conv1d_bias", "A_log")} | {
        f"{attention}{k}" for k in ("in_proj.weight", "conv1d.weight", "A_log")
    }
    assert torch.equal(
        weights[f"{mixer}in_proj.weight"], torch.cat([model[f"{mixer}in_proj.weight.{k}"] for k in rows])
    )
    fused = torch.cat([model[f"{attention}in_proj.weight.{k}"] for k in linear])
    assert torch.equal(weights[f"{attention}in_proj.weight"], fused)
    assert_returns(tmp_path)


def test_optimizer_keys_of_a_float32_model_have_one_wrapper_less(tmp_path: Path) -> None:
    model = random_tensors({"decoder.final_layernorm.weight": (4,)})
    stored = {**with_optimizer(model), **model}
    common = {"args": args(TE, bf16=False), "optimizer": optimizer_of(DECAYED, PLAIN)}
    keys = set(plain_metadata(converted(tmp_path, stored, common)).state_dict_metadata)
    assert "optimizer.state.module.module.decoder.final_layernorm.weight.exp_avg" in keys
    assert "optimizer.param_to_group_meta.module.module.decoder.final_layernorm.weight.step" in keys
    assert "model.module.decoder.final_layernorm.weight" in keys
    assert not [key for key in keys if "module.module.module" in key]
    assert_returns(tmp_path)


def test_weights_in_another_dtype_keep_it(tmp_path: Path) -> None:
    model = random_tensors({"decoder.layers.0.mixer.D": (4,), "decoder.layers.0.mlp.linear_fc2.weight": (4, 4)})
    stored = {**with_optimizer(model), "decoder.layers.0.mixer.D": model["decoder.layers.0.mixer.D"]}
    converted(tmp_path, stored, {"args": TE, "optimizer": optimizer_of(DECAYED, PLAIN)})
    assert_returns(tmp_path)


def test_buffers_are_kept_unchanged(tmp_path: Path) -> None:
    model = random_tensors({"decoder.layers.mlp.router.weight": (2, 3, 4)})
    bias = random_tensors({"decoder.layers.mlp.router.expert_bias": (2, 3)})
    common = {"args": LOCAL, "optimizer": optimizer_of(DECAYED)}
    target = converted(tmp_path, {**with_optimizer(model), **bias}, common)
    weights = model_weights(target)
    assert torch.equal(
        weights["decoder.layers.1.mlp.router.expert_bias"], bias["decoder.layers.mlp.router.expert_bias"][1]
    )
    assert not [key for key in plain_objects(target) if "expert_bias" in key]
    assert_returns(tmp_path)


def test_buffers_of_integers_are_not_rounded(tmp_path: Path) -> None:
    counts = {"decoder.counts": torch.tensor([257, 1 << 40]), "output_layer.weight": torch.ones(4, 4)}
    source = write_checkpoint(tmp_path / "source", {f"model.module.{k}": v for k, v in counts.items()}, {"args": TE})
    write_state(read_state(source), tmp_path / "back", "torch_dist")
    assert same(plain_tensors(tmp_path / "back")["decoder.counts"], counts["decoder.counts"])


def test_main_weights_of_an_optimizer_that_is_not_distributed(tmp_path: Path) -> None:
    model = random_tensors({"decoder.layers.mlp.linear_fc2.weight": (2, 4, 8)})
    stored = {k.replace("state.param.", "state.fp32_param."): v for k, v in with_optimizer(model).items()}
    group = {k: v for k, v in DECAYED.items() if k != "step"}
    optimizer = {"optimizer": {"param_groups": [group], "state": {"common_step": 11}}}
    target = converted(tmp_path, stored, {"args": TE, "optimizer": optimizer})
    assert torch.equal(
        model_weights(target)["decoder.layers.1.mlp.linear_fc2.weight"],
        model["decoder.layers.mlp.linear_fc2.weight"][1],
    )
    meta = "optimizer.param_to_group_meta.module.module.module.decoder.layers.1.mlp.linear_fc2.weight.step"
    assert plain_objects(target)[meta] == 11


def test_names_do_not_contain_the_prefixes_of_chained_optimizers(tmp_path: Path) -> None:
    model = random_tensors(
        {"decoder.layers.mlp.experts.experts.linear_fc2.weight": (1, 2, 4, 8), "output_layer.weight": (4, 4)}
    )
    chain = {False: "chained_0.", True: "chained_1."}
    stored = {
        (chain["experts" in k] if k.startswith("optimizer.") else "") + k: v for k, v in with_optimizer(model).items()
    }
    target = converted(tmp_path, stored, {"args": args(LOCAL), "optimizer": optimizer_of(DECAYED, EXPERTS)})
    found = plain_tensors(target)
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    stacked = model["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(found[f"{OPTIMIZER}{name}.exp_avg"], stacked[0, 1] * 3 + 1)
    assert not [key for key in found if "chained" in key]


def test_torch_adam_gets_its_step_counts(tmp_path: Path) -> None:
    model = random_tensors({"output_layer.weight": (4, 4)})
    target = trained(tmp_path, model, {**DECAYED, "amsgrad": False, "step": 5.0})
    step = plain_tensors(target)[f"{OPTIMIZER}output_layer.weight.step"]
    assert step.shape == () and step.dtype == torch.float32 and step.item() == 5.0
    assert_returns(tmp_path)


def test_optimizer_state_in_one_pickle_per_rank_raises(tmp_path: Path) -> None:
    model = random_tensors({"output_layer.weight": (4, 4)})
    key = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    source = write_torch_dist(tmp_path / "source", model, {"args": TE}, {key: ["state"]})
    with pytest.raises(NotImplementedError, match="dp_zero_gather_scatter"):
        read_state(source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.state.param.output_layer.weight": torch.zeros(4, 4, dtype=torch.int16)}, "stores remainders"),
        ({"optimizer.state.exp_avg.other.weight": torch.zeros(4, 4)}, "does not have"),
        (
            {"optimizer.state.momentum.final.weight": torch.zeros(2), "final.weight": torch.zeros(2)},
            "which has other optimizer state",
        ),
        ({"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3, 4)}, "expected a grid"),
    ],
)
def test_optimizer_state_that_does_not_fit_raises(
    tmp_path: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    model = with_optimizer(random_tensors({"output_layer.weight": (4, 4)})) | changes
    source = write_torch_dist(tmp_path / "source", model, {"args": TE, "optimizer": optimizer_of(DECAYED)})
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        read_state(source)


def mismatched(tmp_path: Path, **changes: Any) -> Path:
    model = random_tensors({"output_layer.weight": (4, 4)})
    stored = with_optimizer(model)
    stored["optimizer.state.param.output_layer.weight"] = model["output_layer.weight"].roll(1)
    common = {"args": args(TE, **changes), "optimizer": optimizer_of(DECAYED)}
    return write_torch_dist(tmp_path / "source", stored, common)


def test_main_weights_that_do_not_round_to_the_weights_raise(tmp_path: Path) -> None:
    source = mismatched(tmp_path)
    with pytest.raises(ValueError, match="output_layer.weight: the optimizer's main weights do not round"):
        write_state(read_state(source), tmp_path / "target", "fsdp_dtensor")
    assert not (tmp_path / "target").exists()


def test_the_model_alone_can_be_converted(tmp_path: Path) -> None:
    source = mismatched(tmp_path)
    write_state(read_state(source, ReadOptions(optimizer=False)), tmp_path / "target", "fsdp_dtensor")
    found = plain_tensors(tmp_path / "target")
    assert set(found) == {"model.module.output_layer.weight"}
    assert torch.equal(found["model.module.output_layer.weight"], plain_tensors(source)["output_layer.weight"])
    state = read_state(tmp_path / "target", ReadOptions(optimizer=False))
    write_state(state, tmp_path / "back", "torch_dist")
    assert set(plain_tensors(tmp_path / "back")) == {"output_layer.weight"}
    assert "optimizer" not in plain_common(tmp_path / "back")


def test_main_weights_are_not_compared_with_float8_weights(tmp_path: Path) -> None:
    source = mismatched(tmp_path, fp8_param_gather=True)
    write_state(read_state(source), tmp_path / "target", "fsdp_dtensor")
    expected = plain_tensors(source)["optimizer.state.param.output_layer.weight"]
    assert torch.equal(plain_tensors(tmp_path / "target")["model.module.output_layer.weight"], expected)


def test_extra_states_of_float8_layers_are_not_needed(tmp_path: Path) -> None:
    name = "decoder.layers.self_attention.linear_qkv"
    tensors = random_tensors({f"{name}.weight": (2, 12, 4)})
    states = {f"{name}._extra_state/shard_{i}_2": [torch.zeros(9, dtype=torch.uint8)] for i in range(2)}
    found = []
    for folder, objects in (tmp_path / "with", states), (tmp_path / "without", {}):
        common = {"args": args(TE, fp8_param_gather=True)}
        source = write_torch_dist(folder / "source", tensors, common, objects)
        write_state(read_state(source), folder / "target", "fsdp_dtensor")
        found.append(plain_tensors(folder / "target"))
        assert not [key for key in plain_metadata(folder / "target").state_dict_metadata if "_extra_state" in key]
        fresh = plain_objects(written_as_by_a_run(folder))
        assert all(fresh[key] == [None] for key in states)
    assert found[0] and same(found[0], found[1])


def test_fused_down_projections_are_read_as_two(tmp_path: Path) -> None:
    attention = "decoder.layers.0.self_attention."
    fused = random_tensors({f"{attention}linear_qkv_down_proj.weight": (10, 4)})[
        f"{attention}linear_qkv_down_proj.weight"
    ]
    norm = torch.randn(4)
    tensors = {
        f"model.module.{attention}linear_qkv_down_proj.weight": fused,
        f"model.module.{attention}linear_qkv_down_proj.layer_norm_weight": norm,
    }
    source = write_checkpoint(tmp_path / "source", tensors, {"args": args(TE, q_lora_rank=6), "iteration": 7})
    weights = read_state(source).weights
    assert set(weights) == {
        f"{attention}linear_q_down_proj.weight",
        f"{attention}linear_kv_down_proj.weight",
        "decoder.layers.0.input_layernorm.weight",
    }
    assert torch.equal(weights[f"{attention}linear_q_down_proj.weight"].full_tensor(), fused[:6])
    assert torch.equal(weights[f"{attention}linear_kv_down_proj.weight"].full_tensor(), fused[6:])
    assert torch.equal(weights["decoder.layers.0.input_layernorm.weight"].full_tensor(), norm)


def test_fused_down_projections_stored_as_two(tmp_path: Path) -> None:
    """As Megatron-Core stores them: tensors apart, and groups under the model's own names."""
    layer = "decoder.layers.0."
    attention, field = f"{layer}self_attention.", "weight_decay"
    model = random_tensors(
        {
            f"{attention}linear_q_down_proj.weight": (6, 4),
            f"{attention}linear_kv_down_proj.weight": (4, 4),
            f"{layer}input_layernorm.weight": (4,),
        }
    )
    meta = "optimizer.param_to_group_meta.module.module.module."
    decays = {f"{attention}linear_qkv_down_proj.weight": 0.1, f"{attention}linear_qkv_down_proj.layer_norm_weight": 0.0}
    tensors = {f"model.module.{name}": tensor for name, tensor in model.items()}
    tensors |= {f"{OPTIMIZER}{name}.{kind}": t for name, t in model.items() for kind in ("exp_avg", "exp_avg_sq")}
    objects: dict[str, Any] = {f"{meta}{name}.{field}": decay for name, decay in decays.items()}
    objects |= {"args": args(TE, mla_down_proj_fusion=True, tensor_model_parallel_size=2), "iteration": 7}
    state = read_state(write_checkpoint(tmp_path / "source", tensors, objects))
    assert {name: group[field] for name, group in state.group_of.items()} == {
        name: 0.1 * (tensor.dim() > 1) for name, tensor in model.items()
    }
    write_state(state, tmp_path / "target", "fsdp_dtensor")
    found = plain_objects(tmp_path / "target")
    assert {key: found[key] for key in objects if key.startswith(meta)} == {
        key: value for key, value in objects.items() if key.startswith(meta)
    }
    stored = {key for key in plain_tensors(tmp_path / "target")}
    assert stored == set(tensors)


def test_fused_down_projections_of_tensor_parallel_ranks_raise(tmp_path: Path) -> None:
    name = "model.module.decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    said = {"args": args(TE, q_lora_rank=6, tensor_model_parallel_size=2), "iteration": 7}
    source = write_checkpoint(tmp_path / "source", random_tensors({name: (10, 4)}), said)
    with pytest.raises(ValueError, match="linear_qkv_down_proj.weight: it is stored fused"):
        read_state(source)


def test_empty_extra_states_match_the_implementation_of_layers(tmp_path: Path) -> None:
    attention = {
        "decoder.layers.self_attention.linear_qkv.weight": (2, 12, 4),
        "decoder.layers.self_attention.linear_proj.weight": (2, 4, 4),
    }
    norms = {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 4),
        "decoder.final_layernorm.weight": (4,),
    }
    found = {}
    for name, base in {"local": LOCAL, "transformer_engine": TE}.items():
        converted(tmp_path / name, random_tensors(attention | norms), {"args": args(base, bf16=False)})
        objects = plain_objects(written_as_by_a_run(tmp_path / name))
        found[name] = {key for key, value in objects.items() if "_extra_state" in key and value == [None]}
    linear = {
        f"decoder.layers.self_attention.linear_{m}._extra_state/shard_{i}_2" for m in ("qkv", "proj") for i in (0, 1)
    }
    assert found["local"] == linear
    assert found["transformer_engine"] == linear | {
        *(f"decoder.layers.self_attention.core_attention._extra_state/shard_{i}_2" for i in (0, 1)),
        "decoder.final_layernorm._extra_state/shard_0_1",
    }


def test_without_kept_data_the_layout_is_megatron_cores(tmp_path: Path) -> None:
    model = random_tensors(
        {"decoder.layers.0.mlp.linear_fc2.weight": (4, 8), "decoder.layers.1.mlp.linear_fc2.weight": (4, 8)}
    )
    trained(tmp_path, model)
    fresh = written_as_by_a_run(tmp_path)
    keys = {key for key in plain_tensors(fresh) if not key.startswith("optimizer.")}
    # The source stores layers one by one, but Megatron-Core stacks equal layers.
    assert keys == {"decoder.layers.mlp.linear_fc2.weight"}
    content = plain_common(fresh)["content_metadata"]
    assert content["distrib_optim_sharding_type"] == "fully_reshardable" and not content["singleton_local_shards"]


@pytest.mark.parametrize("setting", [{"moe_layer_freq": [1, 1]}, {"moe_layer_freq": 2}, {"linear_attention_freq": 4}])
def test_heterogeneous_layers_are_written_separately(tmp_path: Path, setting: dict[str, Any]) -> None:
    model = random_tensors({"decoder.layers.mlp.linear_fc2.weight": (2, 4, 8)})
    trained(tmp_path, model, **setting)
    keys = {key for key in plain_tensors(written_as_by_a_run(tmp_path)) if not key.startswith("optimizer.")}
    assert keys == {f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(2)}


def test_settings_in_tensors_are_kept_exactly(tmp_path: Path) -> None:
    model = random_tensors({"output_layer.weight": (4, 4), "decoder.final_layernorm.weight": (4,)})
    # Both are printed as 0.0012.
    rates = torch.tensor(0.00123451), torch.tensor(0.00123499)
    groups = {**DECAYED, "lr": rates[0]}, {**PLAIN, "lr": rates[1]}
    objects = plain_objects(trained(tmp_path, model, *groups))
    meta = "optimizer.param_to_group_meta.module.module.module."
    found = objects[f"{meta}output_layer.weight.lr"], objects[f"{meta}decoder.final_layernorm.weight.lr"]
    assert same(found, rates)
    assert_returns(tmp_path)


def rewritten(tmp_path: Path, change: Mapping[str, Any]) -> Path:
    """An ``fsdp_dtensor`` checkpoint with other objects."""
    shapes = {"output_layer.weight": (4, 4), "embedding.word_embeddings.weight": (4, 4)}
    source = trained(tmp_path, random_tensors(shapes))
    return write_checkpoint(tmp_path / "changed", plain_tensors(source), {**plain_objects(source), **change})


@pytest.mark.parametrize("kept", [True, False])
def test_settings_that_torch_dist_has_once_for_several_parameters_must_be_equal(tmp_path: Path, kept: bool) -> None:
    change = {"optimizer.param_to_group_meta.module.module.module.output_layer.weight.step": 99}
    changed = rewritten(tmp_path, change if kept else {**change, "torch_dist": {}})
    message = r"expected equal .* for .*output_layer\.weight.*; got step (7 and 99|99 and 7)\. --no-optimizer"
    with pytest.raises(ValueError, match=message):
        write_state(read_state(changed), tmp_path / "back", "torch_dist")
    write_state(read_state(changed, ReadOptions(optimizer=False)), tmp_path / "back", "torch_dist")


def test_objects_of_others_come_back(tmp_path: Path) -> None:
    others = {"my_dataloader.position": {"file": 5}, "model.module.decoder._extra_state": b"x"}
    changed = rewritten(tmp_path, others)
    write_state(read_state(changed), tmp_path / "back", "torch_dist")
    write_state(read_state(tmp_path / "back"), tmp_path / "again", "fsdp_dtensor")
    found, expected = plain_objects(tmp_path / "again"), plain_objects(changed)
    assert found.pop("torch_dist") and expected.pop("torch_dist") and same(found, expected)
