"""The doctor's estimate from shapes equals the memory of the engine."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.estimate import AxisSizes, Estimate, estimate_outline, outline
from megatron.fsdp.tools.examine import first_layers
from megatron.fsdp.tools.predict.ghosts import Cost
from megatron.fsdp.tools.predict.machine import cluster_of
from megatron.fsdp.tools.predict.record import Change, Recorder
from megatron.fsdp.tools.recipes import FP8, NVFP4, Recipe, plan, recipe_of
from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.exchanges import seen
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, batches, device, loss_of
from tests.quantized_models import KINDS, quantized_model, sharded_model
from tests.ranks import on_ranks


def estimate(model: nn.Module, classes: tuple[type[nn.Module], ...], config: FSDPConfig, *rest: Any) -> Estimate:
    return estimate_outline(outline(model, classes, config), config, *rest)


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_estimated_bytes_equal_those_of_the_engine(strategy: str, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = TinyModel().to(device(), dtype)
    config = FSDPConfig(zero_dp_strategy=strategy, mixed_precision_policy=policy)
    found = estimate(copy.deepcopy(model).to("meta"), (Block,), config, AxisSizes(3), AxisSizes(3))
    sharded = fully_shard_model(
        model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, mixed_precision_policy=policy
    )
    total = found.total
    assert total.elements + total.padding == sum(group.layout.numel for group in sharded.engine.groups)
    assert [unit.name for unit in found.units] == sharded.engine.unit_names
    assert found.kinds == {"Block": len(sharded.engine.unit_names) - 1}
    kept = [
        group.weights.compute.flat.untyped_storage() for group in sharded.engine.groups if not group.weights.temporary
    ]
    assert total.compute == sum(storage.nbytes() for storage in kept)
    apart = [group.weights.main for group in sharded.engine.groups if group.weights.main_is_apart]
    assert total.main == sum(main.nbytes for main in apart)
    assert total.optimizer == 2 * sum(group.weights.main.numel() * 4 for group in sharded.engine.groups)
    assert found.peak(config) > total.resting


def test_one_layer_stands_for_equal_ones() -> None:
    """Megatron builds it once, with the number of the last, and its bytes count as often as it occurs."""
    built: list[str] = []

    def build(spec: str, **kwargs: Any) -> Any:
        built.append(spec)
        return SimpleNamespace(**kwargs)

    build_layer, given = first_layers(lambda: 2), {"config": None, "vp_stage": None}
    layers = [build_layer(build, spec, **given, layer_number=n) for n, spec in enumerate("aaabaaaa", 1)]
    numbers = [each.layer_number for each in (layers[0], *layers[2:5], layers[7])]
    assert built == list("aabaa") and numbers == [1, 3, 4, 5, 8]
    config, one = FSDPConfig(), AxisSizes(1)
    model, whole = TinyModel(depth=1), TinyModel(depth=3)
    shapes = outline(model, (Block,), config, {model.blocks[0]: 3}), outline(whole, (Block,), config)
    repeated, expected = (estimate_outline(each, config, one, one) for each in shapes)
    assert repeated.total == expected.total and repeated.peak(config) == expected.peak(config)
    assert repeated.kinds == expected.kinds == {"Block": 3}


def test_muon_has_one_moment_of_each_matrix_that_megatron_gives_it() -> None:
    model = TinyModel()
    model.embedding.weight.is_embedding_or_output_parameter = True
    config, one = FSDPConfig(mixed_precision_policy=FP32_GRADS), AxisSizes(1)
    adam, muon = (estimate(model, (Block,), config, one, one, muon).total.optimizer for muon in (False, True))
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
    # Padding is counted for both in proportion.
    assert adam - muon == pytest.approx(4 * sum(matrix.numel() for matrix in matrices), rel=0.03)


# Quantized weights ------------------------------------------------------------------------------------------------


def test_offloaded_units_are_counted_as_host_memory() -> None:
    axes, all_here = AxisSizes(4), FSDPConfig(mixed_precision_policy=FP32_GRADS)
    model = TinyModel().to(torch.bfloat16)
    here = estimate(model, (Block,), all_here, axes, axes).total
    for fraction in (0.0, 0.5, 1.0):
        config = replace(all_here, offload_optimizer=True, offload_fraction=fraction)
        found = estimate(model, (Block,), config, axes, axes)
        assert found.total.host + found.total.main + found.total.optimizer == here.main + here.optimizer
        assert found.total.resting == here.resting - found.total.host
        assert {bool(unit.bytes.host) for unit in found.units} == {0.0: {False}, 0.5: {True, False}, 1.0: {True}}[
            fraction
        ]
    # Weights that lie in the compute weights on the device have memory of their own on the host.
    shared = FSDPConfig(zero_dp_strategy="optim", offload_optimizer=True)
    found = estimate(TinyModel(), (Block,), shared, axes, axes)
    assert found.total.host == 3 * 4 * sum(unit.bytes.elements + unit.bytes.padding for unit in found.units) // 4


def _kept(group: ParameterGroup) -> int:
    """Bytes of a group's compute weights that have memory now."""
    found = [tensor for plane in group.weights.planes for tensor in (plane.buffer.flat, plane.shard)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in found if tensor is not None}
    return sum(storage.nbytes() for storage in storages.values())


