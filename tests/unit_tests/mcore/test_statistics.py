"""The norms and numbers of zeros that Megatron reports count every gradient and weight once."""

import pytest
import torch

import tests.megatron_models as mm
from megatron.fsdp.api.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.training import training
from tests.ranks import RankPool

# Strategy, and that of two optimizer instances; None: there is one instance.
CASES = [("no_shard", None), ("optim", None), ("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")]


def _statistics(strategy: str, outer: str | None) -> None:
    instances = 1 if outer is None else 2
    settings = {"num_distributed_optimizer_instances": instances, "outer_dp_sharding_strategy": outer or "no_shard"}
    config = mm.OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True)
    with mm.megatron(num_distributed_optimizer_instances=instances):
        model = mm.wrapped(strategy, **settings)
        optimizer = training.get_megatron_optimizer(config, [model])
        mm.forward_backward(model, mm.tokens(0, 1))
        grads = [uneven_dtensor_to_full_tensor(parameter.grad) for parameter in model.parameters()]
        assert optimizer.get_grad_norm() == pytest.approx(_norm(grads), rel=1e-5)
        assert optimizer.count_zeros() == sum(grad.numel() - int(grad.count_nonzero()) for grad in grads)
        weights = [uneven_dtensor_to_full_tensor(parameter.detach()) for parameter in model.parameters()]
        assert training.calc_params_l2_norm([model]) == pytest.approx(_norm(weights), rel=1e-6)


def _norm(tensors: list[torch.Tensor]) -> float:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt().item()


@pytest.mark.parametrize(("strategy", "outer"), CASES)
def test_every_gradient_is_counted_once(ranks: RankPool, strategy: str, outer: str | None) -> None:
    ranks.run(2, _statistics, strategy, outer)
