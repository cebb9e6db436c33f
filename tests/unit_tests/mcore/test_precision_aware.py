"""--use-precision-aware-optimizer: Transformer Engine's FusedAdam, by a stand-in with its interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

STEPS = 3


class FusedAdam(torch.optim.Optimizer):
    """Counts steps in the group, stores moments in separate dtypes, and reads gradients of any dtype."""

    def __init__(self, params: Any, **settings: Any) -> None:
        """With the keyword arguments that Megatron-Core gives it."""
        defaults = {name: settings.pop(name) for name in ("lr", "betas", "eps", "weight_decay")}
        super().__init__(params, defaults)
        assert settings.pop("adam_w_mode") and not settings.pop("capturable")
        self.master_weights: bool = settings.pop("master_weights", False)
        self.use_decoupled_grad: bool = settings.pop("use_decoupled_grad", False)
        self.dtypes = {name: settings.pop(f"{name}_dtype") for name in ("exp_avg", "exp_avg_sq")}
        assert settings.keys() <= {"master_weight_dtype", "store_param_remainders"}
        self.seen: set[torch.dtype] = set()

    def initialize_state(self, parameter: torch.Tensor) -> None:
        for name, dtype in self.dtypes.items():
            self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not self.master_weights, "FSDP has main weights"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                grad = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
                if grad is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                self._update(group, parameter, local_shard(grad))

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self.seen.add(grad.dtype)
        (beta1, beta2), step, weight = group["betas"], group["step"], local_shard(parameter)
        first, second = (local_shard(self.state[parameter][name]) for name in ("exp_avg", "exp_avg_sq"))
        grad = grad.to(weight.dtype)
        first.copy_(first.to(weight.dtype).lerp(grad, 1 - beta1))
        second.copy_(second.to(weight.dtype).mul(beta2).addcmul(grad, grad, value=1 - beta2))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (second.to(weight.dtype) / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(first.to(weight.dtype), denominator, value=-group["lr"] / (1 - beta1**step))


@contextmanager
def transformer_engine() -> Iterator[None]:
    """Megatron-Core as if Transformer Engine were there, with this optimizer."""
    import megatron.core.optimizer as optimizers
    from megatron.fsdp.mcore import adapter

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


def _trained(strategy: str, options: dict[str, Any], **changes: Any) -> tuple[Any, Any, list[float]]:
    from tests.megatron_models import forward_backward, optimizer_of, tokens, wrapped

    model = wrapped(strategy, megatron_fsdp_use_decoupled_grad=True, **changes)
    optimizer = optimizer_of(model, use_precision_aware_optimizer=True, **options)
    norms = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(model, tokens(step, 2))
        norms.append(float(optimizer.step()[1]))
    return model, optimizer, norms


def _equals_ddp(strategy: str) -> None:
    from tests.megatron_models import megatron, train_ddp, weights_of

    with megatron():
        expected = train_ddp(steps=STEPS)
        with transformer_engine():
            model, optimizer, norms = _trained(strategy, {})
        torch.testing.assert_close(norms, expected.norms, rtol=1e-5, atol=0)
        assert optimizer.optimizer.seen == {torch.float32}
        for name, weight in weights_of(model).items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-5, atol=1e-4, msg=name)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_trains_as_ddp_with_torchs_adam(ranks: RankPool, strategy: str) -> None:
    ranks.run(3, _equals_ddp, strategy)


def _narrow() -> None:
    from tests.megatron_models import megatron, train_ddp

    with megatron():
        expected = train_ddp(steps=STEPS)
        moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        with transformer_engine():
            _, optimizer, norms = _trained("optim_grads_params", moments, megatron_fsdp_main_grads_dtype=torch.bfloat16)
        fused = optimizer.optimizer
        assert fused.seen == {torch.bfloat16}, "gradients are not cast to the weights' dtype"
        kept = [state for state in fused.state.values() if state]
        assert kept and all(state["exp_avg"].dtype == torch.bfloat16 for state in kept)
        torch.testing.assert_close(norms, expected.norms, rtol=2e-2, atol=0)


def test_narrow_gradients_and_moments(ranks: RankPool) -> None:
    ranks.run(2, _narrow)


def _state_to_load_into() -> None:
    from tests.megatron_models import megatron, optimizer_of, weights_of, wrapped

    with megatron(), transformer_engine():
        model = wrapped("optim_grads_params", megatron_fsdp_use_decoupled_grad=True)
        before = weights_of(model)
        optimizer = optimizer_of(model, use_precision_aware_optimizer=True)
        optimizer.sharded_state_dict({}, is_loading=True, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
        fused = optimizer.optimizer
        here = [e.main for e in model.module.engine.params() if local_shard(e.main).numel()]
        assert here and all(fused.state[main].keys() == {"exp_avg", "exp_avg_sq"} for main in here)
        assert all(group["step"] == 0 and group["lr"] == 1e-2 for group in fused.param_groups)
        assert all(main.decoupled_grad is None for main in here)
        after = weights_of(model)
        assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_state_to_load_into_is_created_without_a_step(ranks: RankPool) -> None:
    ranks.run(2, _state_to_load_into)
