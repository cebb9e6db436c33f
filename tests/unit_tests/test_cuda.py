"""Tests that need a CUDA device: streams, the allocator's statistics, graphs, memory registered with NCCL."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.fsdp.comm import streams
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, adamw, batches, loss_of, main_weights, train_step
from tests.ranks import on_ranks
from tests.unit_tests.test_model_arguments import ReadsDecoupled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def _trained(steps: int, **arguments: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = TinyModel(width=64).cuda()
    sharded, optimizer = fully_shard(model, adamw(model.parameters()), fsdp_unit_modules=[Block], **arguments)
    for step in batches(steps=steps, per_step=2):
        for tokens in step:
            loss_of(sharded, tokens.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return main_weights(sharded)


@on_ranks(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_delays_on_either_stream_change_no_bit(strategy: str) -> None:
    """A stream that is late, or a computation that is, reads and writes the same as one that is not."""
    expected = _trained(4, zero_dp_strategy=strategy)
    run = streams.CudaStream.run

    def late(self: streams.CudaStream, task: Callable[[], None]) -> streams.Handle:
        def slow() -> None:
            torch.cuda._sleep(2_000_000)
            task()
            torch.cuda._sleep(2_000_000)

        return run(self, slow)

    def late_compute(self: streams.CudaStream, task: Callable[[], None]) -> streams.Handle:
        torch.cuda._sleep(3_000_000)
        return run(self, task)

    for replacement in (late, late_compute):
        with patch.object(streams.CudaStream, "run", replacement):
            found = _trained(4, zero_dp_strategy=strategy)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@on_ranks(1)
def test_allocator_holds_what_the_formulas_say() -> None:
    """Allocated memory equals the formula of docs/memory.md between steps, and stays below its bound within a step."""
    width, depth = 512, 6
    model = TinyModel(width=width, depth=depth).cuda().bfloat16()
    tokens = batches(1, 1)[0, 0].cuda()
    loss_of(model, tokens).backward()  # kernels' own memory
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - sum(p.numel() * p.element_size() for p in model.parameters())
    sharded, optimizer = fully_shard(
        model, adamw(model.parameters()), fsdp_unit_modules=[Block], mixed_precision_policy=FP32_GRADS
    )
    for _ in range(2):
        train_step(sharded, optimizer, tokens)
    sharded.synchronize_param_gather()
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated() - before
    whole = sum(group.layout.numel for group in sharded.engine.groups)
    assert resting == pytest.approx(12 * whole, rel=0.03)
    torch.cuda.reset_peak_memory_stats()
    loss_of(sharded, tokens).backward()
    torch.cuda.synchronize()
    units = [sum(group.layout.numel for group in unit.groups) for unit in sharded.engine.units]
    bound = resting + 4 * whole + 6 * units[0] + 10 * max(units[1:])
    activations = 64 * tokens.numel() * width * depth
    assert torch.cuda.max_memory_allocated() - before <= bound + activations + 2**20


@on_ranks(1)
def test_a_full_iteration_is_captured_in_a_graph() -> None:
    """A whole iteration, forward, backward and reduction, is captured and replayed, and trains as without."""
    torch.manual_seed(3)
    model = TinyModel(width=64).cuda()
    reference = copy.deepcopy(model)
    tokens = batches(1, 1)[0, 0].cuda()
    make = lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True)  # noqa: E731
    sharded, optimizer = fully_shard(model, make(model.parameters()), fsdp_unit_modules=[Block], cuda_graph_mode=True)
    reference_optimizer = make(reference.parameters())

    def iteration() -> None:
        loss_of(sharded, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(5):
        train_step(reference, reference_optimizer, tokens)
    weights = main_weights(sharded)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach().cpu(), rtol=1e-4, atol=1e-5)


@on_ranks(1)
def test_buffers_registered_with_nccl_change_no_bit() -> None:
    expected = _trained(3)
    found = _trained(3, nccl_ub=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _decoupled() -> MegatronFSDP:
    model = TinyModel(width=64).cuda().bfloat16()
    sharded, optimizer = fully_shard(
        model, ReadsDecoupled(model.parameters(), lr=0.1), fsdp_unit_modules=[Block], use_decoupled_grad=True
    )
    before = main_weights(sharded)
    loss_of(sharded, batches(1, 1)[0, 0].cuda()).backward()
    for entry in sharded.engine.params():
        assert local_shard(entry.main.decoupled_grad).is_cuda
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in main_weights(sharded).items())
    return sharded


@on_ranks(1)
def test_fused_optimizers_read_decoupled_gradients() -> None:
    assert isinstance(_decoupled(), nn.Module)
