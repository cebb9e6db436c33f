"""State for an fsdp_dtensor checkpoint: fused projections are split, shards described, and nothing is sent."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import tests.megatron_models as mm
from megatron.fsdp.api.uneven_dtensor import narrow_rows
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.models import whole
from tests.ranks import RankFailure, RankPool

LLAMA = {"gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm"}


def _trained(strategy: str, changes: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    model = mm.wrapped(strategy, **changes)
    optimizer = mm.optimizer_of(model)
    mm.run_steps(model, optimizer, 1, 1)
    return model, optimizer


def _save(folder: str, strategy: str, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    with mm.megatron():
        model, optimizer = _trained(strategy, changes)
        state = mm.checkpoint_state(model, optimizer)
        dcp.save(state, checkpoint_id=folder)
        saved = {}
        for entry in model.module.engine.params():
            key = f"module.{entry.name.removeprefix('module.')}"
            saved[f"model.{key}"] = whole(entry, entry.main)
            for kind in ("exp_avg", "exp_avg_sq"):
                name = f"optimizer.state.module.module.{entry.name}.{kind}"
                saved[name] = whole(entry, optimizer.optimizer.state[entry.main][kind])
        return saved


def _expected_on_disk(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys and values of the format: gate and up of every fused projection apart."""
    expected = {}
    for key, value in whole.items():
        name, _, kind = key.rpartition(".exp_avg")
        base, suffix = (name, ".exp_avg" + kind) if name else (key, "")
        if base.endswith("mlp.linear_fc1.weight"):
            half = value.shape[0] // 2
            expected[f"{base}_w{suffix}"], expected[f"{base}_v{suffix}"] = value[:half], value[half:]
        else:
            expected[key] = value
    return expected


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("changes", [LLAMA, {**LLAMA, "bf16": True}], ids=["fp32", "bf16"])
def test_what_is_on_disk(ranks: RankPool, strategy: str, changes: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        whole = ranks.run(3, _save, folder, strategy, changes)[0]
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        expected = _expected_on_disk(whole)
        tensors = {
            key: value for key, value in metadata.items() if hasattr(value, "size") and not key.endswith(".step")
        }
        assert set(tensors) == set(expected)
        assert sum("_w" in key for key in expected) == 6  # two layers: weights and two moments
        loaded: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        for key, value in expected.items():
            assert torch.equal(loaded[key], value), key
        assert not list(Path(folder).glob("*.json")), "a metadata.json would make Megatron take it for torch_dist"


def _load(folder: str, strategy: str, changes: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    with mm.megatron():
        model, optimizer = _trained(strategy, changes)
        for entry in model.module.engine.params():
            local_shard(entry.main).data.zero_()
        state = mm.checkpoint_state(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        compared = 0
        for entry in model.module.engine.params():
            key = f"model.module.{entry.name.removeprefix('module.')}"
            assert torch.equal(whole(entry, entry.main), expected[key]), key
            compared += 1
        assert compared == len(expected) // 3


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 3)])
def test_loading_in_place_on_other_ranks(ranks: RankPool, before: int, after: int) -> None:
    with TemporaryDirectory() as folder:
        whole = ranks.run(before, _save, folder, "optim_grads_params", LLAMA)[0]
        ranks.run(after, _load, folder, "optim_grads_params", LLAMA, whole)


def _halves_are_views_and_cover_the_whole() -> int:
    with mm.megatron():
        model, optimizer = _trained("optim_grads_params", LLAMA)
        before = dist.group.WORLD._get_sequence_number_for_group()
        state = mm.checkpoint_state(model, optimizer)
        assert dist.group.WORLD._get_sequence_number_for_group() == before, "preparing a checkpoint communicated"
        rows = 0
        for entry in model.module.engine.params():
            if not entry.name.endswith("linear_fc1.weight"):
                continue
            for suffix in ("_w", "_v"):
                half = state["model"][f"module.{entry.name}{suffix}"]
                assert isinstance(half, DTensor) and half.shape[0] * 2 == entry.main.shape[0]
                local = local_shard(half)
                rows += len(local)
                if len(local):
                    assert local.untyped_storage().data_ptr() == local_shard(entry.main).untyped_storage().data_ptr()
                    (chunk,) = half.__create_chunk_list__()
                    assert chunk.sizes == local.shape
        return rows


