"""Mistakes that tests inject into the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.buffers import reduction
from megatron.fsdp.buffers.gradients import GradientBuffer
from megatron.fsdp.buffers.pool import FixedPool, Writer
from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.buffers.weights import PlaneSet, WeightBuffer
from megatron.fsdp.comm.streams import CudaStream, Handle, Task, communication_stream
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.unit import Unit
from tests.simulated.device import DEVICE
from tests.simulated.streams import Stream


class Ended(Handle):
    """A handle whose wait has been left out."""

    def wait(self) -> None:
        pass

    @property
    def ended(self) -> bool:
        return True


def task_does_not_wait(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    """Run a task of a stream without its wait for the compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "wait_stream", lambda *unused: None)
        return run(stream, task)


def no_wait_for_unshard(wait: Callable[..., None], weights: WeightBuffer) -> None:
    """``WeightBuffer.wait`` that does not wait."""
    weights.unsharding = {Ended(): planes for planes in weights.unsharding.values()}
    wait(weights)


def waits_for_first_group(prepare: Callable[..., None], unit: Unit, direction: Direction) -> None:
    for group in unit.groups[1:]:
        no_wait_for_unshard(WeightBuffer.wait, group.weights)
    prepare(unit, direction)


def one_free_list(
    scratch: Callable[..., torch.Tensor], pool: FixedPool, numel: int, dtype: torch.dtype, device: Any, *unused: Any
) -> torch.Tensor:
    return scratch(pool, numel, dtype, device, Writer.TASKS)


def outer_does_not_wait(start_outer: Callable[..., None], gradients: GradientBuffer) -> None:
    handles, gradients.handles = gradients.handles, []
    start_outer(gradients)
    gradients.handles = handles


def shards_not_waited_for(unshard: Callable[..., None], weights: WeightBuffer, *args: Any) -> None:
    unshard(weights, *args[:-1], None)


def inner_waits_only(wait: Callable[..., None], gradients: GradientBuffer, outer: bool = True) -> None:
    wait(gradients, outer=False)
    gradients.outer_handles.clear()
    gradients._read_by_outer.clear()


def event_before_kernels(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    handle = run(stream, lambda: None)
    run(stream, task)
    return handle


def placed_given_back_by_task(
    over_inner: Callable[..., torch.Tensor], self: Reduction, placed: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    total = over_inner(self, placed, total)
    if reduction.memory_of(total) != reduction.memory_of(placed):
        self.pool.give_back(placed)
    return total


def weights_allocated_in_reduce_stream(
    unshard: Callable[..., Handle | None], weights: WeightBuffer, planes: PlaneSet
) -> Handle | None:
    communication_stream(DEVICE, dist.group.WORLD).run(weights.compute.allocate)
    return unshard(weights, planes)


def waits_for_unshard_stream(reduce: Callable[..., Handle], self: GradientBuffer, grads: list, last: bool) -> Handle:
    reduce(self, grads, last)
    self.handles[-1] = self.reduction.context.unshard_stream.run(lambda: None)
    return self.handles[-1]