def _check_units(model: MegatronFSDP, found: Estimate) -> None:
    """Check the bytes of every unit while it computes, in forward and backward."""
    expected = {unit.name: unit.bytes for unit in found.units}
    units = {unit.name: unit for unit in model.engine.units}
    seen = []
    # The first backward does not know yet whether units are recomputed, and gathers what that would need.
    loss_of(model, batches(1, 1)[0, 0]).backward()

    def check(name: str, direction: str) -> None:
        # At rest, a rank has its shard; the unit that computes has the full planes of this pass as well.
        whole = getattr(expected[name], direction)
        assert sum(map(_kept, units[name].groups)) == expected[name].compute + whole
        assert sum(map(_kept, units[""].groups)) == expected[""].compute + expected[""].unsharded
        seen.append((name, direction))

    for name, module in model.module.named_modules():
        if isinstance(module, Block):
            module.down.register_forward_hook(lambda *_, name=name: check(name, "forward"))
            module.down.register_full_backward_hook(lambda *_, name=name: check(name, "backward"))
    loss_of(model, batches(1, 1)[0, 0]).backward()
    assert len(seen) == 2 * (len(expected) - 1)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["tensor", "32x32", "mx", "nvfp4"])
def test_estimated_bytes_of_quantized_weights(kind: str, format: str) -> None:
    """The estimate of a quantized model equals what a rank holds at rest, while a unit computes, and gathers."""
    axes = AxisSizes(2, 2) if kind in ("hsdp", "hybrid") else AxisSizes(4)
    strategy = kind if kind in STRATEGIES else "optim_grads_params"
    outer = "optim" if kind == "hybrid" else "no_shard"
    config = FSDPConfig(zero_dp_strategy=strategy, outer_dp_sharding_strategy=outer, mixed_precision_policy=FP32_GRADS)
    found = estimate(quantized_model(format, torch.bfloat16), (Block,), config, axes, axes)
    model, optimizer = sharded_model(kind, quantized_model(format, torch.bfloat16), mixed_precision_policy=FP32_GRADS)
    engine = model.engine
    assert sum(map(_kept, engine.groups)) == found.total.compute
    assert sum(group.weights.main.nbytes for group in engine.groups) == found.total.main
    _check_units(model, found)
    optimizer.step()
    optimizer.zero_grad()
    with seen("all_gather") as gathers:
        loss_of(model, batches(1, 1)[0, 0]).backward()
        model.synchronize_gradient_reduce()
    # The last unit of forward stays unsharded for backward, unless that reads other bytes.
    last = found.units[-1].bytes
    twice = last.backward if last.unsharded == last.forward else 0
    assert sum(output.nbytes for output, *_ in gathers) == found.total.gathered - twice
    assert sum(map(_kept, engine.groups)) == found.total.compute


# Bytes of a weight, in addition to those of bf16: at rest over all ranks, and in the passes.
RATES = {
    "delayed": (0.5, 0.5, 0.5),
    "tensorwise": (0.5, 0.5, 0.5),
    "blockwise": (0.5, 0.5, 0.5),
    "mxfp8": (1.0, 0.5, 0.5),
    "nvfp4": (0.25, 0.25, 0.25),
}


