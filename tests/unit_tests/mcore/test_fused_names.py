"""Latent attention with a fused down projection, and layers that predict further tokens, in checkpoints.

They are stored as Megatron-Core stores them, so runs with and without the fusion load each other's checkpoints.
Checkpoints that store them fused, under the names in the model, still load.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tests.megatron_models as mm
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.matching import Rows
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.naming.keys import other_names
from tests.models import whole
from tests.ranks import RankPool

HIDDEN, QUERY, KEY_VALUE, ROPE = 4, 7, 5, 2
CONFIG = SimpleNamespace(
    multi_latent_attention=True,
    q_lora_rank=QUERY,
    kv_lora_rank=KEY_VALUE,
    qk_pos_emb_head_dim=ROPE,
    num_attention_heads=1,
    qk_head_dim=2,
    v_head_dim=2,
)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.config = CONFIG
        if fused:
            self.linear_qkv_down_proj = nn.Linear(HIDDEN, QUERY + KEY_VALUE + ROPE, bias=False)
            self.linear_qkv_down_proj.layer_norm_weight = nn.Parameter(torch.ones(HIDDEN))
        else:
            self.linear_q_down_proj = nn.Linear(HIDDEN, QUERY, bias=False)
            self.linear_kv_down_proj = nn.Linear(HIDDEN, KEY_VALUE + ROPE, bias=False)


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layer_number = 1
        self.self_attention = Attention(fused)
        if not fused:
            self.input_layernorm = nn.RMSNorm(HIDDEN)


class Predicting(nn.Module):
    def __init__(self, fused: bool, pattern: str | None) -> None:
        super().__init__()
        self.mtp_layer_pattern = pattern
        self.mtp_model_layer = Layer(fused)


class Model(nn.Module):
    """One decoder layer and two prediction layers, the last one that of a hybrid model."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.decoder, self.mtp = nn.Module(), nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(fused)])
        self.mtp.layers = nn.ModuleList([Predicting(fused, None), Predicting(fused, "M*")])

    # Megatron's schedule needs this attribute and method.
    model_type = 1

    def set_input_tensor(self, unused: Any) -> None:
        pass

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return sum((p * p).sum() for p in self.parameters()) + 0.0 * rows.sum()


PLACES = {
    "decoder.layers.0": "decoder.layers.0",
    "mtp.layers.0.mtp_model_layer": "mtp.layers.0.transformer_layer",
    "mtp.layers.1.mtp_model_layer": "mtp.layers.1.mtp_model_layer",
}
PARTS = {
    "self_attention.linear_q_down_proj.weight": slice(0, QUERY),
    "self_attention.linear_kv_down_proj.weight": slice(QUERY, None),
}


