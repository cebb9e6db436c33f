"""The ranges of a flat buffer that a rank holds, with one or two data-parallel axes. No tensors are involved.

The inner axis shards the buffer. If the optimizer state is sharded over the outer axis as well, that axis shards
each inner rank's range again. With two outer and two inner ranks, ``(outer, inner)``::

    | inner rank 0            | inner rank 1            |
    | (0, 0)     | (1, 0)     | (0, 1)     | (1, 1)     |
"""

from dataclasses import dataclass

import torch.distributed as dist

from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.strategy import Sharding


@dataclass(frozen=True)
class Ownership:
    """Ranges of a flat buffer, in elements.

    Attributes:
        inner: The range that this rank holds of buffers sharded over the inner axis; the full buffer if none is.
        main: The range of its main weights, optimizer state and final gradients: ``inner`` or a part of it.
        index: Index of ``main`` among the layout's shards; None if it is the full buffer.
    """

    inner: slice
    main: slice
    index: int | None

    @staticmethod
    def of(layout: Layout, sharding: Sharding, axes: DataParallelAxes) -> "Ownership":
        """The ranges of this rank, for a layout with ``shards_of(sharding, axes)`` shards."""
        whole = slice(0, layout.numel)
        if not sharding.inner.shards_optimizer:
            return Ownership(whole, whole, None)
        per_inner = layout.num_shards // axes.inner.size()
        first = axes.inner.rank() * per_inner
        inner = slice(first * layout.shard_numel, (first + per_inner) * layout.shard_numel)
        if sharding.outer.shards_optimizer and axes.outer is not None:
            first += axes.outer.rank()
        return Ownership(inner, layout.shard(first), first)


def shards_of(sharding: Sharding, axes: DataParallelAxes) -> int:
    """Number of shards in a group's layout: 1, which needs no padding, if every rank holds the full buffer."""
    if not sharding.inner.shards_optimizer:
        return 1
    outer = axes.outer.size() if axes.outer is not None and sharding.outer.shards_optimizer else 1
    return axes.inner.size() * outer


def sharing_ranks(sharding: Sharding, axes: DataParallelAxes) -> tuple[dist.ProcessGroup, list[int]]:
    """The ranks that together hold main weights once, if these are sharded.

    Returns:
        Their process group, and for each rank of it the index of its range among the layout's shards.
    """
    if axes.outer is None or not sharding.outer.shards_optimizer:
        return axes.inner, list(range(axes.inner.size()))
    by_shard = axes.mesh.mesh.T.flatten().tolist()
    return axes.dp_group, [by_shard.index(rank) for rank in dist.get_process_group_ranks(axes.dp_group)]


def within(part: slice, whole: slice) -> slice:
    """The range ``part`` relative to the start of ``whole``, which contains it."""
    return slice(part.start - whole.start, part.stop - whole.start)
