"""One flat storage with a layout, and the collectives that run on it. No copies around any of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.streams import Stream
from megatron.fsdp.dtensor.placements import contiguous_stride
from megatron.fsdp.sharding.layout import Layout

# torch 2.13 renamed these two and warns at the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather flat shards in rank order into ``output``; ``shard`` may be this rank's part of ``output``."""
    if gloo.is_for(group, output.device):
        gloo.all_gather(output, shard, group)
    else:
        _all_gather(output, shard, group=group)


def reduce_scatter(
    shard: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce ``flat`` over the group into this rank's ``shard``, which may be this rank's part of ``flat``."""
    if op == dist.ReduceOp.SUM and gloo.is_for(group, flat.device):
        gloo.reduce_scatter(shard, flat, group)
    else:
        _reduce_scatter(shard, flat, op=op, group=group)


def exchange_and_sum(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, pool: Pool) -> None:
    """Sum ``flat`` over the group into this rank's ``shard``, in the dtype of ``shard``, from parts sent as they are.

    Args:
        shard: Apart from ``flat``, in the same or a wider dtype.
        flat: What each rank adds; kept.
        group: The ranks that take part.
        pool: Gives memory to what is received.
    """
    if gloo.is_for(group, flat.device):
        gloo.reduce_scatter(shard, flat, group)
        return
    received = pool.scratch(flat.numel(), flat.dtype, flat.device)
    dist.all_to_all_single(received, flat, group=group)
    torch.sum(received.view(group.size(), -1), dim=0, dtype=shard.dtype, out=shard)
    pool.give_back(received)


def all_reduce(flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce ``flat`` over the group in place."""
    with gloo.wait_for_gloo_references(group, flat):
        dist.all_reduce(flat, op=op, group=group)


class FlatBuffer:
    """All parameters of a group in one flat tensor, whose memory may come and go while its views stay.

    Args:
        layout: Where each parameter lies.
        dtype: Element type.
        device: Where the memory is.
        pool: Gives the memory and takes it back; None: the buffer has memory of its own throughout.

    Attributes:
        flat: The whole buffer, one-dimensional, ``layout.numel`` elements.
        views: One view per parameter, in its shape.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, pool: Pool | None) -> None:
        self.layout = layout
        if pool is None:
            self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        else:
            self.flat = pool.reserve(layout.numel, dtype, device)
        self.views = [slot_view(self.flat, layout, index) for index in range(len(layout.slots))]
        self._pool = pool

    def allocate(self) -> None:
        """Make memory available. The content is undefined."""
        if self._pool is not None:
            self._pool.allocate(self.flat)

    def free(self) -> None:
        """Give the memory back."""
        if self._pool is not None:
            self._pool.free(self.flat)


def slot_view(flat: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """Parameter ``index`` as a view of a whole flat buffer."""
    slot = layout.slots[index]
    return part_view(flat, slot.offset, slot.shape)


def part_view(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of a flat tensor from ``offset`` on, in ``shape``."""
    return flat.as_strided(shape, contiguous_stride(shape), flat.storage_offset() + offset)


def gap_views(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The parts of a whole flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for slot in sorted(layout.slots, key=lambda s: s.offset):
        if slot.offset > end:
            gaps.append(flat[end : slot.offset])
        end = max(end, slot.end)
    return [*gaps, flat[end:]] if end < layout.numel else gaps


def exchange_numbers(
    stream: Stream, group: dist.ProcessGroup, device: torch.device, numbers: list[int]
) -> list[list[int]]:
    """Every rank's list of integers, in rank order; the lists may differ in length."""
    if dist.get_backend(group) == "fake":
        return [numbers]
    size = torch.tensor(len(numbers), dtype=torch.int64, device=device)
    stream.run(functools.partial(all_reduce, size, dist.ReduceOp.MAX, group)).wait()
    # The first element is the length.
    mine = torch.zeros(int(size) + 1, dtype=torch.int64, device=device)
    mine[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * mine.numel(), dtype=torch.int64, device=device)
    stream.run(functools.partial(all_gather, everyone, mine, group)).wait()
    return [row[1 : row[0] + 1] for row in everyone.view(group.size(), -1).tolist()]
