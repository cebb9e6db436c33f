"""--use-precision-aware-optimizer: Transformer Engine's FusedAdam, by a mock with its interface."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import tests.megatron_models as mm
from megatron.core import optimizer as optimizers
from megatron.fsdp.dtensor.ragged_dtensor import local_shard, same_layout
from megatron.fsdp.mcore import adapter
from tests.fused_adam import FusedAdam
from tests.models import STRATEGIES
from tests.ranks import RankPool


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


def _equals_ddp(strategy: str) -> None:
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_ddp_with_torchs_adam(ranks: RankPool, strategy: str) -> None:
    ranks.run(3, _equals_ddp, strategy)


def _unscales(strategy: str) -> None:
    def norms(fused: bool) -> list[float]:
        with transformer_engine() if fused else contextlib.nullcontext():
            model = mm.wrapped(strategy, fp16=True)
            optimizer = mm.optimizer_of(model, fp16=True, loss_scale=64.0)
            return mm.run_steps(model, optimizer).norms

    with mm.megatron():
        torch.testing.assert_close(norms(True), norms(False), rtol=2e-2, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp16_unscales_beside_empty_shards_with_a_fused_optimizer(ranks: RankPool, strategy: str) -> None:
    ranks.run(3, _unscales, strategy)


def _narrow() -> None:
    with mm.megatron():
        expected = mm.train_ddp()
        moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        with transformer_engine():
            _, optimizer, found = _trained("optim_grads_params", moments, megatron_fsdp_main_grads_dtype=torch.bfloat16)
        fused = optimizer.optimizer
        assert fused.seen == {torch.bfloat16}, "gradients are not cast to the weights' dtype"
        kept = [state for state in fused.state.values() if state]
        assert kept and all(state["exp_avg"].dtype == torch.bfloat16 for state in kept)
        torch.testing.assert_close(found.norms, expected.norms, rtol=2e-2, atol=0)


def test_narrow_gradients_and_moments(ranks: RankPool) -> None:
    ranks.run(2, _narrow)


def _state_to_load_into() -> None:
    with mm.megatron(), transformer_engine():
        model = mm.wrapped("optim_grads_params", megatron_fsdp_use_decoupled_grad=True)
        before = mm.weights_of(model)
        optimizer = mm.optimizer_of(model, use_precision_aware_optimizer=True)
        optimizer.sharded_state_dict({}, is_loading=True, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
        fused = optimizer.optimizer
        here = [e.main for e in model.module.engine.params() if local_shard(e.main).numel()]
        assert here and all(fused.state[main].keys() == {"exp_avg", "exp_avg_sq"} for main in here)
        assert all(group["step"] == 0 and group["lr"] == 1e-2 for group in fused.param_groups)
        assert all(main.decoupled_grad is None for main in here)
        after = mm.weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_state_to_load_into_is_created_without_a_step(ranks: RankPool) -> None:
    ranks.run(2, _state_to_load_into)
