"""Megatron's models with quantized weights, as ``--fp8-param-gather`` builds them.

Transformer Engine needs CUDA, so this is simulated: the reference format takes the place of its tensors, and a function
here that of its ``fp8_model_init``.
"""

import dataclasses
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import tests.megatron_models as mm
from megatron.core.tensor_parallel import layers
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.mcore.statistics import get_megatron_optimizer
from megatron.fsdp.quantized.reference.base import ReferenceTensor
from megatron.fsdp.quantized.storage import KEEP_TRANSPOSE
from tests.models import STRATEGIES, logged, whole
from tests.quantized_models import FORMATS, IN_BLOCKS, layers_of, quantize_layers, round_layers
from tests.ranks import RankPool, on_ranks

# Sizes that blocks divide and ranks do not.
SIZES = {"hidden_size": 96, "ffn_hidden_size": 160}


def quantized_gpt(config: Any, format: str = "5x7") -> nn.Module:
    return quantize_layers(mm.gpt(config), format)


def rounded_gpt(config: Any, format: str = "5x7") -> nn.Module:
    return round_layers(mm.gpt(config), format)


def _equals_ddp(strategy: str, changes: dict[str, Any], format: str = "5x7") -> None:
    # Without biases, numbers of zeros are equal.
    changes = {"add_bias_linear": False, **changes}
    with mm.megatron(), _kernels():
        expected = mm.train(None, build=partial(rounded_gpt, format=format), **changes)
        found = mm.train(strategy, build=partial(quantized_gpt, format=format), fp8_param_gather=True, **changes)
    part = "parametrizations.weight.original"
    expected.weights = {name.replace(part, "weight"): weight for name, weight in expected.weights.items()}
    # A weight next to the border of two values is rounded to either.
    mm.assert_same(found, expected, atol=2e-4, norms=1e-5)


def _kernels() -> Any:
    """Let Megatron's layers call ``F.linear``, which lets the format decide what backward reads."""

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any) -> torch.Tensor:
        return nn.functional.linear(input, weight, bias)

    return mock.patch.object(layers, "linear_with_grad_accumulation_and_async_allreduce", linear)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_with_ddp(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _equals_ddp, strategy, {})


@pytest.mark.parametrize("format", ["tensor", *IN_BLOCKS])
def test_every_format_trains_as_with_ddp(ranks: RankPool, format: str) -> None:
    ranks.run(2, _equals_ddp, "optim_grads_params", SIZES, format)


