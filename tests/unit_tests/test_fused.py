"""Kernels that write weight gradients into buffers: the protocol of Transformer Engine and Megatron-Core."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import FSDPConfig, MegatronFSDP, MixedPrecisionPolicy
from tests.models import STRATEGIES, Block, TinyModel, batches, device, loss_of
from tests.ranks import RankPool


class _FusedLinear(torch.autograd.Function):
    """A linear layer whose backward writes the weight's gradient into ``get_main_grad()``, in that buffer's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself, which carries the protocol
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        to_input = grad @ weight
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        if not hasattr(weight, "__fsdp_param__"):
            return to_input, flat_grad.t() @ flat_x
        weight.main_grad = weight.get_main_grad()
        weight.main_grad.add_(flat_grad.float().t() @ flat_x.float())
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return to_input, torch.zeros_like(weight)
        return to_input, torch.full_like(weight, float("nan"))  # a placeholder that must not be used


class FusedModel(TinyModel):
    """The blocks' second layer, and the head, write their gradients by themselves."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied=tied)
        for block in self.blocks:
            block.down.forward = lambda x, layer=block.down: _FusedLinear.apply(x, layer.weight)
        self.head.forward = lambda x: _FusedLinear.apply(x, self.head.weight)
        if tied:
            self.head.weight.zero_out_wgrad = True


def _gradients(strategy: str, fused: bool, tied: bool, micro_batches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = FusedModel(tied).to(device())
    config = FSDPConfig(
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
        fused_weight_gradients=fused,
    )
    sharded = MegatronFSDP(model, config, fsdp_unit_modules=[Block])
    for tokens in batches(1, micro_batches * dist.get_world_size())[0, dist.get_rank() :: dist.get_world_size()]:
        loss_of(sharded, tokens).backward()
    for entry in sharded.engine.params():
        assert getattr(entry.compute, "main_grad", None) is None
        assert not getattr(entry.compute, "grad_added_to_main_grad", False)
    return {e.name: local_shard(e.main.grad).clone() for e in sharded.engine.params()}


def _same_gradients(strategy: str, tied: bool, micro_batches: int) -> None:
    fused = _gradients(strategy, True, tied, micro_batches)
    plain = _gradients(strategy, False, tied, micro_batches)
    for name, grad in plain.items():
        torch.testing.assert_close(fused[name], grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fused_gradients_equal_autograds(ranks: RankPool, strategy: str, tied: bool, micro_batches: int) -> None:
    ranks.run(2, _same_gradients, strategy, tied, micro_batches)


def _buffers_of_get_main_grad() -> None:
    model = FusedModel().to(device()).bfloat16()
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    sharded = MegatronFSDP(model, FSDPConfig(mixed_precision_policy=policy, fused_weight_gradients=True))
    weight = next(e.compute for e in sharded.engine.params() if e.name == "head.weight")
    first, second = weight.get_main_grad(), weight.get_main_grad()
    assert first.shape == weight.shape and first.dtype == torch.float32 and not first.any()
    assert first.data_ptr() != second.data_ptr()


def test_get_main_grad_gives_new_zeros_each_time(ranks: RankPool) -> None:
    """A weight may be used twice before its gradients are collected, and kernels may overwrite."""
    ranks.run(2, _buffers_of_get_main_grad)