def _build(fused: bool, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = mm.wrapped("optim_grads_params", lambda config: Model(fused))
    for entry in model.module.engine.params():
        local_shard(entry.main).data.normal_()
    optimizer = mm.optimizer_of(model)
    mm.run_steps(model, optimizer, 1, 1, lambda module, rows: module(rows).reshape(1, 1))
    return model, optimizer


def _contents(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Full weights and moments, under the names of a model without the fusion."""
    found: dict[str, torch.Tensor] = {}
    for entry in model.module.engine.params():
        states = optimizer.optimizer.state[entry.main]
        for kind, value in {"": entry.main, ".exp_avg": states["exp_avg"], ".exp_avg_sq": states["exp_avg_sq"]}.items():
            tensor, name = whole(entry, value), bare_name(entry.name)
            place, _, rest = name.partition(".self_attention.linear_qkv_down_proj.")
            if rest == "weight":
                found |= {f"{place}.{part}{kind}": tensor[rows] for part, rows in PARTS.items()}
            else:
                found[f"{place}.input_layernorm.weight{kind}" if rest else f"{name}{kind}"] = tensor
    return found


def _save(folder: str, fused: bool) -> dict[str, torch.Tensor]:
    with mm.megatron():
        model, optimizer = _build(fused, seed=1)
        dcp.save(mm.checkpoint_state(model, optimizer, saving=True), checkpoint_id=folder)
        return _contents(model, optimizer)


def _as_before(folder: str) -> dict[str, torch.Tensor]:
    """Save as a run with the fusion used to: everything under the names in the model."""
    with mm.megatron():
        model, optimizer = _build(True, seed=1)
        state = dict(mm.checkpoint_state(model, optimizer, saving=True))
        del state["layouts"]
        own: dict[str, Any] = {"model": {}, "state": {}}
        for entry in model.module.engine.params():
            of_entry = optimizer.optimizer.state[entry.main]
            own["model"][f"module.{bare_name(entry.name)}"] = whole(entry, entry.main)
            key = f"module.module.{entry.name}"
            own["state"][key] = {k: v if k == "step" else whole(entry, v) for k, v in of_entry.items()}
        state |= {"model": own["model"], "optimizer": {**state["optimizer"], "state": own["state"]}}
        dcp.save(state, checkpoint_id=folder)
        return _contents(model, optimizer)


def _load(folder: str, fused: bool) -> dict[str, torch.Tensor]:
    with mm.megatron():
        model, optimizer = _build(fused, seed=2 + dist.get_rank())
        load(mm.checkpoint_state(model, optimizer, saving=False), Path(folder), other_names)
        return _contents(model, optimizer)


def test_both_models_store_the_same_keys(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(3, _save, str(tmp_path / "fused"), True)[0]
    ranks.run(3, _save, str(tmp_path / "apart"), False)
    keys = []
    for name in ("fused", "apart"):
        metadata = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
        keys.append({key for key in metadata if "param_to_group_meta" not in key})
        groups = {key for key in metadata if "param_to_group_meta" in key}
        # As in Megatron-Core, groups have the names in the model.
        assert any("mtp.layers.0.mtp_model_layer" in key for key in groups)
        assert any("linear_qkv_down_proj" in key for key in groups) == (name == "fused")
    assert keys[0] == keys[1]
    stored = {}
    for name, value in whole.items():
        place = next(place for place in PLACES if name.startswith(place))
        name = PLACES[place] + name.removeprefix(place)
        stored[f"optimizer.state.module.module.{name}" if ".exp_avg" in name else f"model.module.{name}"] = value
    found: dict[str, Any] = {key: torch.zeros_like(value) for key, value in stored.items()}
    dcp.load(found, checkpoint_id=tmp_path / "fused", no_dist=True)
    assert len(stored) == 27
    for key, value in stored.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("after", [True, False], ids=["into fused", "into apart"])
@pytest.mark.parametrize("before", ["fused", "apart", "fused, as once stored"])
def test_each_model_loads_checkpoints_of_the_other(ranks: RankPool, tmp_path: Path, before: str, after: bool) -> None:
    folder = str(tmp_path / "c")
    if before == "fused, as once stored":
        expected = ranks.run(3, _as_before, folder)[0]
    else:
        expected = ranks.run(3, _save, folder, before == "fused")[0]
    for found in ranks.run(2, _load, folder, after):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_other_names_combine() -> None:
    layer = "optimizer.state.module.module.mtp.layers.0."
    once = "optimizer.state.module.module.module.mtp.layers.0.mtp_model_layer.self_attention.linear_qkv_down_proj."
    assert f"{once}layer_norm_weight.exp_avg" in other_names(f"{layer}transformer_layer.input_layernorm.weight.exp_avg")
    key = f"{layer}transformer_layer.self_attention.linear_kv_down_proj.weight.exp_avg"
    parts = tuple(key.replace("linear_kv_down_proj", f"linear_{part}_down_proj") for part in ("q", "kv"))
    assert Rows(f"{once}weight.exp_avg", parts) in other_names(key)


def _narrower(folder: str) -> str:
    attention = "model.module.decoder.layers.0.self_attention."
    rows = {"linear_q_down_proj": QUERY - 1, "linear_kv_down_proj": KEY_VALUE + ROPE}
    wanted = {f"{attention}{name}.weight": torch.zeros(count, HIDDEN) for name, count in rows.items()}
    with pytest.raises(ValueError) as error:
        load(wanted, Path(folder), other_names)
    return str(error.value)


def test_another_q_lora_rank_raises(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _as_before, str(tmp_path))
    (message,) = ranks.run(1, _narrower, str(tmp_path))
    assert "expected (13, 4); the checkpoint has (14, 4)" in message
