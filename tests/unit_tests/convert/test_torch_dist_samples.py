"""Every torch_dist sample becomes an fsdp_dtensor checkpoint with the same numbers under the right names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import (
    FSDP_DTENSOR,
    ITERATION,
    TORCH_DIST,
    meta,
    plain_common,
    plain_metadata,
    plain_objects,
    plain_tensors,
    same,
    sample,
    sha256,
)

OPTIMIZER = "optimizer.state.module.module.module."
META = "optimizer.param_to_group_meta.module.module.module."
# The sample of this format with the same model.
EQUAL_MODEL = {
    "torch_dist_dp2_main": "fsdp_dtensor_dp2",
    "torch_dist_dp2_dp_reshardable": "fsdp_dtensor_dp2",
    "torch_dist_tp2dp2_legacy_fsms_mcore013": "fsdp_dtensor_dp2",
    "torch_dist_moe_ep2": "fsdp_dtensor_moe_ep2",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in TORCH_DIST:
        folders[name] = tmp_path_factory.mktemp(name) / ITERATION
        write_state(read_state(sample(name) / ITERATION), folders[name], "fsdp_dtensor")
    return folders


def whole(tensors: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """A parameter by its name, also if it is stored as two halves."""
    if key in tensors:
        return tensors[key]
    return torch.cat([tensors[f"{key}_w"], tensors[f"{key}_v"]])


def state_of(tensors: dict[str, torch.Tensor], name: str, kind: str) -> torch.Tensor:
    by_name = {k.removesuffix(f".{kind}"): v for k, v in tensors.items() if k.endswith(f".{kind}")}
    return whole(by_name, f"{OPTIMIZER}{name}")


def stored_key(name: str) -> tuple[str, tuple[int, ...]]:
    """Where a parameter of these models is in a torch_dist checkpoint: its key, and indices of layer and expert."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found is None:
        return name, ()
    layer, rest = int(found[1]), found[2]
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    expert = re.search(r"local_experts\.(\d+)\.", rest)
    if expert is None:
        return f"decoder.layers.{rest}", (layer,)
    return f"decoder.layers.{rest.replace(expert[0], 'experts.')}", (layer, int(expert[1]))


def live_names(name: str) -> list[str]:
    """For all parameters. Known values of model weights are the first rank's, which has some experts only."""
    dumped = sample(name) / "param_to_param_group_map"
    keys = plain_metadata(dumped).state_dict_metadata if dumped.is_dir() else meta(name)["live_params"]
    return [key.removeprefix("module.module.") for key in keys]


