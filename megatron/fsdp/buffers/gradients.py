"""The gradients of one parameter group: collected, reduced, and handed to the optimizer as shards."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.flat_buffer import gap_views, slot_view
from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.comm.backends import backend_of
from megatron.fsdp.comm.collectives import all_reduce, exchange_and_sum, reduce_scatter
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import Handle
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.ownership import Ownership, within
from megatron.fsdp.sharding.precision import Dtypes
from megatron.fsdp.sharding.strategy import AxisStrategy, Sharding


@dataclass(frozen=True)
class GradientScaling:
    """How the sum over ranks becomes the gradient.

    Attributes:
        factor: What the sum is multiplied by.
        average: Let the collective divide by the number of ranks (and leave the rest of the factor to us).
        exchange: Over the inner axis, send gradients in the dtype that they are computed in, to be summed in
            ``grad_comm_dtype`` where they arrive, if that is wider.
    """

    factor: float
    average: bool
    exchange: bool

    @classmethod
    def of(cls, config: FSDPConfig, context: CommContext) -> "GradientScaling":
        """Scaling of a model's gradients."""
        # Over gloo parts are sent one by one in any case.
        exchange = config.exchange_gradients or backend_of(context.dp_group, context.device).prefers_sends
        return cls(
            factor=1.0 if config.calculate_per_token_loss else 1.0 / context.dp_group.size(),
            average=config.average_in_collective,
            # Fused kernels write gradients in main_grads_dtype: there is nothing narrower to send.
            exchange=exchange and not config.fused_weight_gradients,
        )


