"""The optimizer group of each parameter: Megatron's rules, maps dumped by training scripts, and contradictions."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.checkpoint import lazy
from megatron.fsdp.convert.groups import OPTION, assign, chains, read_map
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.run import read_state
from tests.checkpoints import DECAYED, EXPERTS, ITERATION, PLAIN, plain_objects, sample

FAST = DECAYED | {"is_decoupled_lr": True, "max_lr": 0.5, "default_config": False}
MATRIX, VECTOR = lazy.of(torch.zeros(2, 2)), lazy.of(torch.zeros(2))
WEIGHTS = {
    "embedding.word_embeddings.weight": MATRIX,
    "decoder.layers.0.self_attention.linear_qkv.weight": MATRIX,
    "decoder.layers.0.self_attention.linear_qkv.bias": VECTOR,
    "decoder.layers.0.self_attention.q_layernorm.weight": VECTOR,
    "decoder.layers.0.mlp.experts.linear_fc1.weight0_w": MATRIX,
    "decoder.layers.0.mlp.experts.linear_fc1.weight0_v": MATRIX,
    "decoder.layers.0.mlp.experts.linear_fc1.bias0_w": VECTOR,
    "decoder.layers.0.mlp.shared_experts.linear_fc1.weight_w": MATRIX,
    "output_layer.weight": MATRIX,
}
NONE = argparse.Namespace()


def test_matrices_decay_and_vectors_do_not() -> None:
    found = assign(WEIGHTS, [DECAYED, PLAIN], NONE)
    plain = {name for name, group in found.items() if group == PLAIN}
    assert plain == {
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.bias0",
    }
    assert {name for name, group in found.items() if group == DECAYED} == set(found) - plain
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight0" in found and len(found) == 8


def test_norms_of_queries_and_keys_decay_if_the_arguments_say_so() -> None:
    found = assign(WEIGHTS, [DECAYED, PLAIN], argparse.Namespace(apply_wd_to_qk_layernorm=True))
    assert found["decoder.layers.0.self_attention.q_layernorm.weight"] == DECAYED
    assert found["decoder.layers.0.self_attention.linear_qkv.bias"] == PLAIN


def test_parameters_with_momentum_belong_to_the_groups_of_muon() -> None:
    muon = {name: value for name, value in DECAYED.items() if name not in ("betas", "eps")} | {"momentum": 0.9}
    names = [name for name in WEIGHTS if name.endswith(("linear_qkv.weight", "weight0_w", "weight0_v"))]
    found = assign(WEIGHTS, [DECAYED, PLAIN, muon], NONE, muon=names)
    assert {name for name, group in found.items() if group == muon} == {
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
    }
    assert found["output_layer.weight"] == DECAYED


def test_experts_spread_over_ranks_have_separate_groups() -> None:
    plain = EXPERTS | {"wd_mult": 0.0, "weight_decay": 0.0}
    found = assign(WEIGHTS, [DECAYED, PLAIN, EXPERTS, plain], NONE)
    assert found["decoder.layers.0.mlp.experts.linear_fc1.weight0"] == EXPERTS
    assert found["decoder.layers.0.mlp.experts.linear_fc1.bias0"] == plain
    assert found["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] == DECAYED


@pytest.mark.parametrize(
    ("group", "args"),
    [
        (FAST, NONE),
        (FAST | {"is_decoupled_lr": False}, argparse.Namespace(decoupled_lr=0.5)),
    ],
)
def test_embedding_and_output_may_have_a_decoupled_learning_rate(
    group: dict[str, Any], args: argparse.Namespace
) -> None:
    found = assign(WEIGHTS, [DECAYED, PLAIN, group], args)
    assert {name for name, one in found.items() if one == group} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }


def test_a_setting_that_older_versions_lack_is_added() -> None:
    old = [{k: v for k, v in group.items() if k != "default_config"} for group in (DECAYED, PLAIN, FAST)]
    found = assign(WEIGHTS, old, NONE)
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"]["default_config"] is True
    assert found["output_layer.weight"]["default_config"] is False


@pytest.mark.parametrize("groups", [[], [DECAYED], [DECAYED, DECAYED | {"lr": 1.0}, PLAIN]])
def test_ambiguous_rules_raise_and_name_the_option(groups: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=OPTION):
        assign(WEIGHTS, groups, NONE)


def test_equal_groups_are_not_ambiguous() -> None:
    assert assign(WEIGHTS, [DECAYED, PLAIN, dict(PLAIN)], NONE)


def test_the_map_resolves_ambiguous_rules() -> None:
    slow = DECAYED | {"lr": 1.0, "lr_mult": 0.1}
    mapping = dict.fromkeys(assign(WEIGHTS, [DECAYED, PLAIN], NONE), 0)
    mapping |= {name: 2 for name in mapping if "bias" in name or "norm" in name}
    mapping["output_layer.weight"] = 1
    found = assign(WEIGHTS, [DECAYED, slow, PLAIN], NONE, mapping)
    assert found["output_layer.weight"] == slow
    assert found["embedding.word_embeddings.weight"] == DECAYED


def test_a_map_that_contradicts_the_rules_raises() -> None:
    mapping = dict.fromkeys(assign(WEIGHTS, [DECAYED, PLAIN], NONE), 0)
    with pytest.raises(ValueError, match="linear_qkv.bias is in group 0.*not decayed"):
        assign(WEIGHTS, [DECAYED, PLAIN], NONE, mapping)


@pytest.mark.parametrize("change", [{"output_layer.weight": None}, {"output_layer.weight": 7}])
def test_a_map_of_another_model_raises(change: dict[str, int | None]) -> None:
    mapping = {n: int("bias" in n or "norm" in n) for n in assign(WEIGHTS, [DECAYED, PLAIN], NONE)}
    changed = {k: v for k, v in (mapping | change).items() if v is not None}
    with pytest.raises(ValueError, match="output_layer.weight"):
        assign(WEIGHTS, [DECAYED, PLAIN], NONE, changed)


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "model.module."])
def test_a_map_is_read_with_any_wrappers(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "map.json"
    names = {"decoder.final_layernorm.weight": 1, "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": 0}
    path.write_text(json.dumps({f"{prefix}{name}": index for name, index in names.items()}))
    assert read_map(path) == {
        "decoder.final_layernorm.weight": 1,
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight": 0,
    }


@pytest.mark.parametrize("text", ["[]", '{"a": "b"}'])
def test_a_file_without_a_map_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ValueError, match=r"map\.json: expected"):
        read_map(tmp_path / "map.json")


@pytest.mark.parametrize("name", ["torch_dist_dp2", "torch_dist_moe_ep2", "torch_dist_dp2_dp_reshardable"])
def test_the_rules_agree_with_dumped_maps(tmp_path: Path, name: str) -> None:
    folder = sample(name)
    path = tmp_path / "map.json"
    path.write_text(json.dumps(plain_objects(folder / "param_to_param_group_map")))
    derived = read_state(folder / ITERATION)
    with_map = read_state(folder / ITERATION, ReadOptions(group_map=path))
    assert derived.group_of == with_map.group_of and derived.group_of
    wrong = {key: 1 - min(index, 1) for key, index in json.loads(path.read_text()).items()}
    path.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=OPTION):
        read_state(folder / ITERATION, ReadOptions(group_map=path))


def test_all_groups_get_the_shared_step_of_a_plain_optimizer() -> None:
    group = {k: v for k, v in DECAYED.items() if k != "step"} | {"params": [0, 1]}
    optimizer = {"optimizer": {"param_groups": [group], "state": {"common_step": 9}}}
    ((found,),) = chains(optimizer)
    assert found == DECAYED | {"step": 9}
    assert chains({0: optimizer, 1: optimizer}) == [[found], [found]]
    assert chains(None) == chains({"param_state_sharding_type": "dp_reshardable"}) == []
