"""The gradients of one parameter group: collected, reduced, and handed to the optimizer as shards."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.buffer import all_reduce, gap_views, reduce_scatter, slot_view
from megatron.fsdp.device import Handle, Stream
from megatron.fsdp.layout import Layout
from megatron.fsdp.pool import Pool
from megatron.fsdp.precision import Dtypes
from megatron.fsdp.strategy import Placements


@dataclass(frozen=True)
class GradientScaling:
    """How the sum over ranks becomes the gradient.

    Attributes:
        factor: What the sum is multiplied by.
        average: Let the collective divide by the number of ranks (and leave the rest of the factor to us).
    """

    factor: float
    average: bool


class GradientBuffer:
    """Gradients of one group between backward and the optimizer.

    A micro-batch's gradients are copied once, into the buffer that is reduced. Between micro-batches a rank keeps
    the sum of what was reduced (its shard) or, if gradients are not sharded, the sum of what was not reduced yet.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        placements: Where gradients and optimizer state live.
        scaling: How the sum over ranks becomes the gradient.
        group: Process group that gradients are reduced over.
        stream: Runs reductions.
        pool: Gives memory to the buffers that are reduced.

    Attributes:
        waiting: Gradients of earlier micro-batches, on this rank or another, wait for a reduction.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        placements: Placements,
        scaling: GradientScaling,
        group: dist.ProcessGroup,
        stream: Stream,
        pool: Pool,
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self.placements = placements
        self._rank = group.rank()
        self._op = dist.ReduceOp.AVG if scaling.average else dist.ReduceOp.SUM
        factor = scaling.factor * group.size() if scaling.average else scaling.factor
        # The sum over many ranks may not fit into float16: scale it before, at the cost of touching every element.
        before = dtypes.grad_comm == torch.float16
        self._factor_before, self._factor_after = (factor, 1.0) if before else (1.0, factor)
        self._stream = stream
        self._group = stream.group(group)
        self._pool = pool
        self._partial: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._handles: list[Handle] = []
        self.waiting = False

    def accumulate(self, grads: list[torch.Tensor | None]) -> None:
        """Add a micro-batch's gradients to those that wait for a reduction.

        Args:
            grads: Gradient of each parameter, in its shape and any dtype, or None.
        """
        self.waiting = True
        device = next((g.device for g in grads if g is not None), None)
        if device is None:
            return
        if self._partial is None:
            self._partial = self._pool.scratch(self.layout.numel, self.dtypes.main_grads, device)
            _place(self._partial, self.layout, grads)
        else:
            _add(self._partial, self.layout, grads)

    def reduce(self, grads: list[torch.Tensor | None], device: torch.device) -> None:
        """Start reducing a micro-batch's gradients, and those that wait, over the group.

        Args:
            grads: Gradient of each parameter, or None for zeros; empty for none at all. The list is emptied when
                its tensors are placed.
            device: Where the buffers are.
        """
        if self._partial is not None:
            self.accumulate(grads)
            grads.clear()
        self.waiting = False
        waiting, self._partial = self._partial, None
        self._handles.append(self._stream.run(functools.partial(self._reduce, waiting, grads, device)))

    def _reduce(self, waiting: torch.Tensor | None, grads: list[torch.Tensor | None], device: torch.device) -> None:
        if waiting is None:
            flat = self._pool.scratch(self.layout.numel, self.dtypes.grad_comm, device)
            self._stream.keep([g for g in grads if g is not None])
            _place(flat, self.layout, grads)
            grads.clear()
        else:
            self._stream.keep([waiting])
            flat = waiting.to(self.dtypes.grad_comm)
        if self._factor_before != 1.0:
            flat.mul_(self._factor_before)
        self._add_reduced(self._communicate(flat))

    def _communicate(self, flat: torch.Tensor) -> torch.Tensor:
        """Reduce ``flat`` and return the part of the sum that this rank keeps, in ``main_grads_dtype``."""
        if not self.placements.shards_optimizer:
            all_reduce(flat, self._op, self._group)
            return flat.to(self.dtypes.main_grads)
        if self._reduced is None and flat.dtype == self.dtypes.main_grads:
            shard = self._pool.scratch(self.layout.shard_numel, flat.dtype, flat.device)
        else:
            shard = flat[self.layout.shard(self._rank)]
        reduce_scatter(shard, flat, self._op, self._group)
        # A shard that is cast is a copy of its own; one that is added to the sum is not kept.
        return shard.to(self.dtypes.main_grads)

    def _add_reduced(self, reduced: torch.Tensor) -> None:
        if self._reduced is None:
            self._reduced = reduced.mul_(self._factor_after) if self._factor_after != 1.0 else reduced
        else:
            self._reduced.add_(reduced, alpha=self._factor_after)

    def wait(self) -> None:
        """Make the compute wait for the reductions that were started."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()

    def take(self) -> torch.Tensor | None:
        """The reduced gradients since the last call, flat like the main weights; None if nothing was reduced.

        They are in the main weights' dtype, which is what optimizers ask of a gradient.
        """
        self.wait()
        reduced, self._reduced = self._reduced, None
        return None if reduced is None else reduced.to(self.dtypes.main_params)

    def clear(self) -> None:
        """Drop everything collected or reduced."""
        self.wait()
        self.waiting = False
        self._partial = self._reduced = None


def _place(flat: torch.Tensor, layout: Layout, grads: list[torch.Tensor | None]) -> None:
    """Write gradients into a flat buffer of undefined content; what has no gradient becomes zero."""
    present = [i for i, g in enumerate(grads) if g is not None]
    absent = [slot_view(flat, layout, i) for i in range(len(layout.slots)) if i >= len(grads) or grads[i] is None]
    zeros = gap_views(flat, layout) + absent
    if zeros:
        torch._foreach_zero_(zeros)
    if present:
        torch._foreach_copy_([slot_view(flat, layout, i) for i in present], [g for g in grads if g is not None])


def _add(flat: torch.Tensor, layout: Layout, grads: list[torch.Tensor | None]) -> None:
    present = [i for i, g in enumerate(grads) if g is not None]
    if present:
        torch._foreach_add_([slot_view(flat, layout, i) for i in present], [g for g in grads if g is not None])
