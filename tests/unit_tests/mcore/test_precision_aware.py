"""--use-precision-aware-optimizer: Transformer Engine's FusedAdam, by a mock with its interface."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tests.megatron_models as mm
from megatron.core import optimizer as optimizers
from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like, same_layout
from megatron.fsdp.mcore import adapter
from megatron.fsdp.mcore.checkpoint_state import CheckpointState
from megatron.fsdp.mcore.load import load_state_dict
from megatron.fsdp.mcore.save import preprocess
from tests.fused_adam import FusedAdam
from tests.models import STRATEGIES, whole
from tests.ranks import RankPool, on_ranks

ADAMS = ("exp_avg", "exp_avg_sq")
DTYPES = tuple(f"{name}_dtype" for name in ADAMS)
FORMAT = {"distrib_optim_sharding_type": "fsdp_dtensor"}


@contextmanager
def transformer_engine() -> Iterator[None]:
    """Megatron-Core as if Transformer Engine were there, with this optimizer."""

    def settings(config: Any) -> None:
        # As Megatron-Core does, but without inspecting Transformer Engine.
        config.store_param_remainders = False
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = config.use_precision_aware_optimizer

    with (
        mock.patch.object(optimizers.OptimizerConfig, "__post_init__", settings),
        mock.patch.object(optimizers, "Adam", FusedAdam),
        mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(adapter, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield


def _trained(strategy: str, options: dict[str, Any], **changes: Any) -> tuple[Any, Any, mm.Trained]:
    model = mm.wrapped(strategy, megatron_fsdp_use_decoupled_grad=True, **changes)
    optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True, **options)
    return model, optimizer, mm.run_steps(model, optimizer)


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_ddp_with_torchs_adam(strategy: str) -> None:
    with mm.megatron():
        expected = mm.train_ddp()
        with transformer_engine():
            model, optimizer, found = _trained(strategy, {})
        found.weights = mm.weights_of(model)
        mm.assert_same(found, expected, rtol=1e-5, atol=1e-4, norms=1e-5)
        assert optimizer.optimizer.seen == {torch.float32}
        # As a checkpoint has it: Transformer Engine makes it by DTensor.from_local with the placements of parameters.
        state = {main: value for main, values in optimizer.optimizer.state.items() for value in values.values()}
        assert state and all(same_layout(value, main) for main, value in state.items())


@on_ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_unscales_beside_empty_shards_with_a_fused_optimizer(strategy: str) -> None:
    def norms(fused: bool) -> list[float]:
        with transformer_engine() if fused else contextlib.nullcontext():
            model = mm.wrapped(strategy, fp16=True)
            optimizer = mm.optimizer_of(model, fp16=True, loss_scale=64.0)
            return mm.run_steps(model, optimizer).norms

    with mm.megatron():
        torch.testing.assert_close(norms(True), norms(False), rtol=2e-2, atol=0)


@on_ranks(2)
def test_narrow_gradients_and_moments() -> None:
    with mm.megatron():
        expected = mm.train_ddp()
        moments = dict.fromkeys(DTYPES, torch.bfloat16)
        with transformer_engine():
            _, optimizer, found = _trained("optim_grads_params", moments, megatron_fsdp_main_grads_dtype=torch.bfloat16)
        fused = optimizer.optimizer
        assert fused.seen == {torch.bfloat16}, "gradients are not cast to the weights' dtype"
        kept = [state for state in fused.state.values() if state]
        assert kept and all(state["exp_avg"].dtype == torch.bfloat16 for state in kept)
        torch.testing.assert_close(found.norms, expected.norms, rtol=2e-2, atol=0)


@on_ranks(2)
def test_state_to_load_into_is_created_without_a_step() -> None:
    with mm.megatron(), transformer_engine():
        model = mm.wrapped("optim_grads_params", megatron_fsdp_use_decoupled_grad=True)
        before = mm.weights_of(model)
        optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True)
        optimizer.sharded_state_dict({}, is_loading=True, metadata=FORMAT)
        fused = optimizer.optimizer
        here = [e.main for e in model.module.engine.params() if local_shard(e.main).numel()]
        assert here and all(fused.state[main].keys() == {"exp_avg", "exp_avg_sq"} for main in here)
        assert all(group["step"] == 0 and group["lr"] == 1e-2 for group in fused.param_groups)
        assert all(main.decoupled_grad is None for main in here)
        after = mm.weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


GATED = {"gated_linear_unit": True, "add_bias_linear": False}


def _moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Full moments, as the optimizer computes with them."""
    fused = optimizer.optimizer
    wide = [(e, name, fused.get_unscaled_state(e.main, name)) for e in model.module.engine.params() for name in ADAMS]
    return {f"{e.name} {name}": whole(e, make_like(value, e.main)) for e, name, value in wide}


def _save_scaled(folder: str, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    with mm.megatron(), transformer_engine():
        model, optimizer, _ = _trained("optim_grads_params", dict.fromkeys(DTYPES, dtype), **changes)
        state = mm.checkpoint_state(model, optimizer)
        save(state, folder)
        for moments in state["optimizer"]["state"].values():
            moments |= {name: make_like(local_shard(value).half(), value) for name, value in moments.items()}
        save(state, f"{folder}/others")
        return _moments(model, optimizer)


def _load_scaled(folder: str, dtype: torch.dtype, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    with mm.megatron(), transformer_engine():
        model = mm.wrapped("optim_grads_params", megatron_fsdp_use_decoupled_grad=True, **changes)
        optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True, **dict.fromkeys(DTYPES, dtype))
        raw = optimizer.sharded_state_dict({}, is_loading=True, metadata=FORMAT)
        state = {"model": model.module.state_dict_for_save_checkpoint(), "optimizer": raw}
        prepared = CheckpointState(state, [model.module], loading=True)
        prepared = preprocess(None, SimpleNamespace(), prepared, model.module)
        with pytest.raises(RuntimeError, match=r"exp_avg of .* is in float16; its scale is not in the checkpoint"):
            load_state_dict(prepared, dcp.FileSystemReader(f"{folder}/others"))
        load_state_dict(prepared, dcp.FileSystemReader(folder))
        optimizer.load_state_dict(prepared["optimizer"])
        return _moments(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_scaled_moments_are_saved_as_what_they_mean(ranks: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    """As they are in fp16 and FP8, they would be read without their scales, which a checkpoint has not."""
    saved = ranks.run(3, _save_scaled, str(tmp_path), dtype, GATED)[0]
    loaded = ranks.run(2, _load_scaled, str(tmp_path), dtype, GATED)[0]
    assert saved.keys() == loaded.keys()
    for name, moment in saved.items():
        largest = float(moment.abs().max())
        assert largest > 0
        # A rank scales by the largest value of its own shard.
        atol = largest * (2**-4 if dtype == torch.uint8 else 2**-11)
        torch.testing.assert_close(loaded[name], moment, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
