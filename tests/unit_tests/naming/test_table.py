"""Every kind of fused parameter: its rows in a model, and the tensors that checkpoints store in its place."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fsdp.naming.table import HALVES, KINDS, Owner, kind_of

MIXER = SimpleNamespace(pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 2)))
GATED_DELTA = SimpleNamespace(
    in_proj_split_names=["query", "key", "value", "z", "beta", "alpha"],
    in_proj_split_sections=(2, 2, 3, 3, 1, 1),
    qk_dim_local_tp=2,
    v_dim_local_tp=3,
    tp_size=2,
)


@pytest.mark.parametrize(
    ("name", "module", "sizes", "expected"),
    [
        ("mixer.in_proj.weight", MIXER, [3, 3, 2, 2, 1], {"z": 6, "x": 6, "B": 4, "C": 4, "dt": 2}),
        ("mixer.conv1d_bias", MIXER, [3, 2, 2], {"x": 6, "B": 4, "C": 4}),
        (
            "self_attention.in_proj.weight",
            GATED_DELTA,
            None,
            {"query": 4, "key": 4, "value": 6, "z": 6, "beta": 2, "alpha": 2},
        ),
        ("self_attention.conv1d.weight", GATED_DELTA, None, {"query": 4, "key": 4, "value": 6}),
    ],
)
def test_tensor_parallel_ranks_have_a_shard_of_each_section(
    name: str, module: Any, sizes: list[int] | None, expected: dict[str, int]
) -> None:
    kind = kind_of(f"decoder.layers.0.{name}")
    parameter = SimpleNamespace() if sizes is None else SimpleNamespace(partition_sizes=sizes)
    assert kind is not None and kind.spread
    layout = kind.layout(Owner(module, False, parameter, sum(expected.values())))
    assert layout is not None and dict(layout.sections) == expected and layout.spread and not layout.apart
    assert kind.layout(Owner(module, False, parameter, 1)) is None, "a different number of rows"
    assert kind.layout(Owner(SimpleNamespace(), False, SimpleNamespace(), sum(expected.values()))) is None


STORED = {
    "decoder.layers.0.mlp.linear_fc1.weight": ("linear_fc1.weight_w", "linear_fc1.weight_v"),
    "decoder.layers.0.mlp.experts.linear_fc1.bias7": ("linear_fc1.bias7_w", "linear_fc1.bias7_v"),
    "decoder.layers.0.mixer.conv1d_weight": ("conv1d.weight.x", "conv1d.weight.B", "conv1d.weight.C"),
    "decoder.layers.0.self_attention.linear_qkv_down_proj.weight": (
        "linear_q_down_proj.weight",
        "linear_kv_down_proj.weight",
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_names_and_back(name: str) -> None:
    kind = kind_of(name)
    assert kind is not None
    parts = kind.fsdp_dtensor or kind.torch_dist
    names = [part.of(name) for part in parts]
    assert all(stored.endswith(ending) for stored, ending in zip(names, STORED[name], strict=True))
    assert {part.full_name(stored) for part, stored in zip(parts, names, strict=True)} == {name}


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.linear_fc2.weight", "projection.linear_fc1.weight", "decoder.layers.0.mixer.A_log"]
)
def test_other_parameters_are_of_no_kind(name: str) -> None:
    assert kind_of(name) is None


def test_no_two_kinds_of_one_name() -> None:
    names = [
        f"decoder.layers.0.{owner}{word}"
        for owner in ("mlp.", "mlp.shared_experts.", "mlp.experts.local_experts.3.", "self_attention.", "mixer.")
        for word in ("linear_fc1.weight", "linear_qkv.bias", "linear_q_proj.weight", "linear_kv_up_proj.weight")
    ]
    for name in names:
        assert len([kind for kind in KINDS if kind.pattern.fullmatch(name)]) <= 1


@pytest.mark.parametrize("layer", ["linear_fc1", "linear_fc1.to_wrap", "linear_fc1.adapter.linear_out"])
def test_adapters_of_gated_layers_have_the_layers_rows(layer: str) -> None:
    assert kind_of(f"decoder.layers.0.mlp.{layer}.weight") is HALVES
    assert kind_of("decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight") is None
