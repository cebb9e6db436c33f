"""Which part of a flat buffer a rank holds of what, with one or two data-parallel axes. Pure arithmetic.

The inner axis divides the buffer; where the optimizer state is sharded over the outer axis too, that divides each inner
rank's part again. Two outer times two inner ranks, ``(outer, inner)``::

    | inner rank 0            | inner rank 1            |
    | (0, 0)     | (1, 0)     | (0, 1)     | (1, 1)     |
"""

from dataclasses import dataclass

from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.strategy import Sharding


@dataclass(frozen=True)
class Ownership:
    """Parts of a flat buffer, as elements from its beginning.

    Attributes:
        inner: What this rank holds of what is sharded over the inner axis; everything if nothing is.
        main: Its main weights, optimizer state and final gradients: ``inner``, or a part of it.
        index: Which of the layout's shards ``main`` is; None if it is the whole buffer.
    """

    inner: slice
    main: slice
    index: int | None

    @staticmethod
    def of(layout: Layout, sharding: Sharding, axes: DataParallelAxes) -> "Ownership":
        """The parts that this rank holds; the layout has ``shards_of(sharding, axes)`` shards."""
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
    """How many shards a group's layout has: one, which needs no padding, if all ranks hold everything."""
    if not sharding.inner.shards_optimizer:
        return 1
    outer = axes.outer.size() if axes.outer is not None and sharding.outer.shards_optimizer else 1
    return axes.inner.size() * outer


def within(part: slice, whole: slice) -> slice:
    """``part`` counted from the beginning of ``whole``, which contains it."""
    return slice(part.start - whole.start, part.stop - whole.start)