@pytest.mark.parametrize("name", RATES)
def test_planned_weights_are_counted_as_quantized(name: str) -> None:
    recipe = {**FP8, "nvfp4": NVFP4}[name]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    for parameter in model.parameters():
        plan(parameter, recipe)
    config = FSDPConfig(mixed_precision_policy=FP32_GRADS)
    found = estimate(model, (nn.Linear,), config, AxisSizes(4), AxisSizes(4)).total
    elements, scales = 2 * 256 * 512, 0
    if recipe.values_per_scale_byte:
        scales = elements // recipe.values_per_scale_byte
    shards, forward, backward = (round(2 * elements * rate) for rate in RATES[name])
    assert (found.padding, found.elements, found.main) == (0, elements, elements)
    assert (found.compute, found.forward, found.backward) == (shards // 4 + scales, forward, backward)
    assert found.gathered == forward + backward and found.unsharded == shards
    assert found.produced == 2 * elements
    transposed = 0 if name == "mxfp8" else forward + scales
    assert found.derived == transposed
    kept = estimate(model, (nn.Linear,), replace(config, keep_fp8_transpose_cache=True), AxisSizes(4), AxisSizes(4))
    assert (kept.total.compute, kept.total.derived) == (found.compute + transposed, 0)


def test_weights_of_odd_shapes_are_planned_as_they_are() -> None:
    parameter = nn.Linear(40, 32).weight
    plan(parameter, FP8["mxfp8"])
    assert type(parameter) is nn.Parameter


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"fp8": "hybrid"}, None),
        ({"fp8": "hybrid", "fp8_param_gather": True}, FP8["delayed"]),
        ({"fp8": "e4m3", "fp8_param_gather": True, "fp8_recipe": "mxfp8"}, FP8["mxfp8"]),
        ({"fp8": "e4m3", "fp8_param_gather": True, "fp8_recipe": "custom"}, None),
        ({"fp4": "e2m1", "fp4_param_gather": True}, NVFP4),
    ],
)
def test_the_recipe_follows_from_the_settings(settings: dict[str, Any], expected: Recipe | None) -> None:
    off = {"fp8": None, "fp8_param_gather": False, "fp4": None, "fp4_param_gather": False}
    assert recipe_of(SimpleNamespace(**{**off, "fp8_recipe": "delayed", "fp4_recipe": "nvfp4", **settings})) is expected


class _Linear(torch.autograd.Function):
    """Keeps its input and its weight, as Megatron's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())


def test_a_linear_layer_in_8_bits() -> None:
    """Its matmuls do, what it keeps of its input does, and casts take time. Other matmuls do not."""
    recorder, weight = Recorder("nccl", True), nn.Parameter(torch.zeros(512, 256, dtype=torch.bfloat16))
    x = torch.zeros(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    with recorder.active():
        with recorder.quantized("float8", weight, x):
            result: Any = _Linear.apply(x, weight)
        saved, own = result.grad_fn.saved_tensors
        assert (saved.shape, saved.dtype) == (x.shape, x.dtype) and own.data_ptr() == weight.data_ptr()
        result @ result.T
    costs = [entry for entry in recorder.program if isinstance(entry, Cost)]
    assert [(cost.name, cost.dtype) for cost in costs] == [*(("cast", "float8"), ("mm", "float8"), ("mm", "bfloat16"))]
    assert costs[0].bytes == (2 + 1 + 1) * 1024 * 256
    device = cluster_of("h100").device
    slow, fast = (device.seconds(costs[1]._replace(dtype=dtype, bytes=0)) for dtype in ("bfloat16", "float8"))
    reached = device.efficiency["matmul float8"] / device.efficiency["matmul"]
    assert slow - device.launch == pytest.approx(2 * reached * (fast - device.launch)) and 0.8 < reached < 1
    changes = [entry for entry in recorder.program if isinstance(entry, Change)]
    assert {change.bytes for change in changes[:2]} == {2 * 1024 * 512, 1024 * 256}  # the result, and what is kept
    assert all(abs(change.bytes) != 2 * 1024 * 256 for change in changes)
