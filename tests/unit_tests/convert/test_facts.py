"""Facts about layers that a torch_dist checkpoint records, and the options for those that it does not."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.run import read_state
from tests.checkpoints import ITERATION, random_tensors, sample, write_torch_dist

NORMS = {
    "decoder.layers.self_attention.linear_qkv.weight": (1, 6, 4),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (1, 4),
}
DENSE = NORMS | {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (1, 4),
    "decoder.layers.mlp.linear_fc1.weight": (1, 16, 4),
    "decoder.layers.mlp.linear_fc2.weight": (1, 4, 8),
}
MOE = NORMS | {
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (1, 4),
    "decoder.layers.mlp.experts.experts.linear_fc1.weight": (1, 2, 16, 4),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (1, 2, 4, 8),
}
STATE = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1"
OWN = "decoder.layers.0.input_layernorm.weight"
FUSED = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def names(
    tmp_path: Path,
    shapes: dict[str, tuple[int, ...]],
    objects: dict[str, Any] | None = None,
    options: ReadOptions | None = None,
    **args: Any,
) -> set[str]:
    common = {"args": argparse.Namespace(**args)}
    path = write_torch_dist(tmp_path / "source", random_tensors(shapes), common, objects)
    return set(read_state(path, options).weights)


@pytest.mark.parametrize(("implementation", "expected"), [("local", OWN), ("transformer_engine", FUSED)])
def test_arguments_tell_the_implementation_of_layers(tmp_path: Path, implementation: str, expected: str) -> None:
    found = names(tmp_path, DENSE, transformer_impl=implementation)
    assert len(found & {OWN, FUSED}) == 1 and expected in found
    norm = {OWN: "pre_mlp_layernorm", FUSED: "mlp.linear_fc1.layer_norm"}[expected]
    assert [name for name in found if f"{norm}.weight" in name or f"{norm}_weight" in name]


@pytest.mark.parametrize(
    ("state", "expected"), [([None], OWN), ([torch.empty(0, dtype=torch.uint8)], FUSED), ([b"state"], FUSED)]
)
def test_extra_states_override_the_arguments(tmp_path: Path, state: Any, expected: str) -> None:
    other = "transformer_engine" if expected == OWN else "local"
    assert expected in names(tmp_path, DENSE, {STATE: state}, transformer_impl=other)


def test_a_norm_of_a_missing_linear_layer_shows_local_layers(tmp_path: Path) -> None:
    found = names(tmp_path, MOE, transformer_impl="transformer_engine")
    assert {OWN, "decoder.layers.0.pre_mlp_layernorm.weight"} <= found
    assert "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight_v" in found


def test_an_unknown_implementation_raises_and_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--transformer-impl"):
        names(tmp_path, DENSE)


def test_the_option_gives_the_implementation(tmp_path: Path) -> None:
    assert OWN in names(tmp_path, DENSE, options=ReadOptions(transformer_impl="local"))


def test_an_option_that_contradicts_the_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--transformer-impl transformer_engine"):
        names(tmp_path, DENSE, {STATE: [None]}, ReadOptions(transformer_impl="transformer_engine"))


@pytest.mark.parametrize("grouped", [True, False])
def test_arguments_tell_whether_experts_are_grouped(tmp_path: Path, grouped: bool) -> None:
    experts = {key: shape for key, shape in MOE.items() if "experts" in key}
    found = names(tmp_path, experts, transformer_impl="transformer_engine", moe_grouped_gemm=grouped)
    prefix = "decoder.layers.0.mlp.experts."
    expected = f"{prefix}linear_fc2.weight1" if grouped else f"{prefix}local_experts.1.linear_fc2.weight"
    assert expected in found and len(found) == 6


def test_experts_of_unknown_grouping_raise_and_name_the_option(tmp_path: Path) -> None:
    experts = {key: shape for key, shape in MOE.items() if "experts" in key}
    with pytest.raises(ValueError, match="--moe-grouped-gemm"):
        names(tmp_path / "a", experts, transformer_impl="transformer_engine")
    options = ReadOptions(moe_grouped_gemm=True)
    found = names(tmp_path / "b", experts, options=options, transformer_impl="transformer_engine")
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight0_w" in found


def test_names_that_do_not_depend_on_the_implementation_need_no_option(tmp_path: Path) -> None:
    assert names(tmp_path, {"decoder.layers.self_attention.linear_proj.weight": (1, 4, 4)})


def test_norms_that_are_modules_in_both_implementations_keep_their_names(tmp_path: Path) -> None:
    shapes = {
        "decoder.layers.input_layernorm.weight": (1, 4),
        "decoder.layers.self_attention.linear_q_proj.weight": (1, 4, 4),
    }
    assert names(tmp_path, shapes) == {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_q_proj.weight",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ReadOptions(swiglu=True), "--swiglu"),
        (ReadOptions(swiglu_modules=("decoder",)), "--swiglu-modules.*decoder"),
    ],
)
def test_swiglu_layers_of_an_option_must_exist(tmp_path: Path, options: ReadOptions, message: str) -> None:
    shapes = {"decoder.layers.mlp.linear_fc1.weight": (1, 8, 4), "decoder.layers.mlp.linear_fc2.weight": (1, 4, 8)}
    with pytest.raises(ValueError, match=message):
        names(tmp_path, shapes, options=options)


def test_swiglu_layers_outside_the_modules_of_an_option_raise() -> None:
    path = sample("torch_dist_dp2") / ITERATION
    assert read_state(path, ReadOptions(swiglu=True, swiglu_modules=("decoder.layers",))).weights
    with pytest.raises(ValueError, match="linear_fc1"):
        read_state(path, ReadOptions(swiglu_modules=("language_model",)))


def test_swiglu_options_are_checked_for_fsdp_dtensor() -> None:
    path = sample("fsdp_dtensor_dp2") / ITERATION
    assert read_state(path, ReadOptions(swiglu=True)).weights
    with pytest.raises(ValueError, match="linear_fc1"):
        read_state(path, ReadOptions(swiglu_modules=("language_model",)))
