"""Quantized compute weights of every format: sharded training equals unsharded training, bit by bit."""

import functools
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from megatron.fsdp.buffers import quantizing
from megatron.fsdp.buffers.parameter import TENSOR_PARALLEL
from megatron.fsdp.checkpoint.backend import Writer
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.exchanges import seen
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, batches, load_from, loss_of, save_to, without_collector
from tests.quantized_models import (
    ALL_FORMATS,
    KINDS,
    OF_TORCHAO,
    Reference,
    exact,
    quantized_model,
    ranks_of,
    recompute,
    sharded_model,
    train,
)
from tests.ranks import RankPool, on_ranks

STEPS = 20

# Quantizing -------------------------------------------------------------------------------------------------------


# Training ---------------------------------------------------------------------------------------------------------


def _expected(model: nn.Module, data: torch.Tensor, rank: int | None = None) -> list[float]:
    reference, rank = Reference(model), dist.get_rank() if rank is None else rank
    return [reference.step(step)[rank] for step in data]


def _trains(
    kind: str,
    format: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
    keep_initial: bool = True,
    recomputes: bool = False,
    **more: Any,
) -> None:
    data = batches(steps, dist.get_world_size())
    expected = _expected(quantized_model(format, dtype, keep_initial), data)
    model = recompute(quantized_model(format, dtype, keep_initial), "unit" if recomputes else "")
    model, optimizer = sharded_model(kind, model, **more)
    assert train(model, optimizer, data) == expected
    assert expected[-1] < expected[0] - 0.1 or steps < STEPS
    assert any(group.storage is not None for group in model.engine.groups)
    assert inconsistent_weights(model.engine) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["tensor", "mx", "nvfp4", *OF_TORCHAO])
def test_every_strategy_trains_as_unsharded(ranks: RankPool, format: str, kind: str) -> None:
    ranks.run(ranks_of(kind), _trains, kind, format, STEPS)


FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16, "mixed_precision_policy": FP32},
    "double buffer": {"fsdp_double_buffer": True},
    "no prefetch": {"overlap_param_gather": False},
    "modules": {"enable_fine_grained_param_gather": True},
    "elements": {"shard_granularity": "element"},
    "offload": {"offload_optimizer": True},
}


def _varies(format: str, variant: dict[str, Any]) -> None:
    _trains("optim_grads_params", format, 6, **variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["tensor", "mx", "nvfp4", *OF_TORCHAO])
def test_variants_train_as_unsharded(ranks: RankPool, format: str, variant: str) -> None:
    ranks.run(2, _varies, format, VARIANTS[variant])


def test_trains_from_dequantized_values(ranks: RankPool) -> None:
    ranks.run(2, _varies, "tensor", {"keep_initial": False})


# Training without recomputing is test_every_strategy_trains_as_unsharded.
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_recomputes(ranks: RankPool, format: str) -> None:
    ranks.run(2, _varies, format, {"recomputes": True})


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