class GradientBuffer:
    """Gradients of one group between backward and the optimizer.

    A micro-batch's gradients are copied once, into the buffer that is reduced. Between micro-batches a rank keeps
    the sum of what was reduced over the inner axis (its shard) or, if gradients are not sharded, the sum of what was
    not reduced yet. Over the outer axis, if there is one, that sum is reduced once, after the last micro-batch.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        sharding: Where gradients and optimizer state live.
        scaling: How the sum over ranks becomes the gradient.
        axes: Process groups that gradients are reduced over.
        context: The stream that runs reductions, and the device that the gradients go to in the end.
        pool: Gives memory to the buffers that are reduced.

    Attributes:
        sent_dtype: What gradients of a single micro-batch are sent in over the inner axis.
        waiting: Gradients of earlier micro-batches, on this rank or another, wait for a reduction.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        sharding: Sharding,
        scaling: GradientScaling,
        axes: DataParallelAxes,
        context: CommContext,
        pool: Pool,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.sharding = sharding
        self._owned = Ownership.of(layout, sharding, axes)
        # Ranks that keep sums of micro-batches might not agree on what they send: those are in a wide dtype.
        narrow = scaling.exchange and sharding.inner.shards_gradients
        narrow &= dtypes.compute.itemsize < dtypes.grad_comm.itemsize
        self.sent_dtype = dtypes.compute if narrow else dtypes.grad_comm
        average = scaling.average and not narrow
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        factor = scaling.factor * axes.size if average else scaling.factor
        self._factor_placed = self._factor_before = self._factor_after = 1.0
        if dtypes.grad_comm == torch.float16:
            # The sum over many ranks may not fit: scale it before, at the cost of touching every element.
            self._factor_before = factor
        elif not sharding.inner.shards_optimizer:
            # There is no shard that would have fewer elements: scale while every element is touched anyway.
            self._factor_placed = factor
        else:
            self._factor_after = factor
        self._stream = context.stream
        self._inner = self._stream.group(axes.inner)
        self._outer = None if axes.outer is None else self._stream.group(axes.outer)
        self._pool = pool
        self._main_device = context.main_device
        self._partial: torch.Tensor | None = None
        self._inner_sum: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._handles: list[Handle] = []
        # Written by the computation, read by tasks: given back when the computation has waited for those.
        self._read_by_tasks: list[torch.Tensor] = []
        self._waiting_partial = self._waiting_outer = False

    def rescale(self, ratio: float) -> None:
        """Multiply gradients that are reduced from now on by ``ratio``, beside what their scaling says."""
        if self.dtypes.grad_comm == torch.float16:
            self._factor_before *= ratio
        elif not self.sharding.inner.shards_optimizer:
            self._factor_placed *= ratio
            if self._partial is not None:
                self._partial.mul_(ratio)
        else:
            self._factor_after *= ratio

    @property
    def waiting(self) -> bool:
        """See the class."""
        return self._waiting_partial or self._waiting_outer

    def accumulate(self, grads: list[torch.Tensor | None]) -> None:
        """Add a micro-batch's gradients to those that wait for a reduction.

        Args:
            grads: Gradient of each parameter, in its shape and any dtype, or None.
        """
        self._waiting_partial = True
        device = next((g.device for g in grads if g is not None), None)
        if device is None:
            return
        if self._partial is None:
            self._partial = self._pool.scratch(self.layout.numel, self.dtypes.main_grads, device, for_compute=True)
            _place(self._partial, self.layout, grads, self._factor_placed)
        else:
            _add(self._partial, self.layout, grads, self._factor_placed)

    def reduce(self, grads: list[torch.Tensor | None], device: torch.device, last: bool) -> Handle:
        """Start reducing a micro-batch's gradients, and those that wait.

        The computation itself places them in the buffer that is reduced, and so has no need of them any more when it
        goes on: were the stream to do that, they would pile up behind a stream that is late.

        Args:
            grads: Gradient of each parameter, or None for zeros; empty for none at all.
            device: Where the buffers are.
            last: Reduce over the outer axis too.
        """
        if self._partial is not None:
            self.accumulate(grads)
            placed, self._partial = self._partial, None
        else:
            placed = self._pool.scratch(self.layout.numel, self.sent_dtype, device, for_compute=True)
            _place(placed, self.layout, grads, self._factor_placed)
        grads.clear()
        self._waiting_partial = False
        self._waiting_outer = self._outer is not None and not last
        handle = self._stream.run(functools.partial(self._reduce, placed, last))
        self._handles.append(handle)
        return handle

    def reduce_waiting(self, device: torch.device) -> None:
        """Start reducing what waits, over the axes that it waits for."""
        if self._waiting_partial:
            self.reduce([], device, last=True)
        elif self._waiting_outer:
            self._waiting_outer = False
            self._handles.append(self._stream.run(self._finish))

    def _reduce(self, placed: torch.Tensor, last: bool) -> None:
        self._stream.keep([placed])
        flat = self._cast(placed, self.sent_dtype)
        if self._factor_before != 1.0:
            flat.mul_(self._factor_before)
        before = self._reduced if self._outer is None else self._inner_sum
        reduced = self._communicate(flat, self._inner, self.sharding.inner, self._owned.inner, before is None)
        if self._outer is None:
            total = self._reduced = _sum(before, reduced, self._factor_after)
        else:
            total = self._inner_sum = _sum(before, reduced, 1.0)
        self._drop([flat, reduced], total, placed)
        if last and self._outer is not None:
            self._finish()

    def _finish(self) -> None:
        """Reduce the micro-batches' sum over the outer axis."""
        assert self._inner_sum is not None, "every rank has reduced over the inner axis"
        inner_sum, self._inner_sum = self._inner_sum, None
        flat = self._cast(inner_sum, self.dtypes.grad_comm)
        own = within(self._owned.main, self._owned.inner)
        reduced = self._communicate(flat, self._outer, self.sharding.outer, own, self._reduced is None)
        self._reduced = _sum(self._reduced, reduced, self._factor_after)
        self._drop([inner_sum, flat, reduced], self._reduced, None)

    def _drop(self, tensors: list[torch.Tensor], keep: torch.Tensor, placed: torch.Tensor | None) -> None:
        """Give tensors back to the pool, if they have other memory than ``keep``.

        Args:
            tensors: Some may be views of others before them.
            keep: What is kept.
            placed: Written by the computation, which gives it back when it has waited for this task.
        """
        done = {_memory(keep)}
        if placed is not None and _memory(placed) not in done:
            done.add(_memory(placed))
            if self._pool.recycles:
                self._read_by_tasks.append(placed)
        for tensor in tensors:
            if _memory(tensor) not in done:
                done.add(_memory(tensor))
                self._pool.give_back(tensor)

    def _communicate(
        self, flat: torch.Tensor, group: dist.ProcessGroup | None, placements: AxisStrategy, own: slice, kept: bool
    ) -> torch.Tensor:
        """Reduce ``flat`` over one axis and return this rank's part of the sum in ``main_grads_dtype``.

        Args:
            flat: What to reduce; it is overwritten.
            group: Group of the axis.
            placements: Where gradients live on the axis.
            own: This rank's part of ``flat``.
            kept: The result will be kept, and must not keep ``flat`` alive.
        """
        assert group is not None
        if flat.dtype != self.dtypes.grad_comm:
            exact = self._pool.scratch(own.stop - own.start, self.dtypes.grad_comm, flat.device)
            exchange_and_sum(exact, flat, group, self._pool)
            total = self._cast(exact, self.dtypes.main_grads)
            if total is not exact:
                self._pool.give_back(exact)
            return total
        if not placements.shards_optimizer:
            all_reduce(flat, self._op, group)
            return self._cast(flat, self.dtypes.main_grads)
        if kept and flat.dtype == self.dtypes.main_grads:
            shard = self._pool.scratch(own.stop - own.start, flat.dtype, flat.device)
        else:
            shard = flat[own]
        reduce_scatter(shard, flat, self._op, group)
        # A shard that is cast is a copy of its own; one that is added to the sum is not kept.
        return self._cast(shard, self.dtypes.main_grads)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, for_compute: bool = False) -> torch.Tensor:
        """The tensor itself or, if the dtype is another, a copy in memory of the pool."""
        if tensor.dtype == dtype:
            return tensor
        return self._pool.scratch(tensor.numel(), dtype, tensor.device, for_compute).copy_(tensor)

    def wait(self) -> None:
        """Make the compute wait for the reductions that were started."""
        while self._handles:
            handle = self._handles[0]
            try:
                handle.wait()
            finally:
                # A wait that was interrupted leaves a reduction that goes on.
                if handle.done:
                    del self._handles[0]
        while self._read_by_tasks:
            self._pool.give_back(self._read_by_tasks.pop())

    def take(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The reduced gradients since the last call, flat like the main weights; None if nothing was reduced.

        They are on the main weights' device. Give them back when nothing reads them any more (:meth:`give_back`).

        Args:
            dtype: Of the result.
        """
        self.wait()
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return None
        taken = self._cast(reduced, dtype, for_compute=True)
        if taken.device != self._main_device:
            taken = taken.to(self._main_device)
        if taken is not reduced:
            self._pool.give_back(reduced)
        return taken

    def give_back(self, taken: torch.Tensor) -> None:
        """Nothing reads what :meth:`take` returned any more."""
        self._pool.give_back(taken)

    def clear(self) -> None:
        """Drop everything collected or reduced, also by reductions on their way, which may fail."""
        self._waiting_partial = self._waiting_outer = False
        partial, self._partial = self._partial, None
        if partial is not None:
            self._pool.give_back(partial)
        if self._handles:
            self._handles = [self._stream.run(self._forget)]
        else:
            self._forget()

    def _forget(self) -> None:
        dropped = [total for total in (self._inner_sum, self._reduced) if total is not None]
        self._inner_sum = self._reduced = None
        for total in dropped:
            self._pool.give_back(total)


def _sum(total: torch.Tensor | None, reduced: torch.Tensor, factor: float) -> torch.Tensor:
    """``total + factor * reduced``, in the memory of one of them."""
    if total is not None:
        return total.add_(reduced, alpha=factor)
    return reduced.mul_(factor) if factor != 1.0 else reduced


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(flat: torch.Tensor, layout: Layout, grads: list[torch.Tensor | None], factor: float) -> None:
    """Write gradients times ``factor`` into a flat buffer of undefined content; what has no gradient becomes zero."""
    present = [i for i, g in enumerate(grads) if g is not None]
    absent = [slot_view(flat, layout, i) for i in range(len(layout.slots)) if i >= len(grads) or grads[i] is None]
    zeros = gap_views(flat, layout) + absent
    if zeros:
        torch._foreach_zero_(zeros)
    if not present:
        return
    views, given = [slot_view(flat, layout, i) for i in present], [g for g in grads if g is not None]
    if factor != 1.0 and all(g.dtype == flat.dtype for g in given):
        for view, grad in zip(views, given, strict=True):
            torch.mul(grad, factor, out=view)
        return
    torch._foreach_copy_(views, given)
    if factor != 1.0:
        torch._foreach_mul_(views, factor)


def _add(flat: torch.Tensor, layout: Layout, grads: list[torch.Tensor | None], factor: float) -> None:
    present = [i for i, g in enumerate(grads) if g is not None]
    if present:
        views, given = [slot_view(flat, layout, i) for i in present], [g for g in grads if g is not None]
        torch._foreach_add_(views, given, alpha=factor)
