"""Names in a checkpoint are those of the whole model, and values are found under the names of other runs."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron.core import parallel_state
from megatron.fsdp.checkpoint.matching import Reaction
from megatron.fsdp.mcore.checkpoint_state import Names
from megatron.fsdp.mcore.load import strictness_of
from megatron.fsdp.mcore.parameter_names import global_name
from megatron.fsdp.naming.keys import other_names


class Layer(nn.Module):
    """A layer with all kinds of names: attention, separate experts, and experts in one module."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.self_attention = nn.Linear(1, 1)
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.local_experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.mlp.experts.linear_fc1 = nn.Module()
        for i in range(2):
            setattr(self.mlp.experts.linear_fc1, f"weight{i}", nn.Parameter(nn.Linear(1, 1).weight.detach()))
        self.mlp.router = nn.Linear(1, 1)


def _model() -> nn.Module:
    """The second of two pipeline stages, of a model with 4 layers."""
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([Layer(3), Layer(4)])
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([Layer(1)])
    model.output_layer = nn.Linear(1, 1)
    return model


NAMES = {
    "decoder.layers.0.self_attention.weight": "decoder.layers.2.self_attention.weight",
    "decoder.layers.1.mlp.router.weight": "decoder.layers.3.mlp.router.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.weight": "decoder.layers.3.mlp.experts.local_experts.7.weight",
    "decoder.layers.0.mlp.experts.linear_fc1.weight0": "decoder.layers.2.mlp.experts.linear_fc1.weight6",
    "mtp.layers.0.self_attention.weight": "mtp.layers.0.self_attention.weight",
    "output_layer.weight": "output_layer.weight",
    "not.there": "not.there",
}


@pytest.mark.parametrize("name", NAMES)
def test_global_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 3)
    assert global_name(_model(), name) == NAMES[name]


OTHERS = {
    "optimizer.state.module.module.a.weight.step": "optimizer.param_to_group_meta.module.module.a.weight.step",
    "optimizer.state.module.module.mlp.linear_fc1.weight_v.step": (
        "optimizer.param_to_group_meta.module.module.module.mlp.linear_fc1.weight.step"
    ),
    "optimizer.param_to_group_meta.module.module.mlp.linear_fc1.weight.step": (
        "optimizer.state.module.module.mlp.linear_fc1.weight_w.step"
    ),
    "rng_state.(1, 0).0.torch_rng_state": "rng_state.(0, 0).0.torch_rng_state",
    "model.module.decoder.layers.0.input_layernorm.weight": (
        "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    ),
    "model.module.decoder.layers.0.mlp.linear_fc1.layer_norm_bias": (
        "model.module.decoder.layers.0.pre_mlp_layernorm.bias"
    ),
    "model.module.decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight": (
        "model.module.decoder.layers.0.self_attention.q_layernorm.weight"
    ),
    "model.module.decoder.layers.0.self_attention.kv_layernorm.weight": (
        "model.module.decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"
    ),
    "model.module.decoder.layers.0.self_attention.in_proj.layer_norm_weight": (
        "model.module.decoder.layers.0.input_layernorm.weight"
    ),
    "model.module.decoder.layers.0.norm.weight": "model.module.decoder.layers.0.mixer.in_proj.layer_norm_weight",
    "model.module.mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": (
        "model.module.mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"
    ),
    "optimizer.state.module.module.module.a.weight.exp_avg": "optimizer.state.module.module.a.weight.exp_avg",
}


@pytest.mark.parametrize("key", OTHERS)
def test_other_names(key: str) -> None:
    found = other_names(key)
    assert OTHERS[key] in found and key not in found and len(found) == len(set(found))


STRICTNESS = {
    "assume_ok_unexpected": (Reaction.RAISE, Reaction.IGNORE),
    "log_unexpected": (Reaction.RAISE, Reaction.LOG),
    "log_all": (Reaction.LOG, Reaction.LOG),
    "raise_unexpected": (Reaction.RAISE, Reaction.RAISE),
    "raise_all": (Reaction.RAISE, Reaction.RAISE),
    "ignore_all": (Reaction.IGNORE, Reaction.IGNORE),
}


@pytest.mark.parametrize("chosen", STRICTNESS)
def test_strictness(chosen: str) -> None:
    found = strictness_of(SimpleNamespace(dist_ckpt_strictness=chosen))
    assert (found.missing, found.unexpected) == STRICTNESS[chosen]
    # A conversion stores these for other runs: for the way back, and for optimizers of either kind.
    assert found.extra("torch_dist") and found.extra("layouts.a.weight")
    assert found.extra("optimizer.param_to_group_meta.module.a.weight.step")
    assert not found.extra("optimizer.param_to_group_meta.module.a.weight.lr") and not found.extra("model.module.step")


@pytest.mark.parametrize(("strict", "expected"), [(True, False), (False, True)])
def test_lenient_loading_still_needs_weights(strict: bool, expected: bool) -> None:
    optional: Any = strictness_of(SimpleNamespace(strict_fsdp_dtensor_load=strict)).optional
    assert optional("optimizer.state.module.module.a.weight.exp_avg") is expected
    assert optional("rng_state.(0, 0).0.torch_rng_state") is expected
    assert not optional("model.module.a.weight")
    assert optional("optimizer.param_to_group_meta.module.module.a.weight.foreach"), "says how, not what"
    assert not strictness_of(None).optional("optimizer.param_to_group_meta.module.module.a.weight.lr")


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_experts_share_cannot_be_named_with_expert_parallelism(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: size)
    names = ["mlp.experts.linear_fc1.adapter.weight", "mlp.experts.local_experts.1.weight", "mlp.experts.fc1.weight0"]
    params = [
        SimpleNamespace(names=[f"decoder.layers.0.{name}"], key=SimpleNamespace(expert=True), shape=(1, 1))
        for name in names
    ]
    chunk: Any = SimpleNamespace(module=_model(), engine=SimpleNamespace(params=lambda: params))
    if size == 1:
        assert len(Names(chunk).params) == 3
        return
    with pytest.raises(NotImplementedError, match="linear_fc1.adapter.weight.*1 such parameters"):
        Names(chunk)
