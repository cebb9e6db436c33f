"""Every format of quantized weights through the engine: bytes, training, recomputation, resuming, what is gathered."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.exchanges import seen
from tests.models import batches
from tests.quantized_models import (
    FORMATS,
    IN_BLOCKS,
    KINDS,
    Reference,
    arguments,
    quantized_model,
    recompute,
    sharded_model,
    train,
)
from tests.ranks import RankPool

STEPS = 20
# More ranks than blocks of some weights, so that shards are empty.
SHAPES = [(64, 96), (32, 32), (160, 32), (96, 64), (32, 160), (0, 32)]


# Quantizing -------------------------------------------------------------------------------------------------------


def _values() -> list[torch.Tensor]:
    torch.manual_seed(7)
    values = [torch.randn(shape) for shape in SHAPES]
    values[0][40] *= 100  # the largest value is on one rank only
    values[2][::3] = 0
    return values


def _quantizes(format: str, kind: str) -> None:
    model = nn.Module()
    for i, value in enumerate(_values()):
        model.register_parameter(f"w{i}", nn.Parameter(FORMATS[format](value, keep_initial=True)))

    def forward(direction: Direction) -> list[Any]:
        weights: list[Any] = list(model.parameters())
        for weight in weights:
            weight.stored_as.before_use([weight], direction)
        read = [
            [
                plane.clone()
                for plane, of in zip(w.planes, w.stored_as.planes, strict=True)
                if direction in of.directions
            ]
            for w in weights
        ]
        return [(bytes, w.dequantize(direction).clone()) for bytes, w in zip(read, weights, strict=True)]

    model.forward = forward
    expected = forward(Direction.FORWARD)
    found = fully_shard_model(model, fsdp_unit_modules=[], **arguments(kind))(Direction.FORWARD)
    for shape, (bytes, value), (bytes_of_whole, whole) in zip(SHAPES, found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(bytes, bytes_of_whole, strict=True)), shape
        assert torch.equal(value, whole), shape


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("format", IN_BLOCKS)
def test_shards_are_quantized_like_the_whole(ranks: RankPool, format: str, size: int) -> None:
    ranks.run(size, _quantizes, format, "optim_grads_params")


# Training ---------------------------------------------------------------------------------------------------------


def _trains(kind: str, format: str, steps: int, dtype: torch.dtype, recomputes: bool, more: dict) -> None:
    data = batches(steps, dist.get_world_size())
    reference = Reference(quantized_model(format, dtype))
    expected = [reference.step(step)[dist.get_rank()] for step in data]
    model = quantized_model(format, dtype)
    model, optimizer = sharded_model(kind, recompute(model, "unit" if recomputes else ""), **more)
    assert train(model, optimizer, data) == expected
    assert expected[-1] < expected[0] - 0.1 or steps < STEPS
    assert inconsistent_weights(model.engine) == []


def _ranks_of(kind: str) -> int:
    return 4 if kind in ("hsdp", "hybrid") else 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["mx", "nvfp4"])
def test_every_strategy_trains_as_unsharded(ranks: RankPool, format: str, kind: str) -> None:
    ranks.run(_ranks_of(kind), _trains, kind, format, STEPS, torch.float32, False, {})


@pytest.mark.parametrize("format", ["32x32", "1x32", "nvfp4 1x16"])
def test_formats_train_as_unsharded(ranks: RankPool, format: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", format, STEPS, torch.float32, False, {})


VARIANTS: dict[str, tuple[torch.dtype, dict]] = {
    "bf16": (torch.bfloat16, {"mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.float32)}),
    "double buffer": (torch.float32, {"fsdp_double_buffer": True}),
    "no prefetch": (torch.float32, {"overlap_param_gather": False}),
    "modules": (torch.float32, {"enable_fine_grained_param_gather": True}),
    "elements": (torch.float32, {"shard_granularity": "element"}),
    "offload": (torch.float32, {"offload_optimizer": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["mx", "nvfp4"])
def test_variants_train_as_unsharded(ranks: RankPool, format: str, variant: str) -> None:
    dtype, more = VARIANTS[variant]
    ranks.run(2, _trains, "optim_grads_params", format, 6, dtype, False, more)


@pytest.mark.parametrize("format", FORMATS)
def test_recomputes(ranks: RankPool, format: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", format, 6, torch.float32, True, {})


class _Product(torch.autograd.Function):
    """A linear layer in the way of Megatron-Core's: backward multiplies by the saved weight itself."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return torch.matmul(input, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input, weight = ctx.saved_tensors
        return grad.matmul(weight), grad.flatten(0, -2).t().matmul(input.flatten(0, -2))


