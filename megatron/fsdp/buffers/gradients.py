"""Gradients of one parameter group on their way from autograd to the optimizer."""

from enum import Flag, auto

import torch

from megatron.fsdp.buffers.reduction import Reduction, memory_of
from megatron.fsdp.comm.streams import Handle


class Owed(Flag):
    """The axes over which gradients are still to be reduced, even if only other ranks have any."""

    NOTHING = 0
    INNER = auto()
    OUTER = auto()


class InFlight:
    """Reductions that were started and not waited for, and the buffers of the computation that they read.

    Attributes:
        handles: One per task of the stream, oldest first.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.handles: list[Handle] = []
        self._pool = reduction.pool
        self._read: list[torch.Tensor] = []

    def hold(self, placed: torch.Tensor) -> None:
        """Give ``placed`` back to the pool at the next :meth:`wait`; called by the task that has read it.

        The computation wrote this buffer and will write it again. If the task gave it back, the computation could
        overwrite it while the collective still reads it, so the computation waits for the task first. Memory of
        torch's allocator needs no such care: the task has recorded its stream, and the allocator waits for that.
        """
        if self._pool.recycles:
            self._read.append(placed)

    def wait(self) -> None:
        """Make the compute wait for all of them."""
        while self.handles:
            handle = self.handles[0]
            try:
                handle.wait()
            finally:
                # A wait that was interrupted leaves a reduction that goes on.
                if handle.done:
                    del self.handles[0]
        while self._read:
            self._pool.give_back(self._read.pop())


class GradientBuffer:
    """Sums of a group's gradients; ``reduction`` says how they are reduced, and this what is kept between reductions.

    A micro-batch's gradients are copied once, into the buffer that is reduced. Between micro-batches a rank keeps
    the sum of what was reduced over the inner axis (its shard) or, if gradients are not sharded, the sum of what was
    not reduced yet. Over the outer axis, if there is one, that sum is reduced once, after the last micro-batch.

    Args:
        reduction: How gradients are reduced.

    Attributes:
        unreduced: Sum of gradients that were not reduced; None if there are none. Of the computation.
        inner_sum: Sum of gradients that were reduced over the inner axis only. Of tasks of the stream.
        reduced: Sum of gradients that were reduced over both axes. Of tasks, and of the computation after a wait.
        owed: The axes to reduce over before the optimizer's step.
        in_flight: Reductions that were started.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.unreduced: torch.Tensor | None = None
        self.inner_sum: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.owed = Owed.NOTHING
        self.in_flight = InFlight(reduction)

    def rescale(self, ratio: float) -> None:
        """Multiply gradients by ``ratio``, besides the factor that the settings say. Those on their way are left."""
        of_placed = self.reduction.rescale(ratio)
        if self.unreduced is not None:
            self.unreduced.mul_(of_placed)

    def accumulate(self, grads: list[torch.Tensor | None]) -> None:
        """Add a micro-batch's gradients to those that are not reduced yet.

        Args:
            grads: Gradient of each parameter, in its shape and any dtype, or None.
        """
        self.owed |= Owed.INNER
        if self.unreduced is not None:
            self.reduction.add(self.unreduced, grads)
        elif any(grad is not None for grad in grads):
            self.unreduced = self.reduction.place(grads, self.reduction.dtypes.main_grads)

    def reduce(self, grads: list[torch.Tensor | None], last: bool) -> Handle:
        """Start reducing a micro-batch's gradients, together with those that are not reduced yet.

        The computation places them in the buffer that is reduced. Autograd's own tensors are therefore free when it
        goes on. If the stream placed them, they would pile up whenever the stream is late.

        Args:
            grads: Gradient of each parameter, or None for zeros; empty for zeros only. The list is cleared.
            last: Reduce over the outer axis as well.
        """
        if self.unreduced is not None:
            self.accumulate(grads)
            placed, self.unreduced = self.unreduced, None
        else:
            placed = self.reduction.place(grads, self.reduction.sent_dtype)
        grads.clear()
        self.owed = Owed.OUTER if self.reduction.outer is not None and not last else Owed.NOTHING
        # The stream waits for the compute issued so far before it runs the task, and so for the copies into ``placed``.
        handle = self.reduction.stream.run(lambda: self._reduce(placed, last))
        self.in_flight.handles.append(handle)
        return handle

    def reduce_waiting(self) -> None:
        """Start reducing gradients of earlier micro-batches over the axes that are owed."""
        if Owed.INNER in self.owed:
            self.reduce([], last=True)
        elif self.owed:
            self.owed = Owed.NOTHING
            self.in_flight.handles.append(self.reduction.stream.run(self._reduce_over_outer))

    def _reduce(self, placed: torch.Tensor, last: bool) -> None:
        """Task. Tasks run one after the other, so sums need no lock."""
        if self.reduction.outer is None:
            total = self.reduced = self.reduction.over_inner(placed, self.reduced)
        else:
            total = self.inner_sum = self.reduction.over_inner(placed, self.inner_sum)
        if memory_of(total) != memory_of(placed):
            self.in_flight.hold(placed)
        if last and self.reduction.outer is not None:
            self._reduce_over_outer()

    def _reduce_over_outer(self) -> None:
        """Task, or the end of one."""
        assert self.inner_sum is not None, "every rank has reduced over the inner axis"
        inner_sum, self.inner_sum = self.inner_sum, None
        self.reduced = self.reduction.over_outer(inner_sum, self.reduced)

    def wait(self) -> None:
        """Make the compute wait for the reductions that were started."""
        self.in_flight.wait()

    def take(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The reduced gradients since the last call, flat like the main weights; None if nothing was reduced.

        They are on the main weights' device. Give them back when nothing reads them any more (:meth:`give_back`).

        Args:
            dtype: Of the result.
        """
        # A task allocated this memory. The compute may read it after this wait. After the compute has dropped it, the
        # tasks that get the memory wait for the compute first (see CudaStream).
        self.wait()
        reduced, self.reduced = self.reduced, None
        if reduced is None:
            return None
        if reduced.device == self.reduction.main_device:
            taken = self.reduction.cast(reduced, dtype, for_compute=True)
        else:
            taken = reduced.to(self.reduction.main_device, dtype)
        if taken is not reduced:
            # The compute may still read it. Only a task gets this memory again, and it waits for the compute first.
            self.give_back(reduced)
        return taken

    def give_back(self, taken: torch.Tensor) -> None:
        """Give what :meth:`take` returned back to the pool: nothing reads it any more."""
        self.reduction.pool.give_back(taken)

    def clear(self) -> None:
        """Drop all sums, also those of reductions in flight, which may fail."""
        self.owed = Owed.NOTHING
        if self.unreduced is not None:
            self.give_back(self.unreduced)
            self.unreduced = None
        if self.in_flight.handles:
            # Reductions in flight still write to the sums: drop them behind those, in the stream's order. Their
            # handles are dropped here, and with them their errors, which concern dropped gradients only.
            self.in_flight.handles = [self.reduction.stream.run(self._drop_sums)]
        else:
            self._drop_sums()

    def _drop_sums(self) -> None:
        dropped = [total for total in (self.inner_sum, self.reduced) if total is not None]
        self.inner_sum = self.reduced = None
        for total in dropped:
            self.give_back(total)
