"""16-bit compute with wider main weights and gradients."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.comm.backends import Backend
from megatron.fsdp.state.consistency import inconsistent_weights
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.exchanges import both_exchanges, seen
from tests.models import (
    STRATEGIES,
    TinyModel,
    adamw,
    assert_same_gradients,
    batches,
    device,
    loss_of,
    main_weights,
    shard,
)
from tests.ranks import RankPool, on_ranks
from tests.unit_tests.test_dtypes import Reference

pytestmark = pytest.mark.every_strategy

FP32, BF16 = torch.float32, torch.bfloat16


def _train(strategy: str, grad_dtype: torch.dtype, **arguments: bool) -> None:
    model = TinyModel().to(device(), BF16)
    reference = Reference(copy.deepcopy(model), grad_dtype)
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=grad_dtype)
    sharded, optimizer = shard(model, strategy, mixed_precision_policy=policy, **arguments)
    for data in batches(steps=3, per_step=dist.get_world_size()):
        reference.step(data)
        loss_of(sharded, data[dist.get_rank()]).backward()
        assert all(p.dtype == FP32 and p.grad.dtype == FP32 for p in sharded.parameters())
        optimizer.step()
        optimizer.zero_grad()
    # Two ranks add two gradients, in whichever order: in fp32 the sums are equal, in bf16 a bit may differ.
    tolerance = 2e-6 if grad_dtype is FP32 else 2e-3
    for name, weight in main_weights(sharded).items():
        expected = reference.weights[name].detach().cpu()
        torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
def test_bf16_compute_with_fp32_main_weights(ranks: RankPool, strategy: str, grad_dtype: torch.dtype) -> None:
    ranks.run(2, _train, strategy, grad_dtype)


@on_ranks(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks share a device over gloo, which is not for CUDA")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_sent_in_bf16_and_summed_in_fp32(strategy: str) -> None:
    with patch.object(Backend, "prefers_sends", False):
        original = torch.distributed.all_to_all_single
        with patch.object(torch.distributed, "all_to_all_single", side_effect=original) as exchanged:
            _train(strategy, FP32, exchange_gradients=True)
    sent = {call.args[1].dtype for call in exchanged.call_args_list}
    assert sent == ({BF16} if strategy in ("optim_grads", "optim_grads_params") else set())


@on_ranks(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="for tensors in host memory")
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_gradients_are_always_summed_in_fp32_over_gloo(strategy: str) -> None:
    with seen("reduce_scatter") as calls:
        _train(strategy, FP32)
    assert {flat.dtype for _, flat, *_ in calls} == {FP32 if strategy == "optim" else BF16}


@on_ranks(2)
@both_exchanges("strategy", STRATEGIES)
@pytest.mark.parametrize("main", [BF16, None], ids=["fp32 model", "bf16 model"])
def test_main_weights_narrower_than_compute_weights(strategy: str, main: torch.dtype | None) -> None:
    """Equal to a copy that computes with its 16-bit weights in fp32, and updates those by gradients in 16 bits."""
    model = TinyModel().to(device(), BF16 if main is None else FP32)
    computing = copy.deepcopy(model).float()
    weights = [nn.Parameter(p.detach().to(BF16)) for p in computing.parameters()]
    sharded, optimizer = shard(
        model,
        strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main, main_grads_dtype=FP32, compute_dtype=FP32),
    )
    reference = adamw(weights)
    for step in batches(3, dist.get_world_size()):
        with torch.no_grad():
            for own, weight in zip(computing.parameters(), weights, strict=True):
                own.copy_(weight)
        expected = torch.stack([loss_of(computing, batch) for batch in step]).mean()
        computing.zero_grad()
        expected.backward()
        for own, weight in zip(computing.parameters(), weights, strict=True):
            weight.grad = own.grad.to(BF16)
        loss = loss_of(sharded, step[dist.get_rank()])
        loss.backward()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    assert {p.dtype for p in sharded.parameters()} == {BF16}
    assert not inconsistent_weights(sharded.engine)


@on_ranks(2)
@pytest.mark.parametrize("comm", [FP32, BF16, torch.float16])
def test_gradients_are_reduced_in_grad_comm_dtype(comm: torch.dtype) -> None:
    with seen("reduce_scatter") as calls:
        model = TinyModel().to(device())
        policy = MixedPrecisionPolicy(main_grads_dtype=FP32, grad_comm_dtype=comm)
        sharded, _ = fully_shard(model, adamw(model.parameters()), mixed_precision_policy=policy)
        data = batches(1, 2)[0]
        loss_of(sharded, data[0]).backward()
        loss_of(sharded, data[1]).backward()
    assert {flat.dtype for _, flat, *_ in calls} == {comm}
    reference = TinyModel().to(device())
    reference.load_state_dict(main_weights(sharded))
    (loss_of(reference, data[0]) + loss_of(reference, data[1])).backward()
    tolerance = 1e-6 if comm is FP32 else 1e-2
    assert_same_gradients(sharded, reference, tolerance, tolerance)