def _products(recomputes: bool) -> None:
    data, losses = batches(6, dist.get_world_size(), vocabulary=64), []
    for own in (False, True):
        model = quantized_model("mx")
        for block in model.blocks if own else ():
            block.down.forward = functools.partial(_apply, block.down)
        losses.append(train(*sharded_model("optim_grads_params", recompute(model, "unit" if recomputes else "")), data))
    assert losses[0] == losses[1]


def _apply(layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    return _Product.apply(input, layer.weight)


@pytest.mark.parametrize("recomputes", [False, True])
def test_products_of_other_functions_read_the_planes_of_their_pass(ranks: RankPool, recomputes: bool) -> None:
    ranks.run(2, _products, recomputes)


def _from_meta(format: str) -> None:
    with torch.device("meta"):
        model = quantized_model(format)
    model, optimizer = sharded_model("optim_grads_params", model, init_model_with_meta_device=True)
    values = {name: value.full_tensor() for name, value in model.state_dict().items()}
    other, other_optimizer = sharded_model("optim_grads_params", quantized_model(format))
    other.load_state_dict(values)
    data = batches(4, dist.get_world_size())
    assert train(model, optimizer, data) == train(other, other_optimizer, data)


@pytest.mark.parametrize("format", FORMATS)
def test_from_the_meta_device(ranks: RankPool, format: str) -> None:
    ranks.run(2, _from_meta, format)


# Checkpoints ------------------------------------------------------------------------------------------------------


def _data() -> torch.Tensor:
    """The same micro-batch on every rank: with a power of 2 of ranks, the mean of gradients is exact."""
    return batches(6, 1).expand(-1, dist.get_world_size(), -1, -1)


def _save(folder: str, format: str) -> list[float]:
    model, optimizer = sharded_model("optim_grads_params", quantized_model(format))
    train(model, optimizer, _data()[:3])
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    reference = Reference(quantized_model(format))
    for step in _data()[:3]:
        reference.step(step[:1])
    # Delayed scaling starts anew with the loaded weights. No other format has more to lose than main weights.
    if format == "delayed":
        reference.forget()
        reference.quantize()
        return [reference.step(step[:1])[0] for step in _data()[3:]]
    return train(model, optimizer, _data()[3:])


def _resume(folder: str, kind: str, format: str) -> list[float]:
    model, optimizer = sharded_model(kind, quantized_model(format, keep_initial=False))
    if format != "delayed":
        train(model, optimizer, _data()[4:5])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, _data()[3:])


@pytest.mark.parametrize("format", FORMATS)
def test_resumes_exactly_on_other_numbers_of_ranks(ranks: RankPool, format: str, tmp_path: Path) -> None:
    expected = ranks.run(2, _save, str(tmp_path), format)[0]
    for size, kind in ((1, "optim_grads_params"), (4, "hybrid")):
        assert ranks.run(size, _resume, str(tmp_path), kind, format) == [expected] * size, kind


# Bytes ------------------------------------------------------------------------------------------------------------


# Bytes per value in bf16's share. "32x32" has four bytes of scale for 1024 values.
SHARES = {"tensor": 0.5, "32x32": 0.502, "mx": 0.516, "nvfp4": 0.281}


def _gathers(format: str) -> None:
    model = quantized_model(format, torch.bfloat16)
    model.head.weight = nn.Parameter(torch.zeros(model.head.weight.shape, dtype=torch.bfloat16))
    elements = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)
    sharded, optimizer = sharded_model("optim_grads_params", model)
    data = batches(2, dist.get_world_size())
    train(sharded, optimizer, data[:1])
    with seen("all_gather") as gathers:
        train(sharded, optimizer, data[1:])
    sent = [output for output, *_ in gathers]
    quantized = sum(tensor.nbytes for tensor in sent if tensor.dtype == torch.uint8)
    # The last of three blocks stays unsharded between forward and backward if these read the same bytes.
    uses = 6 if format == "mx" else 5
    assert quantized / (2 * elements * uses) == pytest.approx(SHARES[format], abs=0.01 if format == "tensor" else 5e-4)
    groups = [group for unit in sharded.engine.units[1:] for group in unit.groups if group.storage is not None]
    at_rest = sum(plane.resident.nbytes for group in groups for plane in group.weights.planes)
    copies = 2 if format == "mx" else 1
    assert at_rest / (2 * 3 * elements / dist.get_world_size()) == pytest.approx(copies * SHARES[format], rel=0.02)


@pytest.mark.parametrize("format", SHARES)
def test_bytes_gathered_and_at_rest(ranks: RankPool, format: str) -> None:
    ranks.run(2, _gathers, format)