def of_first_rank(weight: torch.Tensor, shape: list[int], gated: bool) -> torch.Tensor:
    """The first tensor-parallel rank's slice of a weight; for gated layers, of each half."""
    for dim, size in enumerate(shape):
        if weight.shape[dim] != size:
            halves = weight.chunk(2) if gated else (weight,)
            return torch.cat([half.narrow(dim, 0, size // len(halves)) for half in halves])
    return weight


@pytest.mark.parametrize("name", TORCH_DIST)
def test_weights_round_to_those_of_the_model(converted: dict[str, Path], name: str) -> None:
    tensors = plain_tensors(converted[name])
    live = meta(name)["live_params"]
    rounded = 0
    for key, known in live.items():
        weight = whole(tensors, key.replace("module.module.", "model.module."))
        assert weight.dtype == torch.float32
        part = of_first_rank(weight, known["shape"], "linear_fc1" in key)
        assert list(part.shape) == known["shape"] and sha256(part.bfloat16()) == known["sha256"], key
        rounded += not torch.equal(weight, weight.bfloat16().float())
    # They are the main weights and not the model's own.
    assert rounded == len(live) > 0
    names = live_names(name)
    stored = [key for key in tensors if key.startswith("model.")]
    assert len(stored) == len(names) + sum("linear_fc1.weight" in key for key in names)


@pytest.mark.parametrize("name", ["torch_dist_dp2", "torch_dist_dp2_main", "torch_dist_moe_ep2"])
def test_main_weights_and_optimizer_state_are_the_stored_ones(converted: dict[str, Path], name: str) -> None:
    source, tensors = plain_tensors(sample(name) / ITERATION), plain_tensors(converted[name])
    known = meta(name)["file_tensors"]
    for key, tensor in source.items():
        assert sha256(tensor) == known[key]["sha256"], key
    for live in live_names(name):
        key, index = stored_key(live)
        assert torch.equal(whole(tensors, f"model.module.{live}"), source[f"optimizer.state.param.{key}"][index]), live
        for kind in ("exp_avg", "exp_avg_sq"):
            expected = source[f"optimizer.state.{kind}.{key}"][index]
            assert torch.equal(state_of(tensors, live, kind), expected), live


def test_flat_buffers_are_read_at_known_offsets(converted: dict[str, Path]) -> None:
    name = "torch_dist_dp2_dp_reshardable"
    source, tensors = plain_tensors(sample(name) / ITERATION), plain_tensors(converted[name])
    offsets = {
        "output_layer.weight": 0,
        "decoder.final_layernorm.weight": 8192,
        "decoder.layers.1.mlp.linear_fc2.weight": 8256,
        "decoder.layers.1.mlp.linear_fc1.weight": 18496,
        "decoder.layers.1.pre_mlp_layernorm.weight": 38976,
        "decoder.layers.1.self_attention.linear_qkv.weight": 39040,
        "decoder.layers.1.self_attention.linear_proj.weight": 47232,
        "decoder.layers.1.input_layernorm.weight": 51328,
        "decoder.layers.0.mlp.linear_fc2.weight": 51392,
        "decoder.layers.0.mlp.linear_fc1.weight": 61632,
        "decoder.layers.0.pre_mlp_layernorm.weight": 82112,
        "decoder.layers.0.self_attention.linear_qkv.weight": 82176,
        "decoder.layers.0.self_attention.linear_proj.weight": 90368,
        "decoder.layers.0.input_layernorm.weight": 94464,
        "embedding.word_embeddings.weight": 94528,
    }
    assert sorted(offsets) == sorted(live_names(name))
    buffer = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    for live, start in offsets.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            found = state_of(tensors, live, kind)
            assert torch.equal(found.reshape(-1), source[f"{buffer}.{kind}"][start : start + found.numel()]), live
        found = whole(tensors, f"model.module.{live}")
        assert torch.equal(found.reshape(-1), source[f"{buffer}.param"][start : start + found.numel()]), live


def test_a_grid_of_tensor_parallel_shards_is_assembled(converted: dict[str, Path]) -> None:
    name = "torch_dist_tp2dp2_legacy_fsms_mcore013"
    source, tensors = plain_tensors(sample(name) / ITERATION), plain_tensors(converted[name])
    for live in live_names(name):
        key, index = stored_key(live)
        for kind in ("exp_avg", "exp_avg_sq"):
            grid = source[f"optimizer.state.{kind}.{key}"]
            found = state_of(tensors, live, kind)
            parts = grid[index] if index else grid
            if found.dim() == 1:
                expected = parts.reshape(-1)
            else:
                down, across, _ = parts.shape
                rows = [parts[i].reshape(across, found.shape[0] // down, -1) for i in range(down)]
                expected = torch.cat([torch.cat(list(row), dim=1) for row in rows])
            assert torch.equal(found, expected), (live, kind)


@pytest.mark.parametrize("name", TORCH_DIST)
def test_every_parameter_has_the_settings_of_its_group(converted: dict[str, Path], name: str) -> None:
    folder = sample(name)
    objects = plain_objects(converted[name])
    groups = listed_groups(folder / ITERATION)
    map_folder = folder / "param_to_param_group_map"
    if map_folder.is_dir():
        group_of = {key.removeprefix("module.module."): index for key, index in plain_objects(map_folder).items()}
    else:
        group_of = {live: int(live.endswith("norm.weight")) for live in live_names(name)}
    assert sorted(group_of) == sorted(live_names(name))
    keys = {key for key in objects if key.startswith(META)}
    for live, index in group_of.items():
        # FSDP has one optimizer, including experts; Megatron's FSDP writes and reads the same.
        expected = {"default_config": True, **groups[index], "is_expert_parallel": False}
        assert {field: objects[f"{META}{live}.{field}"] for field in expected} == expected, live
        keys -= {f"{META}{live}.{field}" for field in expected}
    assert not keys
    assert {groups[index]["step"] for index in group_of.values()} == {3}


def listed_groups(path: Path) -> list[dict[str, Any]]:
    optimizer = plain_common(path)["optimizer"]
    if "dp_reshardable" in str(optimizer):
        (held,) = plain_objects(path)["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"]
        return list(held["param_groups"])
    chain = [optimizer] if "optimizer" in optimizer else [optimizer[index] for index in sorted(optimizer)]
    return [group for part in chain for group in part["optimizer"]["param_groups"]]


@pytest.mark.parametrize("name", sorted(EQUAL_MODEL))
def test_a_strict_load_finds_every_key(converted: dict[str, Path], name: str) -> None:
    asked = plain_metadata(sample(EQUAL_MODEL[name]) / ITERATION)
    found = plain_metadata(converted[name])
    missing = set(asked.state_dict_metadata) - set(found.state_dict_metadata)
    assert not missing
    for key, entry in asked.state_dict_metadata.items():
        other = found.state_dict_metadata[key]
        assert getattr(entry, "size", None) == getattr(other, "size", None), key
        assert asked.planner_data[key] == found.planner_data[key], key
    extra = set(found.state_dict_metadata) - set(asked.state_dict_metadata)
    assert {key for key in extra if not key.startswith("rng_state.(0, 1)")} == {"torch_dist"}


@pytest.mark.parametrize("name", TORCH_DIST)
def test_common_and_random_states_are_kept(converted: dict[str, Path], name: str) -> None:
    path = sample(name) / ITERATION
    common, objects, tensors = plain_common(path), plain_objects(converted[name]), plain_tensors(converted[name])
    for key in ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far"):
        assert same(objects[key], common[key]), key
    for key, value in common["opt_param_scheduler"].items():
        assert same(objects[f"opt_param_scheduler.{key}"], value), key
    states = {key: value for key, value in plain_objects(path).items() if key.startswith("rng_state/")}
    assert len(states) == (2 if "tp2" in name else 1)
    for key, ((state,),) in states.items():
        rank = re.fullmatch(r"rng_state/shard_(\d)\.(\d)_.*", key)
        prefix = f"rng_state.({rank[1]}, {rank[2]}).0."
        trackers = {f"rng_tracker_states.{k}": v for k, v in state.pop("rng_tracker_states").items()}
        assert trackers
        for part, value in {**state, **trackers}.items():
            assert same((tensors | objects)[prefix + part], value), part


@pytest.mark.parametrize("name", TORCH_DIST)
def test_keys_are_full_names(converted: dict[str, Path], name: str) -> None:
    keys = set(plain_metadata(converted[name]).state_dict_metadata)
    assert not [key for key in keys if ".." in key]
    assert not [key for key in keys if key.endswith((".param", ".fp32_param")) or "dp_group_idx" in key]
    assert not [key for key in keys if key.startswith(META) and re.search(r"weight_[wv]\.", key)]
    assert not [
        key for key in keys if key.startswith(("model.", OPTIMIZER)) and re.search(r"linear_fc1\.weight\b", key)
    ]


@pytest.mark.parametrize("name", TORCH_DIST)
def test_the_tracker_file_names_the_checkpoint_and_no_file_says_torch_dist(
    converted: dict[str, Path], name: str
) -> None:
    assert (converted[name].parent / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(path.name for path in converted[name].parent.iterdir()) == [
        ITERATION,
        "latest_checkpointed_iteration.txt",
    ]
    names = {path.name for path in converted[name].iterdir()}
    assert not names & {"metadata.json", "common.pt"}
    assert json.loads((converted[name] / "checksums.json").read_text())["files"]


@pytest.mark.parametrize("name", FSDP_DTENSOR)
def test_formats_are_distinguished(name: str) -> None:
    state = read_state(sample(name) / ITERATION)
    assert state.torch_dist == {} and state.common["iteration"] == 3
