"""Accumulates and reduces the gradients of one parameter group, from autograd's gradients to the optimizer's."""

import functools
from collections.abc import Callable, Sequence
from enum import Flag, auto

import torch

from megatron.fsdp.buffers.pool import Writer
from megatron.fsdp.buffers.reduction import Reduction, memory_of
from megatron.fsdp.comm.backends import runs_ahead
from megatron.fsdp.comm.streams import Handle


class Owed(Flag):
    """The axes over which gradients must still be reduced, even if only other ranks have gradients."""

    NOTHING = 0
    INNER = auto()
    OUTER = auto()


class GradientBuffer:
    """Holds the sums of a group's gradients between reductions, which ``reduction`` performs.

    A micro-batch's gradients are copied once, into the buffer that is reduced, or not at all where kernels write them
    there. Between micro-batches, a rank keeps its shard of the gradients reduced over the inner axis or, if gradients
    are not sharded, the sum of unreduced gradients. If there is an outer axis, that sum is reduced over it once, after
    the last micro-batch.

    Args:
        reduction: How gradients are reduced.

    Attributes:
        unreduced: Sum of unreduced gradients; None if there are none. Only compute uses it.
        for_kernels: The flat buffer that fused kernels write this micro-batch's gradients into; None unless they do.
        inner_sum: Sum of gradients reduced over the inner axis only. Only tasks of the stream use it.
        reduced: Sum of gradients reduced over both axes. Tasks use it, and compute after a wait.
        owed: The axes to reduce over before the optimizer's step.
        handles: Of the reductions in flight, oldest first; without those in ``outer_handles``.
        outer_handles: Of the reductions over the outer axis that have a stream for themselves.
        has_outer_stream: Whether these have one.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.unreduced: torch.Tensor | None = None
        self.for_kernels: torch.Tensor | None = None
        self.inner_sum: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.owed = Owed.NOTHING
        self.handles: list[Handle] = []
        self.outer_handles: list[Handle] = []
        # On a CPU, a buffer is free once its collective has ended, before the next unit is unsharded. Buffers with
        # fixed addresses are returned in an order that is the same on all ranks.
        self._holds = reduction.pool.is_fixed or runs_ahead(reduction.context.device)
        self._read: list[torch.Tensor] = []
        self._read_by_outer: list[torch.Tensor] = []
        self.has_outer_stream = reduction.outer is not None and reduction.outer_stream is not reduction.stream

    def rescale(self, ratio: float) -> None:
        """Multiply the factor by ``ratio`` for later gradients, and for those that wait for another micro-batch."""
        of_placed, of_inner_sum = self.reduction.rescale(ratio)
        self.wait()
        if self.unreduced is not None:
            self.unreduced.mul_(of_placed)
        if self.reduction.outer is None and self.reduced is not None:
            self.reduced.mul_(ratio)
        if self.inner_sum is not None:
            self.inner_sum.mul_(of_inner_sum)

    def for_kernel(self, i: int) -> torch.Tensor:
        """Memory of undefined content for this micro-batch's gradient of parameter ``i``, in ``main_grads_dtype``.

        It is the gradient's place in the buffer that is reduced. The caller passes the tensor to :meth:`accumulate` or
        :meth:`reduce`, or another gradient in its place.
        """
        if self.for_kernels is None:
            self.for_kernels = self.reduction.new_flat(self.reduction.dtypes.main_grads)
        return self.reduction.slot(self.for_kernels, i)

    def accumulate(self, grads: list[torch.Tensor | None]) -> None:
        """Add a micro-batch's gradients to the unreduced sum.

        Args:
            grads: Gradient of each parameter, in its shape and any dtype, or None.
        """
        self.owed |= Owed.INNER
        if self.unreduced is not None:
            self.reduction.add(self.unreduced, grads)
            self._drop_for_kernels()
        elif self.reduction.pool.is_fixed or any(grad is not None for grad in grads):
            # A fixed pool must hand out its buffers in the same order on all ranks, also on those whose computation has
            # skipped the unit: symmetric memory needs the same address everywhere.
            self.unreduced = self._place(grads, self.reduction.dtypes.main_grads)
        else:
            self._drop_for_kernels()

    def reduce(self, grads: list[torch.Tensor | None], last: bool) -> Handle:
        """Start to reduce a micro-batch's gradients together with the unreduced sum.

        Compute copies the gradients into the buffer to reduce, so autograd's tensors are freed at once. If the stream
        copied them, they would accumulate whenever the stream is late.

        Args:
            grads: Gradient of each parameter, or None for zeros; empty for zeros only. The list is cleared.
            last: Reduce over the outer axis as well.
        """
        if self.unreduced is not None:
            self.accumulate(grads)
            placed, self.unreduced = self.unreduced, None
        else:
            placed = self._place(grads, self.reduction.sent_dtype)
        grads.clear()
        self.owed = Owed.OUTER if self.reduction.outer is not None and not last else Owed.NOTHING
        # The stream waits for the compute issued so far, which includes the copies into ``placed``.
        handle = self.reduction.stream.run(lambda: self._reduce(placed, last))
        self.handles.append(handle)
        if last and self.has_outer_stream:
            self._start_outer()
            return self.outer_handles[-1]
        return handle

    def _start_outer(self) -> None:
        """Start to reduce over the outer axis, in its stream, when the reductions over the inner axis have ended."""
        earlier = list(self.handles)

        def task() -> None:
            for handle in earlier:
                handle.wait()  # the stream of the task does
            self._reduce_over_outer()

        self.outer_handles.append(self.reduction.outer_stream.run(task))

    def _place(self, grads: list[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer with the gradients: the one for kernels, or else a new one of ``dtype``."""
        flat, self.for_kernels = self.for_kernels, None
        if flat is None:
            flat = self.reduction.new_flat(dtype)
        self.reduction.place(grads, flat)
        return flat

    def _drop_for_kernels(self) -> None:
        if self.for_kernels is not None:
            self.give_back(self.for_kernels)
            self.for_kernels = None

    def reduce_waiting(self) -> None:
        """Start to reduce gradients of earlier micro-batches over the axes in ``owed``."""
        if Owed.INNER in self.owed:
            self.reduce([], last=True)
        elif self.owed:
            self.owed = Owed.NOTHING
            if self.has_outer_stream:
                self._start_outer()
            else:
                self.handles.append(self.reduction.stream.run(self._reduce_over_outer))

    def _reduce(self, placed: torch.Tensor, last: bool) -> None:
        """Runs in the stream. Its tasks run one after another, so the sums need no lock."""
        if self.reduction.outer is None:
            total = self.reduced = self.reduction.over_inner(placed, self.reduced)
        else:
            total = self.inner_sum = self.reduction.over_inner(placed, self.inner_sum)
        if memory_of(total) != memory_of(placed):
            self.hold(placed)
        if last and self.reduction.outer is not None and not self.has_outer_stream:
            self._reduce_over_outer()

    def _reduce_over_outer(self) -> None:
        """Runs in the outer stream, or in the stream, as a task or as the end of one."""
        assert self.inner_sum is not None, "every rank has reduced over the inner axis"
        inner_sum, self.inner_sum = self.inner_sum, None
        self.reduced = self.reduction.over_outer(inner_sum, self.reduced)
        if memory_of(self.reduced) == memory_of(inner_sum):
            return
        if self.has_outer_stream:
            self._read_by_outer.append(inner_sum)
        else:
            self.hold(inner_sum)

    def hold(self, buffer: torch.Tensor) -> None:
        """Return ``buffer`` to the pool, on a GPU at the next :meth:`wait`. Called by the task after it has read it.

        Compute has written this buffer and will reuse its memory. If the task returned it, compute could overwrite it
        while the collective still reads it. Compute therefore waits for the task first.
        """
        if self._holds:
            self._read.append(buffer)
        else:
            self.give_back(buffer)

    def wait(self, outer: bool = True) -> None:
        """Make compute wait for the reductions in flight.

        Args:
            outer: Also for those that have a stream for themselves. What they read is a shard.
        """
        _wait(self.handles)
        while self._read:
            self.give_back(self._read.pop())
        if outer and self.outer_handles:
            _wait(self.outer_handles)
            self.reduction.stream.follow()
            while self._read_by_outer:
                self.give_back(self._read_by_outer.pop())

    def take(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the gradients reduced since the last call, flat like the main weights; None if there are none.

        They are on the main weights' device, or with ``use_decoupled_grad`` on that of the computation. The caller
        returns the memory with :meth:`give_back` after the last read.
        A copy to the host has only been started (see :meth:`~megatron.fsdp.comm.context.CommContext.finish_offload`).

        Args:
            dtype: Dtype of the result.
        """
        self.wait()  # a task has allocated this memory, and compute reads it
        reduced, self.reduced = self.reduced, None
        if reduced is None:
            return None
        if self.reduction.to_host:
            taken = self.reduction.context.main_buffer(reduced.numel(), dtype).copy_(reduced, non_blocking=True)
        else:
            taken = self.reduction.cast(reduced, dtype, Writer.COMPUTE)
        if taken is not reduced:
            for stream in {self.reduction.stream, self.reduction.outer_stream}:  # whichever has allocated it
                stream.follow()
            self.give_back(reduced)
        return taken

    def give_back(self, taken: torch.Tensor) -> None:
        """Return the memory of a result of :meth:`take` to the pool."""
        self.reduction.pool.give_back(taken)

    def clear(self) -> None:
        """Drop all sums, including those of reductions in flight, and the errors of these."""
        self.owed = Owed.NOTHING
        self._drop_for_kernels()
        if self.unreduced is not None:
            self.give_back(self.unreduced)
            self.unreduced = None
        if self.handles or self.outer_handles:
            # Reductions in flight still write to the sums, so a later task of the same stream drops them. The handles
            # are dropped here together with their errors, which concern dropped gradients only.
            drop = functools.partial(self._drop_sums, self.hold, self.outer_handles)
            self._read += self._read_by_outer
            self._read_by_outer, self.outer_handles = [], []
            self.handles = [self.reduction.stream.run(drop)]
        else:
            self._drop_sums(self.give_back)

    def _drop_sums(self, give_back: Callable[[torch.Tensor], None], after: Sequence[Handle] = ()) -> None:
        for handle in after:
            handle.wait()
        dropped = [total for total in (self.inner_sum, self.reduced) if total is not None]
        self.inner_sum = self.reduced = None
        for total in dropped:
            give_back(total)


def _wait(handles: list[Handle]) -> None:
    """Make compute wait for tasks, oldest first, and drop their handles."""
    while handles:
        handle = handles[0]
        try:
            handle.wait()
        finally:
            # After an interrupted wait, the reduction continues and must be waited for again.
            if handle.done:
                del handles[0]