def _apply(layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    return _Product.apply(input, layer.weight)


@on_ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
def test_products_of_other_functions_read_the_planes_of_their_pass(recomputes: bool) -> None:
    data, losses = batches(6, dist.get_world_size(), vocabulary=64), []
    for own in (False, True):
        model = quantized_model("mx")
        for block in model.blocks if own else ():
            block.down.forward = functools.partial(_apply, block.down)
        losses.append(train(*sharded_model("optim_grads_params", recompute(model, "unit" if recomputes else "")), data))
    assert losses[0] == losses[1]


@on_ranks(4)
def test_tensor_parallel_parameters() -> None:
    """Each tensor-parallel rank quantizes its part of a parameter on its own."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    data = batches(6, 2)
    expected = _expected(quantized_model(), data, mesh["dp"].get_local_rank())
    model = quantized_model()
    for parameter in (model.head.weight, model.blocks[0].up.weight):
        setattr(parameter, TENSOR_PARALLEL, (mesh["tp"], [Shard(0)]))
    optimizer = exact(model.parameters())
    model, optimizer = fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp"
    )
    assert train(model, optimizer, data, mesh["dp"].get_local_rank()) == expected


@on_ranks(2)
@pytest.mark.parametrize("format", ["tensor", "mx", *OF_TORCHAO])
def test_computes_in_another_dtype(format: str) -> None:
    """A float32 model that computes in bf16 trains as a bf16 model with the same main weights."""
    data, grads = batches(6, 2), torch.float32
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_grads_dtype=grads)
    model, optimizer = sharded_model("optim_grads_params", quantized_model(format), mixed_precision_policy=policy)
    other = quantized_model(format, torch.bfloat16)
    policy = MixedPrecisionPolicy(main_grads_dtype=grads)
    other, other_optimizer = sharded_model("optim_grads_params", other, mixed_precision_policy=policy)
    other.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    seen = set()
    model.module.head.register_forward_hook(lambda module, args, output: seen.add((module.weight.dtype, output.dtype)))
    assert train(model, optimizer, data) == train(other, other_optimizer, data)
    assert seen == {(torch.bfloat16, torch.bfloat16)}


def _from_meta(format: str, kind: str) -> None:
    """Modules initialize plain values, which main weights keep before they are quantized."""
    meta = {"init_model_with_meta_device": True}
    with torch.device("meta"):
        plain, model = quantized_model("", like=format), quantized_model(format)
    torch.manual_seed(11)
    plain, _ = sharded_model(kind, plain, **meta)
    values = {name: value.full_tensor() for name, value in plain.state_dict().items()}
    torch.manual_seed(11)
    model, optimizer = sharded_model(kind, model, **meta)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), values[name])
    other, other_optimizer = sharded_model(kind, quantized_model(format))
    other.load_state_dict(values)
    data = batches(4, dist.get_world_size())
    assert train(model, optimizer, data) == train(other, other_optimizer, data)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_from_the_meta_device(ranks: RankPool, format: str) -> None:
    ranks.run(2, _from_meta, format, "optim" if format == "tensor" else "optim_grads_params")


# When and how much ------------------------------------------------------------------------------------------------


def _counts(kind: str) -> None:
    """One all-reduce of scales per step and process group, although two micro-batches and an evaluation follow."""
    model, optimizer = sharded_model(kind, quantized_model())
    data = batches(3, dist.get_world_size())
    groups = 0 if kind == "no_shard" else 1
    for number, step in enumerate(data):
        with patch.object(quantizing, "all_reduce", wraps=quantizing.all_reduce) as reduced:
            with model.no_sync():
                loss_of(model, step[dist.get_rank()]).backward()
            loss_of(model, step[dist.get_rank()]).backward()
            with torch.no_grad():
                loss_of(model, step[0])
            optimizer.step()
            optimizer.zero_grad()
        # On a CPU at the end of a step; on a GPU before the next one.
        expected = 0 if DEVICE == "cuda" and number == 0 else groups
        assert len({call.args[2] for call in reduced.call_args_list}) == reduced.call_count == expected


@pytest.mark.parametrize("kind", KINDS)
def test_quantizes_once_per_step(ranks: RankPool, kind: str) -> None:
    ranks.run(ranks_of(kind), _counts, kind)


# Bytes per value in bf16's share. "32x32" has four bytes of scale for 1024 values.
SHARES = {"tensor": 0.5, **dict.fromkeys(OF_TORCHAO, 0.5), "32x32": 0.502, "mx": 0.516, "nvfp4": 0.281}


@on_ranks(2)
@pytest.mark.parametrize(("format", "kind"), [*((name, "optim_grads_params") for name in SHARES), ("tensor", "optim")])
def test_bytes_gathered_and_at_rest(format: str, kind: str) -> None:
    model = quantized_model(format, torch.bfloat16)
    model.head.weight = nn.Parameter(torch.zeros(model.head.weight.shape, dtype=torch.bfloat16))
    elements = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)
    sharded, optimizer = sharded_model(kind, model)
    data = batches(2, dist.get_world_size())
    train(sharded, optimizer, data[:1])
    with seen("all_gather") as gathers:
        train(sharded, optimizer, data[1:])
    sent = [output for output, *_ in gathers]
    quantized = sum(tensor.nbytes for tensor in sent if tensor.dtype == torch.uint8)
    # The last of three blocks stays unsharded between forward and backward if these read the same bytes.
    uses = 3 if kind == "optim" else 6 if format == "mx" else 5
    assert quantized / (2 * elements * uses) == pytest.approx(
        SHARES[format], abs=0.01 if SHARES[format] == 0.5 else 5e-4
    )
    groups = [group for unit in sharded.engine.units[1:] for group in unit.groups if group.storage is not None]
    planes = [plane for group in groups for plane in group.weights.planes]
    assert all(plane.is_resident for plane in planes)
    at_rest = sum((plane.buffer.flat if kind == "optim" else plane.shard).nbytes for plane in planes)
    copies = 2 if format == "mx" else 1
    shards = 1 if kind == "optim" else dist.get_world_size()
    assert at_rest / (2 * 3 * elements / shards) == pytest.approx(copies * SHARES[format], rel=0.02)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
def test_what_is_left_between_steps(kind: str) -> None:
    """Between steps, only this rank's bytes and scales are left, and a deleted model leaves nothing."""
    model, optimizer = sharded_model(kind, quantized_model())
    ready = []
    down = model.module.blocks[0].down
    down.register_forward_pre_hook(lambda module, args: ready.append(bool(module.weight.dequantized)))
    down.register_full_backward_hook(lambda module, *args: ready.append(bool(module.weight.dequantized)))
    train(model, optimizer, batches(2, dist.get_world_size()))
    assert ready == [True] * 4
    for unit in model.engine.units:
        for group in unit.groups:
            for param in group.params:
                if group.storage is not None:
                    assert not param.compute.dequantized and param.compute.initial is None
                    assert not vars(param.main).keys() & group.storage.fields
                    stored = param.compute.raw.untyped_storage()
                    assert stored._cdata == group.weights.compute.flat.untyped_storage()._cdata
                    assert stored.nbytes() == 0 or not group.weights.temporary
    weights = [group.weights for group in model.engine.groups]
    left = [weakref.ref(each) for of in weights for each in (of.main, of.planes[0].shard)]
    with without_collector():
        del model, optimizer, unit, group, param, stored, down, weights
        assert not any(reference() is not None for reference in left)


@on_ranks(2)
def test_other_models_are_as_before() -> None:
    with patch.object(quantizing, "all_reduce", side_effect=AssertionError):
        model, optimizer = fully_shard(model := TinyModel(), exact(model.parameters()), fsdp_unit_modules=[Block])
        train(model, optimizer, batches(2, dist.get_world_size()))
    assert not any(group.weights.batch or group.weights.planes[0].is_resident for group in model.engine.groups)


# Changes from outside ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_loaded_weights_are_quantized(kind: str) -> None:
    """A forward after a load uses the loaded weights, and a corrupted byte is found and mended."""
    model, optimizer = sharded_model(kind, quantized_model())
    data = batches(6, dist.get_world_size())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = train(model, optimizer, data)
    model.load_state_dict(before)
    assert loss_of(model, data[0, dist.get_rank()]).item() == losses[0]
    with torch.no_grad():
        for param in model.engine.params():
            local_shard(param.main).mul_(0.5)
    model.install_optimized_model_weights()
    assert loss_of(model, data[0, dist.get_rank()]).item() != losses[0]
    assert inconsistent_weights(model.engine) == []
    group = next(group for group in model.engine.groups if group.storage is not None)
    if not group.weights.temporary:
        if dist.get_rank() == 1:
            group.params[0].compute.raw[0, 0] += 1
        assert inconsistent_weights(model.engine) == [group.params[0].name]
        assert inconsistent_weights(model.engine) == []


@on_ranks(2)
def test_a_unit_that_returns_its_weight_returns_a_copy() -> None:
    model = quantized_model()
    model.blocks[0].forward = lambda x, block=model.blocks[0], run=model.blocks[0].forward: (run(x), block.up.weight)
    model.forward = lambda tokens: model.blocks[0](model.embedding(tokens))
    expected = model.blocks[0].up.weight.dequantize().clone()
    sharded, _ = sharded_model("optim_grads_params", model)
    _, returned = sharded(batches(1, 1)[0, 0])
    assert type(returned) is torch.Tensor and torch.equal(returned, expected)


# Checkpoints ------------------------------------------------------------------------------------------------------


def _data() -> torch.Tensor:
    """The same micro-batch on every rank: with a power of 2 of ranks, the mean of gradients is exact."""
    return batches(6, 1).expand(-1, dist.get_world_size(), -1, -1)


def _save(folder: str, format: str) -> list[float]:
    model, optimizer = sharded_model("optim_grads_params", quantized_model(format))
    train(model, optimizer, _data()[:3])
    save_to(folder, model, optimizer)
    if format != "delayed":
        return train(model, optimizer, _data()[3:])
    # Delayed scaling restarts with the loaded weights. No other format has more to lose than main weights.
    reference = Reference(quantized_model(format))
    for step in _data()[:3]:
        reference.step(step[:1])
    reference.forget()
    reference.quantize()
    return [reference.step(step[:1])[0] for step in _data()[3:]]


def _resume(folder: str, kind: str, format: str) -> list[float]:
    model, optimizer = sharded_model(kind, quantized_model(format, keep_initial=False))
    if format != "delayed":
        train(model, optimizer, _data()[4:5])
    load_from(folder, model, optimizer)
    return train(model, optimizer, _data()[3:])


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_resumes_exactly_on_other_numbers_of_ranks(ranks: RankPool, format: str, tmp_path: Path) -> None:
    expected = ranks.run(2, _save, str(tmp_path), format)[0]
    more = ((2, "optim"), (4, "hsdp")) if format == "tensor" else ()
    for size, kind in ((1, "optim_grads_params"), (4, "hybrid"), *more):
        assert ranks.run(size, _resume, str(tmp_path), kind, format) == [expected] * size, kind
    if format == "tensor":  # the mean of three gradients is rounded, but nothing was rounded before
        found = ranks.run(3, _resume, str(tmp_path), "optim_grads_params", format)
        assert [losses[0] for losses in found] == [expected[0]] * 3


@on_ranks(1)
def test_codes_are_not_loaded_as_values(tmp_path: Path) -> None:
    model = sharded_model("optim_grads_params", quantized_model())[0]
    name, before = "module.head.weight", model.state_dict()["module.head.weight"].clone()
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"{name}: expected values of torch.float32 .* got {dtype}"):
            model.load_state_dict({**whole, name: whole[name].to(dtype)})
    dcp.save({name: whole[name].to(torch.uint8)}, storage_writer=Writer(tmp_path))
    with pytest.raises(CheckpointException, match=rf"{name}: expected values of torch.float32 .* got torch.uint8"):
        load({name: model.state_dict()[name]}, tmp_path)
    assert torch.equal(local_shard(model.state_dict()[name]), local_shard(before))
