"""Conversions in both directions return bit-identical checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.rewrites import Facts, Tensors, from_canonical, to_canonical
from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import (
    FSDP_DTENSOR,
    FULLY_RESHARDABLE,
    ITERATION,
    meta,
    plain_common,
    plain_objects,
    plain_tensors,
    same,
    sample,
    sha256,
    write_torch_dist,
)


def through(source: Path, formats: tuple[str, ...], folder: Path, options: WriteOptions | None = None) -> Path:
    for number, name in enumerate(formats):
        target = folder / str(number) / ITERATION
        write_state(read_state(source), target, name, options)
        source = target
    return source


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert same(found[key], tensor), key


@pytest.mark.parametrize("name", FULLY_RESHARDABLE)
def test_torch_dist_comes_back_bit_equal(tmp_path: Path, name: str) -> None:
    source = sample(name) / ITERATION
    back = through(source, ("fsdp_dtensor", "torch_dist"), tmp_path)
    found = plain_tensors(back)
    assert_equal_tensors(found, plain_tensors(source))
    assert {key: sha256(tensor) for key, tensor in found.items()} == {
        key: entry["sha256"] for key, entry in meta(name)["file_tensors"].items()
    }
    expected = plain_objects(source)
    assert same(plain_objects(back), expected) and expected
    assert same(plain_common(back), plain_common(source))
    assert (back / "metadata.json").read_text() == (source / "metadata.json").read_text()
    assert (back / "common.pt").exists() == (source / "common.pt").exists()


@pytest.mark.parametrize("name", FSDP_DTENSOR)
def test_fsdp_dtensor_comes_back_bit_equal(tmp_path: Path, name: str) -> None:
    source = sample(name) / ITERATION
    back = through(source, ("torch_dist", "fsdp_dtensor"), tmp_path)
    assert_equal_tensors(plain_tensors(back), plain_tensors(source))
    found = plain_objects(back)
    assert found.pop("torch_dist")
    assert same(found, plain_objects(source))


@pytest.mark.parametrize(
    ("name", "like"), [("fsdp_dtensor_dp2", "torch_dist_dp2_main"), ("fsdp_dtensor_moe_ep2", "torch_dist_moe_ep2")]
)
def test_trained_checkpoints_get_the_layout_of_megatron(tmp_path: Path, name: str, like: str) -> None:
    back = through(sample(name) / ITERATION, ("torch_dist",), tmp_path)
    expected = plain_tensors(sample(like) / ITERATION)
    found = plain_tensors(back)
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in expected.items()}
    stored = {key for key in plain_objects(sample(like) / ITERATION) if key != "common_state/shard_0_1"}
    assert {key for key in plain_objects(back) if key != "common_state/shard_0_1"} == stored
    common, wanted = plain_common(back), plain_common(sample(like) / ITERATION)
    assert same(common["optimizer"], wanted["optimizer"])
    assert same(common["opt_param_scheduler"], wanted["opt_param_scheduler"])
    assert same(common["content_metadata"], wanted["content_metadata"])


def test_model_weights_are_main_weights_cast_to_the_dtype_of_the_arguments(tmp_path: Path) -> None:
    back = plain_tensors(through(sample("fsdp_dtensor_dp2") / ITERATION, ("torch_dist",), tmp_path))
    for key, tensor in back.items():
        if not key.startswith("optimizer."):
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, back[f"optimizer.state.param.{key}"].bfloat16()), key


def test_a_layout_can_be_taken_from_another_checkpoint(tmp_path: Path) -> None:
    like = sample("torch_dist_dp2") / ITERATION
    options = WriteOptions(like=like)
    back = through(sample("fsdp_dtensor_dp2") / ITERATION, ("torch_dist",), tmp_path, options)
    assert (back / "common.pt").exists()
    assert (back / "metadata.json").read_text() == (like / "metadata.json").read_text()
    assert same(plain_common(back)["content_metadata"], plain_common(like)["content_metadata"])


def test_an_explicit_layout_takes_precedence_over_that_of_an_earlier_conversion(tmp_path: Path) -> None:
    single = tmp_path / "single"
    model = {f"decoder.layers.{i}.mlp.linear_fc2.weight": torch.ones(2, 2) for i in range(2)}
    write_torch_dist(single, model, {})
    back = through(
        sample("torch_dist_dp2") / ITERATION, ("fsdp_dtensor", "torch_dist"), tmp_path, WriteOptions(like=single)
    )
    names = {key for key in plain_tensors(back) if "linear_fc2" in key and not key.startswith("optimizer.")}
    assert names == {f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(3)}
    assert "decoder.layers.2.mlp.linear_fc2._extra_state/shard_0_1" in plain_objects(back)


@pytest.mark.parametrize("name", ["torch_dist_dp2_dp_reshardable", "torch_dist_tp2dp2_legacy_fsms_mcore013"])
def test_other_optimizer_state_comes_back_by_parameter(tmp_path: Path, name: str) -> None:
    source = sample(name) / ITERATION
    first = plain_tensors(through(source, ("fsdp_dtensor",), tmp_path / "a"))
    back = through(source, ("fsdp_dtensor", "torch_dist"), tmp_path / "b")
    model = {key: tensor for key, tensor in plain_tensors(source).items() if not key.startswith("optimizer.")}
    found = plain_tensors(back)
    assert_equal_tensors({k: v for k, v in found.items() if not k.startswith("optimizer.")}, model)
    assert {key.split(".")[2] for key in found if key.startswith("optimizer.")} == {"param", "exp_avg", "exp_avg_sq"}
    common = plain_common(back)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    again = through(back, ("fsdp_dtensor",), tmp_path / "c")
    assert_equal_tensors(plain_tensors(again), first)


@pytest.mark.parametrize(
    ("convert", "gated"), [(from_canonical, True), (to_canonical, False)], ids=["SwiGLU", "another gate"]
)
def test_half_of_a_gated_projection_raises(convert: Callable[..., Tensors], gated: bool) -> None:
    whole = "decoder.layers.0.mlp.linear_fc1.weight"
    facts = Facts(gated=frozenset([whole] if gated else []))
    with pytest.raises(ValueError, match="linear_fc1.weight_v is missing"):
        convert({f"{whole}_w": torch.zeros(4, 2)}, "torch_dist", facts)
