"""The norms and numbers of zeros that Megatron reports count every gradient and weight once."""

import pytest
import torch

from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

# Strategy, and that of two optimizer instances; None: there is one instance.
CASES = [("no_shard", None), ("optim", None), ("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")]


def _statistics(strategy: str, outer: str | None) -> None:
    from tests.megatron_models import (
        OptimizerConfig,
        destroy_rerun_state_machine,
        forward_backward,
        initialize_rerun_state_machine,
        install,
        model_parallel_cuda_manual_seed,
        parallel_state,
        tokens,
        uninstall,
        wrapped,
    )

    install()
    from megatron.fsdp.api.uneven_dtensor import uneven_dtensor_to_full_tensor
    from megatron.training import training

    instances = 1 if outer is None else 2
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    model_parallel_cuda_manual_seed(1234)
    initialize_rerun_state_machine()
    settings = {"num_distributed_optimizer_instances": instances, "outer_dp_sharding_strategy": outer or "no_shard"}
    config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True)
    try:
        model = wrapped(strategy, **settings)
        optimizer = training.get_megatron_optimizer(config, [model])
        forward_backward(model, tokens(0, 1))
        with torch.no_grad():
            whole = [uneven_dtensor_to_full_tensor(parameter.grad) for parameter in model.parameters()]
        expected = torch.stack([grad.double().square().sum() for grad in whole]).sum().sqrt().item()
        assert optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
        assert optimizer.count_zeros() == sum(grad.numel() - int(grad.count_nonzero()) for grad in whole)
        with torch.no_grad():
            weights = [uneven_dtensor_to_full_tensor(parameter) for parameter in model.parameters()]
        expected = torch.stack([weight.double().square().sum() for weight in weights]).sum().sqrt().item()
        assert training.calc_params_l2_norm([model]) == pytest.approx(expected, rel=1e-6)
    finally:
        uninstall()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(("strategy", "outer"), CASES)
def test_every_gradient_is_counted_once(ranks: RankPool, strategy: str, outer: str | None) -> None:
    ranks.run(2, _statistics, strategy, outer)
