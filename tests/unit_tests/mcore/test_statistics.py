"""The norms and numbers of zeros that Megatron reports count every gradient and weight once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.megatron_models as mm
from megatron.fsdp.api.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.training import training
from tests.ranks import on_ranks

# Strategy, and that of two optimizer instances; None: there is one instance.
CASES = [("no_shard", None), ("optim", None), ("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")]


def _optimizer(model: torch.nn.Module, **settings: Any) -> Any:
    config = mm.OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True, **settings)
    return training.get_megatron_optimizer(config, [model])


@on_ranks(2)
def test_a_step_with_a_large_norm_is_skipped() -> None:
    with mm.megatron():
        model = mm.wrapped("optim_grads_params")
        optimizer = _optimizer(model, grad_norm_skip_threshold=1e-9)
        before = [uneven_dtensor_to_full_tensor(parameter.detach()) for parameter in model.parameters()]
        mm.forward_backward(model, mm.tokens(0, 1))
        updated, norm, _ = optimizer.step()
        after = [uneven_dtensor_to_full_tensor(parameter.detach()) for parameter in model.parameters()]
        assert not updated and norm > 1e-9
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_ranks(2)
def test_a_stage_without_trainable_parameters() -> None:
    with mm.megatron(pipeline_model_parallel_size=2):
        first = dist.get_rank() == 0
        model = mm.wrapped("optim_grads_params", lambda config: mm.gpt(config).requires_grad_(not first))
        optimizer = _optimizer(model)
        if not first:
            mm.gpt_losses(model, mm.tokens(0, 1)[0]).mean().backward()
        model.finish_grad_sync()
        assert optimizer.step()[0]


def _norm(tensors: list[torch.Tensor]) -> float:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt().item()


@on_ranks(2)
@pytest.mark.parametrize(("strategy", "outer"), CASES)
def test_every_gradient_is_counted_once(strategy: str, outer: str | None) -> None:
    instances = 1 if outer is None else 2
    settings = {"num_distributed_optimizer_instances": instances, "outer_dp_sharding_strategy": outer or "no_shard"}
    with mm.megatron(num_distributed_optimizer_instances=instances):
        model = mm.wrapped(strategy, **settings)
        optimizer = _optimizer(model)
        mm.forward_backward(model, mm.tokens(0, 1))
        grads = [uneven_dtensor_to_full_tensor(parameter.grad) for parameter in model.parameters()]
        assert optimizer.get_grad_norm() == pytest.approx(_norm(grads), rel=1e-5)
        assert optimizer.count_zeros() == sum(grad.numel() - int(grad.count_nonzero()) for grad in grads)
        weights = [uneven_dtensor_to_full_tensor(parameter.detach()) for parameter in model.parameters()]
        assert training.calc_params_l2_norm([model]) == pytest.approx(_norm(weights), rel=1e-6)
