"""How gradients in a flat buffer are reduced over the data-parallel ranks."""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.flat_buffer import gap_views, slot_view
from megatron.fsdp.buffers.pool import Pool, Writer
from megatron.fsdp.comm.backends import require_group
from megatron.fsdp.comm.collectives import Collectives, collectives_of, exchanging
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.ownership import Ownership, within
from megatron.fsdp.sharding.precision import Dtypes
from megatron.fsdp.sharding.strategy import Sharding


class Stage(Enum):
    """When gradients are multiplied by the factor that makes the sum over ranks the gradient."""

    PLACED = "when they are written into a flat buffer"
    SENT = "before they are reduced"
    SUMMED = "after they are reduced"


@dataclass(frozen=True)
class _Axis:
    """One data-parallel axis.

    Attributes:
        group: Its ranks. None: all is summed already, and only ``Collectives.reduced`` is called.
        scatters: A rank gets its shard of the sum. Otherwise every rank gets the full sum.
        own: This rank's slice of the buffer that is reduced.
        writer: The tasks that reduce over it.
    """

    group: dist.ProcessGroup | None
    scatters: bool
    own: slice
    writer: Writer


class Reduction:
    """Turns one flat buffer of gradients into this rank's shard of their sum: casts, scaling, collectives.

    Nothing but the factor changes between calls. The collectives run in the caller's thread and on the current stream:
    :class:`megatron.fsdp.buffers.gradients.GradientBuffer` calls :meth:`over_inner` and :meth:`over_outer` in tasks of
    ``stream``, and everything else in the computation.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        sharding: Where gradients and optimizer state live.
        axes: Process groups that gradients are reduced over.
        config: Settings of the unit.
        context: How the model communicates.
        pool: Provides the memory of temporary buffers.

    Attributes:
        stream: Runs reductions over the inner axis.
        outer_stream: Runs those over the outer axis.
        context: How the model communicates.
        collectives: How gradients are communicated.
        to_host: Reduced gradients are copied to host memory.
        sent_dtype: Dtype in which gradients of a single micro-batch are sent over the inner axis.
        inner: The inner axis.
        outer: The outer axis; None if there is none.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        sharding: Sharding,
        axes: DataParallelAxes,
        config: FSDPConfig,
        context: CommContext,
        pool: Pool,
    ) -> None:
        self.pool = pool
        self.stream, self.outer_stream = context.stream, context.outer_stream
        self.context = context
        self.to_host = context.offloads and config.offloads_gradients
        self._layout = layout
        self._device = context.device
        owned = Ownership.of(layout, sharding, axes)
        self.inner = _Axis(self.stream.group(axes.inner), sharding.inner.shards_optimizer, owned.inner, Writer.TASKS)
        self.outer: _Axis | None = None
        if axes.outer is not None:
            own = within(owned.main, owned.inner)
            writer = Writer.TASKS if self.outer_stream is self.stream else Writer.OUTER_TASKS
            group = self.outer_stream.group(axes.outer)
            self.outer = _Axis(group, sharding.outer.shards_optimizer, own, writer)
        # Fused kernels write gradients in main_grads_dtype, so there is nothing narrower to send. Ranks that keep sums
        # of micro-batches might differ in what they send, so these are sent in the wide dtype.
        self._may_narrow = not config.fused_weight_gradients and sharding.inner.shards_gradients
        collectives = collectives_of(context.dp_group, context.device)
        if config.exchange_gradients and not collectives.sums_wider:
            collectives = exchanging(pool.scratch, pool.give_back)
        self._averages, self._size = config.average_in_collective, axes.size
        self._scale = 1.0 if config.calculate_per_token_loss else 1.0 / context.dp_group.size()
        self._gets_full_sum = not sharding.inner.shards_optimizer
        self.collectives = collectives
        self.use(dtypes)

    def use(self, dtypes: Dtypes, collectives: Collectives | None = None) -> None:
        """Reduce in ``dtypes`` from now on. No gradient may be placed already, and no reduction be in flight.

        Args:
            dtypes: Dtypes of the group.
            collectives: How gradients are communicated. None: as before.
        """
        self.dtypes = dtypes
        self.collectives = collectives or self.collectives
        if self.collectives.reduced is not None and self.outer is None:
            # Called once, with the sum of all micro-batches, as the outer axis is reduced over.
            self.outer = _Axis(None, scatters=False, own=self.inner.own, writer=Writer.TASKS)
        narrower = dtypes.compute.itemsize < dtypes.grad_comm.itemsize
        narrow = narrower and self._may_narrow and self.collectives.sums_wider
        self.sent_dtype = dtypes.compute if narrow else dtypes.grad_comm
        average = self._averages and not narrow
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._factor = self._scale * (self._size if average else 1)
        if dtypes.grad_comm == torch.float16:
            # The sum over many ranks may overflow: scale before it, at the cost of touching every element.
            self._stage = Stage.SENT
        elif self._gets_full_sum:
            # A rank gets the full sum, so scaling it would save nothing. Scale where every element is written anyway.
            self._stage = Stage.PLACED
        else:
            self._stage = Stage.SUMMED

    def _factor_at(self, stage: Stage) -> float:
        return self._factor if stage is self._stage else 1.0

    def rescale(self, ratio: float) -> tuple[float, float]:
        """Multiply gradients that are placed from now on by ``ratio``.

        Returns:
            The factors for gradients that are placed already, and for their sum over the inner axis of two.
        """
        self._scale *= ratio
        self._factor *= ratio
        return ratio if self._stage is Stage.PLACED else 1.0, 1.0 if self._stage is Stage.SUMMED else ratio

    @property
    def factor_of_mean(self) -> float:
        """Factor from the mean over the ranks that hold a parameter to the gradient of its reads."""
        return self._factor * (1 if self._op == dist.ReduceOp.AVG else self._size)

    # Before the reduction, in the computation ------------------------------------------------------------------

    def new_flat(self, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer of undefined content for gradients that the computation writes."""
        return self.pool.scratch(self._layout.numel, dtype, self._device, Writer.COMPUTE)

    def slot(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """The gradient of parameter ``i`` as a view of a flat buffer."""
        return slot_view(flat, self._layout, i)

    def place(self, grads: list[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Fill a flat buffer with gradients.

        Args:
            grads: Gradient of each parameter in its shape, or None for zeros; an empty list for zeros only. A gradient
                that is a view of its slot in ``flat`` stays where it is.
            flat: The result of :meth:`new_flat`.
        """
        views = [self.slot(flat, i) for i in range(len(self._layout.slots))]
        present = [(view, grad) for view, grad in zip(views, grads, strict=False) if grad is not None]
        absent = [view for i, view in enumerate(views) if i >= len(grads) or grads[i] is None]
        if zeros := gap_views(flat, self._layout) + absent:
            torch._foreach_zero_(zeros)
        factor = self._factor_at(Stage.PLACED)
        if factor != 1.0 and all(grad.dtype == flat.dtype for _, grad in present):
            for view, grad in present:
                torch.mul(grad, factor, out=view)
            return
        elsewhere = [(view, grad) for view, grad in present if grad.data_ptr() != view.data_ptr()]
        if elsewhere:
            torch._foreach_copy_([view for view, _ in elsewhere], [grad for _, grad in elsewhere])
        if present and factor != 1.0:
            torch._foreach_mul_([view for view, _ in present], factor)

    def add(self, flat: torch.Tensor, grads: list[torch.Tensor | None]) -> None:
        """Add gradients to a buffer that :meth:`place` has filled."""
        present = [(self.slot(flat, i), grad) for i, grad in enumerate(grads) if grad is not None]
        if present:
            views, given = zip(*present, strict=True)
            torch._foreach_add_(views, given, alpha=self._factor_at(Stage.PLACED))

    # The reduction, in tasks of the stream ---------------------------------------------------------------------

    def over_inner(self, placed: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """Reduce gradients of one or several micro-batches over the inner axis and add this rank's slice to ``total``.

        Args:
            placed: The gradients, which are overwritten. The caller keeps this buffer until compute has waited for the
                task, because compute allocated it.
            total: The sum so far.

        Returns:
            The sum in ``main_grads_dtype``, which may share memory with ``placed`` if ``total`` is None.
        """
        flat = self.cast(placed, self.sent_dtype)
        if (factor := self._factor_at(Stage.SENT)) != 1.0:
            flat.mul_(factor)
        return self._over(self.inner, flat, placed, total)

    def over_outer(self, inner_sum: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """Reduce the micro-batches' sum over the outer axis and add this rank's slice to ``total``.

        Args:
            inner_sum: The result of :meth:`over_inner`. The caller keeps it until compute has waited for the task: it
                may be what compute has allocated.
            total: The sum so far.

        Returns:
            The sum in ``main_grads_dtype``.
        """
        assert self.outer is not None
        flat = self.cast(inner_sum, self.dtypes.grad_comm, self.outer.writer)
        return self._over(self.outer, flat, inner_sum, total)

    def _over(self, axis: _Axis, flat: torch.Tensor, given: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """Reduce ``flat``, which is ``given`` or a copy of it, over an axis, and add this rank's slice to ``total``."""
        reduced = self._communicate(flat, axis, total is None)
        is_last = axis is (self.outer or self.inner)
        factor = self._factor_at(Stage.SUMMED) if is_last else 1.0
        if is_last and self.collectives.reduced is not None:
            self.collectives.reduced(reduced.mul_(factor))
            factor = 1.0
        total = _sum(total, reduced, factor)
        self._give_back([flat, reduced], but=[total, given])
        return total

    def _communicate(self, flat: torch.Tensor, axis: _Axis, kept: bool) -> torch.Tensor:
        """Reduce ``flat``, which is overwritten, and return this rank's slice of the sum in ``main_grads_dtype``.

        Args:
            flat: Gradients, or sums of them.
            axis: The axis to reduce over.
            kept: The result will be kept, and must not keep ``flat`` alive.
        """
        dtype, sums_in = self.dtypes.main_grads, self.dtypes.grad_comm
        if axis.group is None:
            return self.cast(flat, dtype, axis.writer)
        require_group(axis.group)
        if not axis.scatters:
            self.collectives.all_reduce(flat, self._op, axis.group)
            return self.cast(flat, dtype, axis.writer)
        # In place unless the sum is wider or the result is kept. A shard in a different dtype is a copy anyway.
        apart = flat.dtype != sums_in or (kept and flat.dtype == dtype)
        numel = axis.own.stop - axis.own.start
        shard = self.pool.scratch(numel, sums_in, flat.device, axis.writer) if apart else flat[axis.own]
        self.collectives.reduce_scatter(shard, flat, self._op, axis.group)
        total = self.cast(shard, dtype, axis.writer)
        if apart and total is not shard:
            self.pool.give_back(shard)
        return total

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, writer: Writer = Writer.TASKS) -> torch.Tensor:
        """The tensor itself, or a copy in memory of the pool if it has a different dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self.pool.scratch(tensor.numel(), dtype, tensor.device, writer).copy_(tensor)

    def _give_back(self, tensors: list[torch.Tensor], but: list[torch.Tensor]) -> None:
        """Give tensors back to the pool, some of which may be views of others, except the memory of ``but``."""
        memory = {memory_of(tensor) for tensor in but}
        for tensor in tensors:
            if memory_of(tensor) not in memory:
                memory.add(memory_of(tensor))
                self.pool.give_back(tensor)


def _sum(total: torch.Tensor | None, reduced: torch.Tensor, factor: float) -> torch.Tensor:
    """``total + factor * reduced``, in the memory of one of them."""
    if total is not None:
        return total.add_(reduced, alpha=factor)
    return reduced.mul_(factor) if factor != 1.0 else reduced


def memory_of(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins: equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()
