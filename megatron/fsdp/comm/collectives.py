"""Collectives on flat tensors. None of them copies what it sends, beyond what the backend itself copies."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.backends import backend_of

# torch 2.13 renamed these two and warns at the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ScratchMemory(Protocol):
    """Lends flat tensors of undefined content, as the buffers' pools do."""

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lend a tensor."""

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return a tensor that was lent."""


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather flat shards in rank order into ``output``; ``shard`` may be this rank's slice of it."""
    if backend_of(group, output.device).prefers_sends:
        gloo.all_gather(output, shard, group)
    else:
        _all_gather(output, shard, group=group)


def reduce_scatter(
    shard: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce ``flat`` over the group into ``shard``, which may be this rank's slice of it."""
    if op == dist.ReduceOp.SUM and backend_of(group, flat.device).prefers_sends:
        gloo.reduce_scatter(shard, flat, group)
    else:
        _reduce_scatter(shard, flat, op=op, group=group)


def exchange_and_sum(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, pool: ScratchMemory) -> None:
    """Sum ``flat`` over the group into this rank's ``shard``, which may have a wider dtype than what is sent.

    Args:
        shard: This rank's slice of the sum, in the same or a wider dtype. It shares no memory with ``flat``.
        flat: This rank's summand, which is not changed.
        group: The ranks.
        pool: Provides the memory of the slices that are received.
    """
    if backend_of(group, flat.device).prefers_sends:
        gloo.reduce_scatter(shard, flat, group)
        return
    received = pool.scratch(flat.numel(), flat.dtype, flat.device)
    dist.all_to_all_single(received, flat, group=group)
    torch.sum(received.view(group.size(), -1), dim=0, dtype=shard.dtype, out=shard)
    pool.give_back(received)


def all_reduce(flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Reduce ``flat`` over the group in place."""
    with gloo.ensure_released(group, flat):
        dist.all_reduce(flat, op=op, group=group)


def broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite ``flat`` with that of the rank whose number in the group is ``source``."""
    with gloo.ensure_released(group, flat):
        dist.broadcast(flat, group=group, group_src=source)


def all_to_all(
    output: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> None:
    """Send consecutive parts of ``flat`` to the ranks of the group, and receive theirs into ``output``.

    Args:
        output: The parts that this rank receives, in the order of their senders.
        flat: The parts that this rank sends, in the order of their receivers.
        received: Number of elements of each part of ``output``, by sender.
        sent: Number of elements of each part of ``flat``, by receiver.
        group: The ranks.
    """
    with gloo.ensure_released(group, output, flat):
        dist.all_to_all_single(output, flat, received, sent, group=group)