def test_halves_share_the_weights_memory(ranks: RankPool) -> None:
    assert sum(ranks.run(3, _halves_are_views_and_cover_the_whole)) == 2 * 72


def _not_gated() -> list[str]:
    with mm.megatron():
        model, optimizer = _trained("optim_grads_params", {})
        return [key for key in mm.checkpoint_state(model, optimizer)["model"] if "linear_fc1" in key]


def test_layers_without_a_gate_are_not_split(ranks: RankPool) -> None:
    (keys,) = ranks.run(1, _not_gated)
    assert keys and not any(key.endswith(("_w", "_v")) for key in keys)


# Layers whose parameters are split or named in different ways.
KINDS: dict[str, dict[str, Any]] = {
    "gated": {"gated_linear_unit": True},
    "gated, rows that do not divide": {"gated_linear_unit": True, "hidden_size": 21},
    "grouped queries": {"num_query_groups": 2, "num_attention_heads": 4, "add_qkv_bias": True, "qk_layernorm": True},
    "experts": {"gated_linear_unit": True, "num_moe_experts": 2, "moe_shared_expert_intermediate_size": 12},
    "experts without a gate": {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 12},
    "experts with tensor parallelism": {
        "gated_linear_unit": True,
        "num_moe_experts": 2,
        "moe_ffn_hidden_size": 12,
        "add_bias_linear": False,
    },
}


def _saved_and_loaded(folder: str, kind: str) -> list[str]:
    """Parameters with biases whose weights or moments a checkpoint does not bring back, on tensor-parallel ranks."""
    changes: dict[str, Any] = {"num_attention_heads": 2, "kv_channels": 10, **KINDS[kind]}
    of_experts = {"expert_tensor_parallel_size": 2 if kind.endswith("parallelism") else 1}
    with mm.megatron(tensor_model_parallel_size=2, **of_experts):
        model = mm.wrapped(
            "optim_grads_params",
            lambda c: mm.gpt(c, vocabulary=30),
            tensor_model_parallel_size=2,
            sequence_parallel="num_moe_experts" in changes,
            **of_experts,
            **changes,
        )
        optimizer = mm.optimizer_of(model)
        mm.run_steps(model, optimizer, 1, 1)
        save(mm.checkpoint_state(model, optimizer), folder)
        states: dict[Any, Any] = {}
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            states |= each.optimizer.state
        kept = {}
        for entry in model.module.engine.params():
            tensors = {"": entry.main, **{k: v for k, v in states[entry.main].items() if k.startswith("exp_avg")}}
            assert len(tensors) == 3
            for name, tensor in tensors.items():
                kept[f"{entry.name} {name}"] = local_shard(tensor).clone(), local_shard(tensor).detach()
                kept[f"{entry.name} {name}"][1].zero_()
        dcp.load(mm.checkpoint_state(model, optimizer), checkpoint_id=folder)
        return [name for name, (before, after) in kept.items() if not torch.equal(before, after)]


@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_tensor_parallel_layers_are_saved(ranks: RankPool, kind: str) -> None:
    with TemporaryDirectory() as folder:
        assert ranks.run(4, _saved_and_loaded, folder, kind) == [[]] * 4
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        sizes = {key: tuple(value.size) for key, value in metadata.items() if hasattr(value, "size")}
        halves = [key for key in sizes if "mlp.linear_fc1.bias" in key and not key.endswith(".step")]
        if kind.startswith("gated"):
            assert len(halves) == 12 and {sizes[key] for key in halves} == {(36,)}, "of two layers, with moments"


def _save_nothing_of_a_tensor(folder: str) -> None:
    with mm.megatron():
        model, optimizer = _trained("optim_grads_params", LLAMA)
        state = mm.checkpoint_state(model, optimizer)
        main = next(iter(model.module.engine.params())).main
        save({**state, "lost": narrow_rows(main, 0, 0, (4, main.shape[1]))}, folder)


def test_a_tensor_without_shards_is_not_lost_in_silence(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"lost: expected shards of a tensor of shape \(4, 20\); no rank has any"):
        ranks.run(2, _save_nothing_of_a_tensor, str(tmp_path))