VARIANTS: dict[str, dict[str, Any]] = {
    "recomputation": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "double buffer": {"fsdp_double_buffer": True},
    "modules": {"megatron_fsdp_enable_fine_grained_param_gather": True},
    "transposes are kept": {"keep_fp8_transpose_cache": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train_as_with_ddp(ranks: RankPool, variant: str) -> None:
    ranks.run(2, _equals_ddp, "optim_grads_params", VARIANTS[variant])


@on_ranks(2)
@pytest.mark.parametrize("keep", [False, True])
def test_megatron_sees_main_weights_only(keep: bool) -> None:
    with mm.megatron():
        # It imports Megatron-Core, which megatron_models has prepared for a CPU.

        model = mm.wrapped("optim_grads_params", quantized_gpt, fp8_param_gather=True, keep_fp8_transpose_cache=keep)
        quantized = [p.compute for p in model.module.engine.params() if isinstance(p.compute, ReferenceTensor)]
        assert len(quantized) == 8
        assert all(getattr(weight, KEEP_TRANSPOSE) is keep for weight in quantized)
        optimizer = mm.optimizer_of(model)
        # It would make the optimizer write weights into a buffer of Megatron's DDP.
        config = dataclasses.replace(optimizer.config, reuse_grad_buf_for_mxfp8_param_ag=True)
        get_megatron_optimizer(lambda *_: Namespace(), config, [model])
        assert not config.reuse_grad_buf_for_mxfp8_param_ag
        mm.forward_backward(model, mm.tokens(0, 1))
        assert optimizer.step()[0]
        # Megatron's optimizer, its norm of parameters and its checkpoints look for quantized tensors by class.
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        for found in (model.parameters(), updated, model.state_dict_for_save_checkpoint(keep_vars=True).values()):
            tensors = [value for value in found if isinstance(value, torch.Tensor)]
            assert len(tensors) == len(updated)
            for tensor in tensors:
                assert isinstance(tensor, DTensor) and type(local_shard(tensor)) is torch.Tensor
                assert tensor.dtype == torch.float32


# Checkpoints ------------------------------------------------------------------------------------------------------


def _with_extra_state(build: Any) -> Any:
    """The model with layers that have extra state, as Transformer Engine's have with FP8."""

    def get(layer: nn.Module) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def put(layer: nn.Module, state: torch.Tensor | None) -> None:
        # Megatron's hook before a load enters None for a state that is missing.
        assert state is None or state.dtype == torch.uint8

    def built(config: Any) -> nn.Module:
        model = build(config)
        for layer in layers_of(model).values():
            own = {"get_extra_state": get, "set_extra_state": put}
            layer.__class__ = type(type(layer).__name__, (type(layer),), own)
        return model

    return built


def _model(quantized: bool) -> tuple[Any, Any]:
    build = _with_extra_state(quantized_gpt) if quantized else mm.gpt
    model = mm.wrapped("optim_grads_params", build, bf16=True, fp8_param_gather=quantized)
    optimizer = mm.optimizer_of(model)
    mm.run_steps(model, optimizer, 1, 1)
    return model, optimizer


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {bare_name(param.name): whole(param, param.main) for param in model.module.engine.params()}


def _save(folder: Path, quantized: bool) -> dict[str, torch.Tensor]:
    with mm.megatron():
        model, optimizer = _model(quantized)
        dcp.save(mm.checkpoint_state(model, optimizer), checkpoint_id=folder)
        return _whole(model)


def _load_and_save(source: Path, target: Path, quantized: bool, extra: bool) -> dict[str, torch.Tensor]:
    with mm.megatron():
        model, optimizer = _model(quantized)
        state = mm.checkpoint_state(model, optimizer)
        dcp.load(state, checkpoint_id=source)
        state.restore()
        loaded = state["model"]
        has_extra = any("_extra_state" in key and value is not None for key, value in loaded.items())
        assert has_extra == quantized
        model.load_state_dict({key: value for key, value in loaded.items() if extra or "_extra_state" not in key})
        found = _whole(model)
        used: dict[str, torch.Tensor] = {}
        for name, layer in layers_of(model).items() if quantized else ():
            layer.register_forward_pre_hook(
                lambda layer, _, name=name: used.update({f"{name}.weight": layer.weight.dequantize()})
            )
        with torch.no_grad():
            mm.gpt_losses(model, mm.tokens(0, 1)[0])
        assert len(used) == 8 * quantized
        for name, weight in used.items():
            expected = FORMATS["5x7"](found[bare_name(name)], dtype=torch.bfloat16).dequantize()
            assert torch.equal(weight, expected), name
        dcp.save(mm.checkpoint_state(model, optimizer), checkpoint_id=target)
        return found


@pytest.mark.parametrize("extra", [False, True], ids=["without extra state", "with extra state"])
def test_bf16_checkpoints_go_through_quantized_runs_unchanged(ranks: RankPool, tmp_path: Path, extra: bool) -> None:
    saved = ranks.run(3, _save, tmp_path / "bf16", False)[0]
    quantized = ranks.run(2, _load_and_save, tmp_path / "bf16", tmp_path / "quantized", True, extra)[0]
    back = ranks.run(3, _load_and_save, tmp_path / "quantized", tmp_path / "back", False, extra)[0]
    for name, weight in saved.items():
        assert weight.dtype == torch.float32
        assert torch.equal(quantized[name], weight) and torch.equal(back[name], weight), name
    keys = [dcp.FileSystemReader(tmp_path / each).read_metadata().state_dict_metadata for each in ("bf16", "quantized")]
    assert keys[0].keys() == keys[1].keys()
    assert not [key for key in keys[0] if "_extra_state" in key]


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_layers_that_keep_copies_of_plain_weights_are_warned_of(strategy: str) -> None:
    """With ZeRO-3 only: other strategies hold the weights themselves."""

    def older(config: Any) -> nn.Module:
        model = mm.gpt(config)
        for layer in layers_of(model).values():
            layer.fp8_meta = {}
        return model

    with mm.megatron(), logged() as texts:
        model = mm.wrapped(strategy, older, fp8="hybrid", fp8_recipe="tensorwise")
    numel = sum(layer.weight.numel() for layer in layers_of(model).values())
    found = [text for text in texts if "--fp8-param-gather" in text]
    assert bool(found) == (strategy == "optim_grads_params" and dist.get_rank() == 0)
    assert all(f"up to {2 * numel:,} bytes per rank" in text for text in found), found
