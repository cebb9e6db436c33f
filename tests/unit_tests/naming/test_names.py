"""A name is taken apart and put together again, and every spelling of a parameter leads to the canonical one."""

from pathlib import Path

import pytest

from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.naming.names import GROUPED, LOCAL, STORED, Name, live_names, stored_names, without_indices
from tests.checkpoints import ITERATION, SAMPLES

ATTENTION = "decoder.layers.0.self_attention."
PARSED = {
    "output_layer.weight": Name("", "", "", "", "", "output_layer.weight", ""),
    "decoder.layers.3.mlp.linear_fc1.weight_w": Name("decoder.layers.", "3", "", "", "", "mlp.linear_fc1.weight", "_w"),
    "decoder.layers.mlp.linear_fc1.bias": Name("decoder.layers.", "", "", "", "", "mlp.linear_fc1.bias", ""),
    "layers.0.mlp.router.expert_bias": Name("layers.", "0", "", "", "", "mlp.router.expert_bias", ""),
    "mtp.layers.0.transformer_layer.mlp.experts.local_experts.5.linear_fc1.weight_v": Name(
        "mtp.layers.", "0", "transformer_layer.mlp.experts.", LOCAL, "5", "linear_fc1.weight", "_v"
    ),
    "decoder.layers.3.mlp.experts.linear_fc2.bias12": Name(
        "decoder.layers.", "3", "mlp.experts.", GROUPED, "12", "linear_fc2.bias", ""
    ),
    "decoder.layers.mlp.experts.experts.7.linear_fc1.weight_w": Name(
        "decoder.layers.", "", "mlp.experts.", STORED, "7", "linear_fc1.weight", "_w"
    ),
    "decoder.layers.2.mlp.experts.experts.linear_fc1.weight": Name(
        "decoder.layers.", "2", "mlp.experts.", STORED, "", "linear_fc1.weight", ""
    ),
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": Name(
        "decoder.layers.", "1", "", "", "", "mlp.shared_experts.linear_fc1.weight", ""
    ),
}


@pytest.mark.parametrize("text", PARSED)
def test_names_are_taken_apart(text: str) -> None:
    assert Name.parse(text) == PARSED[text]
    assert str(Name.parse(text)) == text


@pytest.mark.parametrize("folder", sorted(SAMPLES.glob(f"*/{ITERATION}")), ids=lambda folder: folder.parent.name)
def test_all_keys_of_samples_come_back(folder: Path) -> None:
    reader = CheckpointReader(folder)
    keys = [*reader.tensors, *reader.objects]
    assert keys and [str(Name.parse(key)) for key in keys] == keys


def test_indices() -> None:
    assert without_indices("layers.1.experts.linear_fc1.weight12") == "layers.{}.experts.linear_fc1.weight{}"
    assert without_indices("layers.1.mlp.linear_fc1.bias") == "layers.{}.mlp.linear_fc1.bias"


STORED_AS = {
    f"{ATTENTION}linear_qkv_down_proj.weight": (
        f"{ATTENTION}linear_q_down_proj.weight",
        f"{ATTENTION}linear_kv_down_proj.weight",
    ),
    f"{ATTENTION}linear_qkv_down_proj.layer_norm_weight": ("decoder.layers.0.input_layernorm.weight",),
    "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": ("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",),
    "mtp.layers.0.mtp_model_layer.layers.1.mixer.A_log": ("mtp.layers.0.mtp_model_layer.layers.1.mixer.A_log",),
}


@pytest.mark.parametrize("live", STORED_AS)
def test_the_name_in_the_model_and_the_stored_one(live: str) -> None:
    assert stored_names(live) == STORED_AS[live]
    assert all(live in live_names(stored, fused=True) for stored in STORED_AS[live])
