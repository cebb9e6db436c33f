"""Collectives on flat tensors: three operations that weights and gradients are communicated by, and some others.

:class:`Collectives` has the three. Its implementations stand below it, and :func:`collectives_of` chooses between them.
``CONTRIBUTING.md`` shows how to write another one.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.backends import backend_of
from megatron.fsdp.helpers.codes import can_be_trained

ReduceOp = dist.ReduceOp.RedOpType
AllGather = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Any]
ReduceScatter = Callable[[torch.Tensor, torch.Tensor, ReduceOp, dist.ProcessGroup], Any]
AllReduce = Callable[[torch.Tensor, ReduceOp, dist.ProcessGroup], Any]


@dataclass
class Collectives:
    """How weights are all-gathered and gradients are reduced.

    The operations get flat, contiguous tensors, whose memory belongs to the engine. A rank's slice of a full tensor is
    that of its number in the group, and all slices have the same length. The operations run as a part of a task of the
    communication stream: on CUDA that stream is the current one, and on a CPU they run in a thread of their own and
    must have ended when they return. Every rank calls them in the same order. What they return is ignored.

    Attributes:
        all_gather: ``all_gather(output, shard, group)`` gathers the ranks' shards into ``output``, in rank order.
            ``shard`` may be this rank's slice of it.
        reduce_scatter: ``reduce_scatter(shard, flat, op, group)`` reduces ``flat`` over the ranks and writes this
            rank's slice to ``shard``, which may be its slice of ``flat``. ``flat`` may be overwritten. The operation is
            SUM, or AVG with ``average_in_collective``.
        all_reduce: ``all_reduce(flat, op, group)`` reduces ``flat`` in place.
        sums_wider: ``reduce_scatter`` can also sum into a shard of a wider dtype than what is sent. That shard is no
            part of ``flat``, which must not change.
        reduced: ``reduced(flat)`` is called with this rank's gradients, flat, once they are reduced over all axes.
    """

    all_gather: AllGather
    reduce_scatter: ReduceScatter
    all_reduce: AllReduce
    sums_wider: bool = False
    reduced: Callable[[torch.Tensor], Any] | None = None

    def replaced(
        self,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        all_reduce: AllReduce | None = None,
        reduced: Callable[[torch.Tensor], Any] | None = None,
    ) -> "Collectives":
        """A copy with other operations. None: those of this object."""
        given: dict[str, Any] = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
        given["reduced"] = reduced
        changed = {name: operation for name, operation in given.items() if operation is not None}
        # Gradients are sent in the dtype in which they are summed, unless the operation says that it can sum wider.
        if reduce_scatter is not None:
            changed["sums_wider"] = getattr(reduce_scatter, "sums_wider", False)
        return dataclasses.replace(self, **changed)


def all_reduce(flat: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
    """Reduce ``flat`` over the group in place."""
    with gloo.ensure_released(group, flat):
        dist.all_reduce(flat, op=op, group=group)


# The backend's own. torch 2.13 renamed the first two and warns at the old names.
BACKEND = Collectives(
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    all_reduce,
)

# Sends between every two ranks over gloo.
SENDS = Collectives(gloo.all_gather, gloo.reduce_scatter, all_reduce, sums_wider=True)


def exchanging(allocate: Callable[..., torch.Tensor], give_back: Callable[[torch.Tensor], None]) -> Collectives:
    """The backend's own, except that narrow gradients are exchanged, and summed in a wider dtype on the receiving rank.

    Args:
        allocate: Returns memory for what is received: ``allocate(numel, dtype, device)``.
        give_back: Takes it back.
    """

    def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
        if shard.dtype == flat.dtype:
            BACKEND.reduce_scatter(shard, flat, op, group)
            return
        received = allocate(flat.numel(), flat.dtype, flat.device)
        dist.all_to_all_single(received, flat, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, dtype=shard.dtype, out=shard)
        give_back(received)

    return dataclasses.replace(BACKEND, reduce_scatter=reduce_scatter, sums_wider=True)


def collectives_of(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """The collectives for tensors on ``device``, unless others are given."""
    return SENDS if backend_of(group, device).prefers_sends else BACKEND


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as it is sent: as bytes if not every backend sends its dtype."""
    return tensor if can_be_trained(tensor.dtype) else tensor.view(torch.uint8)


def broadcast(flat: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite ``flat`` with that of the rank whose number in the group is ``source``. It is contiguous."""
    flat = as_sent(flat.view(-1))
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


def send_ranges(
    ranges: list[torch.Tensor], group: dist.ProcessGroup, to: int | None = None, tag: int = 0
) -> list[dist.Work]:
    """Start to complete a tensor of which each rank of the group has a range, of any length.

    Args:
        ranges: In rank order: this rank's is filled, and the others are received.
        group: The ranks.
        to: The only rank that receives, by its number in the group. None: all receive.
        tag: Another one for each tensor that is on its way.
    """
    own, operations = group.rank(), list[dist.P2POp]()
    for peer in (peer for peer in range(group.size()) if peer != own):
        # Receives first: see :func:`megatron.fsdp.comm.gloo.reduce_scatter`.
        if to in (None, own) and ranges[peer].numel():
            operations.append(dist.P2POp(dist.irecv, ranges[peer], group=group, group_peer=peer, tag=tag))
        if to in (None, peer) and ranges[own].numel():
            operations.append(dist.P2POp(dist.isend, ranges[own], group=group, group_peer=peer, tag=tag))
    return dist.batch_isend_irecv(operations) if operations else []
