"""Quantized compute weights: sharded training equals unsharded training with the same format, bit by bit."""

import copy
import gc
import io
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

from megatron.fsdp.buffers import quantizing, weights
from megatron.fsdp.buffers.parameter import TENSOR_PARALLEL
from megatron.fsdp.checkpoint.backend import Writer
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.quantized.float8 import Float8Storage, Float8Tensor
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.models import DEVICE, STRATEGIES, Block, TinyModel, batches, loss_of
from tests.quantized_models import (
    ANYWHERE,
    BLOCKS,
    FORMATS,
    KINDS,
    Reference,
    arguments,
    exact,
    quantized_model,
    recompute,
    shard_in_place,
    sharded_model,
    train,
)
from tests.ranks import RankPool

STEPS = 20


def _ranks_of(kind: str) -> int:
    return 4 if kind in ("hsdp", "hybrid") else 2


# Quantizing -------------------------------------------------------------------------------------------------------

SHAPES = [(333, 97), (7, 5, 3), (129, 130), (1,), (5,), (0, 4), (1, 300), (2, 2)]


def _whole(value: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """The bytes of a whole weight, block by block, each scaled so that its largest magnitude becomes 448."""
    matrix = value.flatten(1) if value.dim() > 1 else value.reshape(1, -1)
    result = torch.zeros(matrix.shape, dtype=torch.uint8)
    height, width = block or (max(matrix.shape[0], 1), max(matrix.shape[1], 1))
    for i in range(0, matrix.shape[0], height):
        for j in range(0, matrix.shape[1], width):
            part = matrix[i : i + height, j : j + width]
            largest = part.abs().max()
            scale = (torch.tensor(448.0) / largest).clamp(max=torch.finfo().max) if largest > 0 else torch.ones(())
            result[i : i + height, j : j + width] = (part * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return result.view(value.shape)


def _values() -> list[torch.Tensor]:
    torch.manual_seed(7)
    values = [torch.randn(shape) for shape in SHAPES]
    values[-1].zero_()
    values[1].mul_(1e-42)  # its scale would be infinite
    values[0][5].mul_(100)  # the largest value is on one rank only
    return values


def _quantizes(block: tuple[int, int] | None, kind: str) -> None:
    model = nn.Module()
    for i, value in enumerate(_values()):
        model.register_parameter(f"w{i}", nn.Parameter(Float8Tensor.quantize(value, block, keep_initial=True)))
    model.forward = lambda: {name: (p.raw.clone(), p.dequantize()) for name, p in model.named_parameters()}
    unsharded = model.forward()
    sharded = fully_shard_model(model, fsdp_unit_modules=[], **arguments(kind))
    found = sharded()
    assert found.keys() == unsharded.keys()
    for i, value in enumerate(_values()):
        raw, dequantized = found[f"w{i}"]
        assert torch.equal(raw, _whole(value, block)), SHAPES[i]
        assert torch.equal(raw, unsharded[f"w{i}"][0]) and torch.equal(dequantized, unsharded[f"w{i}"][1]), SHAPES[i]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("block", BLOCKS)
def test_shards_are_quantized_like_the_whole(ranks: RankPool, block: str, size: int) -> None:
    ranks.run(size, _quantizes, BLOCKS[block], "optim_grads_params")


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_quantizes_like_the_whole(ranks: RankPool, kind: str) -> None:
    ranks.run(4, _quantizes, None, kind)


# Training ---------------------------------------------------------------------------------------------------------


def _expected(model: nn.Module, data: torch.Tensor, rank: int | None = None) -> list[float]:
    reference, rank = Reference(model), dist.get_rank() if rank is None else rank
    return [reference.step(step)[rank] for step in data]


def _trains(kind: str, format: str, keep_initial: bool, dtype: torch.dtype, more: dict) -> None:
    data = batches(STEPS, dist.get_world_size())
    expected = _expected(quantized_model(format, dtype, keep_initial), data)
    model, optimizer = sharded_model(kind, quantized_model(format, dtype, keep_initial), **more)
    assert train(model, optimizer, data) == expected
    assert expected[-1] < expected[0] - 0.1
    assert inconsistent_weights(model.engine) == []


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_unsharded(ranks: RankPool, kind: str) -> None:
    ranks.run(_ranks_of(kind), _trains, kind, "tensor", True, torch.float32, {})


@pytest.mark.parametrize("format", ANYWHERE)
def test_formats_train_as_unsharded(ranks: RankPool, format: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", format, True, torch.float32, {})


FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
VARIANTS: dict[str, tuple[bool, torch.dtype, dict]] = {
    "from dequantized values": (False, torch.float32, {}),
    "bf16": (True, torch.bfloat16, {"mixed_precision_policy": FP32}),
    "double buffer": (True, torch.float32, {"fsdp_double_buffer": True}),
    "no prefetch": (True, torch.float32, {"overlap_param_gather": False}),
    "modules": (True, torch.float32, {"enable_fine_grained_param_gather": True}),
    "elements": (True, torch.float32, {"shard_granularity": "element"}),
    "offload": (True, torch.float32, {"offload_optimizer": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train_as_unsharded(ranks: RankPool, variant: str) -> None:
    ranks.run(2, _trains, "optim_grads_params", "tensor", *VARIANTS[variant])


def _tensor_parallel() -> None:
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


def test_tensor_parallel_parameters(ranks: RankPool) -> None:
    ranks.run(4, _tensor_parallel)


def _computes_in_bf16(format: str) -> None:
    """A float32 model that computes in bf16 trains as a bf16 model with the same main weights."""
    data, grads = batches(6, 2), torch.float32
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_grads_dtype=grads)
    model, optimizer = sharded_model("optim_grads_params", quantized_model(format), mixed_precision_policy=policy)
    other = quantized_model(format, torch.bfloat16)
    policy = MixedPrecisionPolicy(main_grads_dtype=grads)
    other, other_optimizer = sharded_model("optim_grads_params", other, mixed_precision_policy=policy)
    other.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    seen = []
    model.module.head.register_forward_hook(
        lambda module, args, output: seen.append((module.weight.dtype, output.dtype))
    )
    assert train(model, optimizer, data) == train(other, other_optimizer, data)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("format", ["tensor", "mx"])
def test_computes_in_another_dtype(ranks: RankPool, format: str) -> None:
    ranks.run(2, _computes_in_bf16, format)


def _from_meta(kind: str) -> None:
    """Modules initialize plain values, which main weights keep before they are quantized."""
    with torch.device("meta"):
        models = [TinyModel(), quantized_model()]
    held = list(models[1].parameters())
    optimizer = exact(held)
    torch.manual_seed(11)
    plain = fully_shard_model(models[0], fsdp_unit_modules=[Block], init_model_with_meta_device=True, **arguments(kind))
    values = {name: value.full_tensor() for name, value in plain.state_dict().items()}
    torch.manual_seed(11)
    found, optimizer = fully_shard(
        models[1], optimizer, fsdp_unit_modules=[Block], init_model_with_meta_device=True, **arguments(kind)
    )
    for name, value in found.state_dict().items():
        assert torch.equal(value.full_tensor(), values[name])
    other, other_optimizer = sharded_model(kind, quantized_model())
    other.load_state_dict(values)
    data = batches(4, dist.get_world_size())
    assert train(found, optimizer, data) == train(other, other_optimizer, data)


def test_from_the_meta_device(ranks: RankPool) -> None:
    ranks.run(2, _from_meta, "optim")


def _recomputes() -> None:
    data = batches(6, 2)
    expected = _expected(quantized_model(), data)
    assert train(*sharded_model("optim_grads_params", recompute(quantized_model(), "unit")), data) == expected


def test_recomputes(ranks: RankPool) -> None:
    ranks.run(2, _recomputes)


def _in_place() -> None:
    data = batches(6, 2)
    expected = _expected(quantized_model(), data)
    model = shard_in_place(quantized_model())
    assert train(model, exact(model.parameters()), data) == expected


def test_shards_in_place(ranks: RankPool) -> None:
    ranks.run(2, _in_place)


def _freezes() -> None:
    models = [quantized_model(), quantized_model()]
    for model in models:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)
    data = batches(6, 1)
    reference = Reference(models[0])
    reference.params = [p for p in reference.params if p.requires_grad]
    trained = {id(p) for p in reference.params}
    reference.main = [m for m, p in zip(reference.main, models[0].parameters(), strict=True) if id(p) in trained]
    reference.optimizer = exact(reference.main)
    expected = [reference.step(step)[0] for step in data]
    model = models[1]
    model, optimizer = fully_shard(
        model, exact([p for p in model.parameters() if p.requires_grad]), fsdp_unit_modules=[Block]
    )
    both = torch.cat([data, data], dim=1)
    assert train(model, optimizer, both) == expected


def test_frozen_weights(ranks: RankPool) -> None:
    ranks.run(2, _freezes)


# When and how much ------------------------------------------------------------------------------------------------


def _counts(kind: str) -> None:
    """One all-reduce of scales per step and process group, although two micro-batches and an evaluation follow."""
    model, optimizer = sharded_model(kind, quantized_model())
    data = batches(3, dist.get_world_size())
    groups = 0 if kind == "no_shard" else 1
    for step in data:
        with patch.object(quantizing, "all_reduce", wraps=quantizing.all_reduce) as reduced:
            with model.no_sync():
                loss_of(model, step[dist.get_rank()]).backward()
            loss_of(model, step[dist.get_rank()]).backward()
            with torch.no_grad():
                loss_of(model, step[0])
            optimizer.step()
            optimizer.zero_grad()
        assert len({call.args[2] for call in reduced.call_args_list}) == reduced.call_count == groups


@pytest.mark.parametrize("kind", KINDS)
def test_quantizes_once_per_step(ranks: RankPool, kind: str) -> None:
    ranks.run(_ranks_of(kind), _counts, kind)


def _gathered(model: nn.Module, kind: str) -> tuple[int, int]:
    """Bytes of the all-gathers of weights in one step, and bytes of the blocks' matrices at rest."""
    for block in model.blocks:  # only matrices
        block.norm, block.up.bias = nn.Identity(), None
    sharded, optimizer = sharded_model(kind, model)
    train(sharded, optimizer, batches(1, dist.get_world_size()))
    with patch.object(weights, "all_gather", wraps=weights.all_gather) as gather:
        train(sharded, optimizer, batches(1, dist.get_world_size()))
    of_blocks = [group.weights for unit in sharded.engine.units[1:] for group in unit.groups]
    places = {each.compute.flat.untyped_storage()._cdata for each in of_blocks}
    sent = [call.args[0] for call in gather.call_args_list]
    resident = sum(each.resident.nbytes for each in of_blocks if each.resident is not None)
    assert places and all(each.stream is of_blocks[0].stream for each in of_blocks)
    names = {each.layout.numel for each in of_blocks}
    return sum(t.nbytes for t in sent if t.numel() in names), resident


def _halves(kind: str) -> None:
    count = sum(p.numel() for p in quantized_model().blocks.parameters() if p.dim() > 1)
    quantized, at_rest = _gathered(quantized_model(dtype=torch.bfloat16), kind)
    torch.manual_seed(5)
    plain, _ = _gathered(TinyModel().bfloat16(), kind)
    assert plain == 2 * quantized > 0
    shards = dist.get_world_size() if kind == "optim_grads_params" else 1
    assert count / shards <= at_rest <= 1.1 * count / shards


@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
def test_gathers_half_the_bytes_of_bf16(ranks: RankPool, kind: str) -> None:
    ranks.run(2, _halves, kind)


def _between_steps(kind: str) -> None:
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
    left = [weakref.ref(each) for group in model.engine.groups for each in (group.weights.main, group.weights.resident)
            if each is not None]  # fmt: skip
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, unit, group, param, stored, down
        assert not any(reference() is not None for reference in left)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
def test_what_is_left_between_steps(ranks: RankPool, kind: str) -> None:
    ranks.run(2, _between_steps, kind)


def _plain() -> None:
    with patch.object(quantizing, "all_reduce", side_effect=AssertionError):
        model, optimizer = fully_shard(model := TinyModel(), exact(model.parameters()), fsdp_unit_modules=[Block])
        train(model, optimizer, batches(2, dist.get_world_size()))
    assert all(group.weights.batch is None and group.weights.resident is None for group in model.engine.groups)


def test_other_models_are_as_before(ranks: RankPool) -> None:
    ranks.run(2, _plain)


# Changes from outside ---------------------------------------------------------------------------------------------


def _loads(kind: str) -> None:
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


def _changes(kind: str, quantized: bool) -> None:
    """In-place changes of main weights, as a swap with averages makes, reach the next forward."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    plain = quantized_model(dtype=torch.bfloat16) if quantized else TinyModel().bfloat16()
    model, optimizer = sharded_model(kind, plain, mixed_precision_policy=policy)
    data = batches(3, dist.get_world_size())
    first = [value.clone() for value in model.parameters()]
    losses = train(model, optimizer, data)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first, strict=True):
            parameter.copy_(value)
    assert loss_of(model, data[0, dist.get_rank()]).item() == losses[0] != losses[1]


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
def test_changed_weights_are_copied_again(ranks: RankPool, kind: str, quantized: bool) -> None:
    ranks.run(2, _changes, kind, quantized)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_loaded_weights_are_quantized(ranks: RankPool, kind: str) -> None:
    ranks.run(2, _loads, kind)


def _returns() -> None:
    model = quantized_model()
    model.blocks[0].forward = lambda x, block=model.blocks[0], run=model.blocks[0].forward: (run(x), block.up.weight)
    model.forward = lambda tokens: model.blocks[0](model.embedding(tokens))
    expected = model.blocks[0].up.weight.dequantize().clone()
    sharded, _ = sharded_model("optim_grads_params", model)
    _, returned = sharded(batches(1, 1)[0, 0])
    assert type(returned) is torch.Tensor and torch.equal(returned, expected)


def test_a_unit_that_returns_its_weight_returns_a_copy(ranks: RankPool) -> None:
    ranks.run(2, _returns)


# Checkpoints ------------------------------------------------------------------------------------------------------


def _data() -> torch.Tensor:
    """The same micro-batch on every rank: with a power of 2 of ranks, the mean of gradients is exact."""
    return batches(6, 1).expand(-1, dist.get_world_size(), -1, -1)


def _state(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _save(folder: str, kind: str) -> list[float]:
    model, optimizer = sharded_model(kind, quantized_model())
    train(model, optimizer, _data()[:3])
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, _data()[3:])


def _resume(folder: str, kind: str) -> list[float]:
    other = quantized_model(keep_initial=False)
    model, optimizer = sharded_model(kind, other)
    train(model, optimizer, _data()[4:5])
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, _data()[3:])


def test_resumes_exactly_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, _save, str(tmp_path), "optim_grads_params")[0]
    for size, kind in ((1, "optim_grads_params"), (2, "optim"), (4, "hsdp"), (4, "hybrid")):
        assert ranks.run(size, _resume, str(tmp_path), kind) == [expected] * size, kind
    # The mean of three gradients is rounded, but nothing was rounded before.
    assert [losses[0] for losses in ranks.run(3, _resume, str(tmp_path), "optim_grads_params")] == [expected[0]] * 3


def _codes(folder: str) -> None:
    model = sharded_model("optim_grads_params", quantized_model())[0]
    name, before = "module.head.weight", model.state_dict()["module.head.weight"].clone()
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"{name}: expected values of torch.float32 .* got {dtype}"):
            model.load_state_dict({**whole, name: whole[name].to(dtype)})
    dcp.save({name: whole[name].to(torch.uint8)}, storage_writer=Writer(folder))
    with pytest.raises(CheckpointException, match=rf"{name}: expected values of torch.float32 .* got torch.uint8"):
        load({name: model.state_dict()[name]}, folder)
    assert torch.equal(local_shard(model.state_dict()[name]), local_shard(before))


def test_codes_are_not_loaded_as_values(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _codes, str(tmp_path))


# Errors -----------------------------------------------------------------------------------------------------------


class Derived(Float8Tensor):
    """A subclass of a registered class."""


def _refuses() -> None:
    model = quantized_model()
    before = [id(p) for p in model.parameters()]
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    expected = r"Parameter \S+weight is a quantized Float8Tensor of .*compute_dtype=torch.bfloat16 is another"
    with patch.object(Float8Storage, "takes_dtype", False):
        with pytest.raises(NotImplementedError, match=expected):
            fully_shard_model(model, fsdp_unit_modules=[Block], mixed_precision_policy=policy)
    with patch.object(Float8Storage, "problem", lambda *unused: "its rows are odd"):
        with pytest.raises(NotImplementedError, match=r"Parameter \S+ is .* cannot be sharded: its rows are odd"):
            fully_shard_model(model, fsdp_unit_modules=[Block])
    assert before == [id(p) for p in model.parameters()]


def test_unsupported_settings_raise(ranks: RankPool) -> None:
    ranks.run(1, _refuses)


def _refuses_tied() -> None:
    model = quantized_model()
    made = Float8Tensor.quantize(model.embedding.weight, keep_initial=True)
    model.head.weight = nn.Parameter(made)
    with pytest.raises(ValueError, match="head.weight is a quantized Float8Tensor of the memory of embedding.weight"):
        fully_shard_model(model, fsdp_unit_modules=[Block])


def test_quantized_copies_of_parameters_raise(ranks: RankPool) -> None:
    ranks.run(1, _refuses_tied)


@pytest.mark.parametrize("format", FORMATS)
def test_copies_before_sharding(format: str) -> None:
    model = quantized_model(format)
    model.head.weight.mark = 1
    reloaded = io.BytesIO()
    torch.save(model, reloaded)
    reloaded.seek(0)
    for other in (copy.deepcopy(model), torch.load(reloaded, weights_only=False)):
        assert other.head.weight.mark == 1 and type(other.head.weight) is type(model.head.weight)
        tokens = batches(1, 1, vocabulary=31)[0, 0]
        assert torch.equal(loss_of(other, tokens), loss_of(model, tokens))
        for mine, theirs in zip(model.head.weight.planes, other.head.weight.planes, strict=True):
            assert mine.data_ptr() != theirs.data_ptr() and torch.equal(mine, theirs)
        assert other.head.weight.requires_grad and torch.equal(other.head.weight.initial, model.head.weight.initial)


def _refuses_formats() -> None:
    model = quantized_model()
    raw = model.head.weight
    model.head.weight = nn.Parameter(Derived.quantize(raw.dequantize()))
    with pytest.raises(NotImplementedError, match="Parameter head.weight is a .*Derived, a tensor subclass that keeps"):
        fully_shard_model(model, fsdp_unit_modules=[Block])
    with pytest.raises(NotImplementedError, match="changes a Float8Tensor in place"), torch.no_grad():
        raw.zero_()


def test_unknown_formats_raise(ranks: RankPool) -> None:
    ranks.run(1, _refuses_formats)


def _differ() -> None:
    format = "128x128" if dist.get_rank() else "tensor"
    with pytest.raises(ValueError, match=r"parameter \S+weight.*stored as"):
        model, _ = sharded_model("optim_grads_params", quantized_model(format))
        model.engine.agree()


def test_ranks_with_different_formats_raise(ranks: RankPool) -> None:
    ranks.run(2, _differ)
