"""The weights of one parameter group: main weights, and the compute weights that are made of them."""

import functools

import torch

from megatron.fsdp.buffers.flat_buffer import FlatBuffer, slot_view
from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.comm.backends import is_on_host, runs_ahead
from megatron.fsdp.comm.collectives import all_gather
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import Handle
from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.ownership import Ownership, within
from megatron.fsdp.sharding.precision import Dtypes
from megatron.fsdp.sharding.strategy import Sharding


class WeightBuffer:
    """Main weights of one group, and the buffer that its compute weights are views of.

    Compute weights are made of main weights in up to two gathers, first over the outer axis and then over the inner.
    What is kept between uses is the *home* of the compute weights:

    * all of them, where every rank keeps whole compute weights. The main weights, if they have the same dtype, are
      this rank's part of that very buffer;
    * the inner rank's shard of them, in hybrid FSDP: there the main weights are only a part of it;
    * nothing, where main weights and shard are the same part: gathering casts the main weights into their place in the
      gathered buffer and gathers in place. So a rank holds one copy of its weights, and compute weights can never be
      older than the main weights they come from.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        sharding: Where weights and optimizer state live.
        axes: Process groups that they are sharded over.
        context: Devices of compute and main weights, and the stream that runs gathers.
        pool: Gives memory to gathered weights.

    Attributes:
        temporary: The compute weights' memory exists only while they are gathered.
        compute: Compute weights, one view per parameter.
        owned: Which part of the flat buffer this rank holds of what.
        main: Main weights, flat: the elements ``owned.main`` of the buffer.
        stream: Runs unshards.
        handle: Of an unshard that was started and not waited for; else None.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        sharding: Sharding,
        axes: DataParallelAxes,
        context: CommContext,
        pool: Pool,
    ) -> None:
        device, main_device, stream = context.device, context.main_device, context.unshard_stream
        self.layout = layout
        self.sharding = sharding
        self.temporary = sharding.inner.shards_parameters
        self.stream = stream
        self._inner = stream.group(axes.gather)
        self._outer = None if axes.outer is None else stream.group(axes.outer)
        self.owned = Ownership.of(layout, sharding, axes)
        self.compute = FlatBuffer(layout, dtypes.compute, device, pool if self.temporary else None)
        self._resident: torch.Tensor | None = self.compute.flat
        self._resident_span = slice(0, layout.numel)
        if sharding.keeps_shard:
            self._resident = torch.zeros(_length(self.owned.inner), dtype=dtypes.compute, device=device)
            self._resident_span = self.owned.inner
        elif self.temporary:
            self._resident = None
        self._casts = dtypes.main_params != dtypes.compute or main_device != device
        if not self.main_is_apart:
            assert self._resident is not None
            self.main = self._resident[within(self.owned.main, self._resident_span)]
        else:
            self.main = torch.zeros(
                _length(self.owned.main),
                dtype=dtypes.main_params,
                device=main_device,
                pin_memory=is_on_host(main_device) and runs_ahead(device),
            )
        self._loaded: torch.Tensor | None = None
        self._current = False
        self._resident_current = False
        # Set and cleared by gathers, which run one after the other.
        self._home_is_old = False
        self.handle: Handle | None = None

    @property
    def main_is_apart(self) -> bool:
        """True if the main weights are no part of the compute weights' memory, so that gathers never write to them."""
        return self._resident is None or self._casts

    @property
    def _needs_nothing(self) -> bool:
        """True if compute weights and main weights are the same memory on every rank."""
        return not self._casts and not self.sharding.inner.shards_optimizer

    def load(self, tensors: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
        """Put whole parameters where there is memory for them until :meth:`initialize_main`.

        Args:
            tensors: Value of each parameter, on any device, in the order of the layout; None where it is to follow.
            dtype: Their dtype. Where it is not that of the compute weights, the values stay what they are until
                main weights are made of them.

        Returns:
            Where the values are, one view per parameter: the compute weights, if those have the same dtype.
        """
        views = self.compute.views
        if dtype == self.compute.flat.dtype:
            self.compute.allocate()
        else:
            self._loaded = torch.zeros(self.layout.numel, dtype=dtype, device=self.compute.flat.device)
            views = [slot_view(self._loaded, self.layout, index) for index in range(len(tensors))]
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return views

    def initialize_main(self) -> None:
        """Make main weights of what was loaded. Compute weights are released if they are temporary."""
        flat = self.compute.flat if self._loaded is None else self._loaded
        self._loaded = None
        if self._resident is not None and self._resident is not flat:
            self._resident.copy_(flat[self._resident_span])
        if self.main_is_apart:
            self.main.copy_(flat[self.owned.main])
        # Ranks may have been initialized differently: whole compute weights come from their owners at the first use.
        self._current = self._resident_current = self._needs_nothing
        if self.temporary:
            self.compute.free()

    def invalidate(self) -> None:
        """The main weights have changed: gather before the next use."""
        # A gather that nothing waited for was of the old ones; every rank has to start another.
        self.wait()
        self._current = self._resident_current = self._needs_nothing

    def unshard(self) -> Handle | None:
        """Start making the compute weights whole and equal to the main weights; None if they are, or it was started."""
        if self._current or self.handle is not None:
            return None
        refresh, self._resident_current = not self._resident_current, True
        self.handle = self.stream.run(functools.partial(self._unshard, refresh))
        return self.handle

    def _unshard(self, refresh: bool) -> None:
        # Whoever catches an error, such as running out of memory, may gather again: home is old until it is renewed.
        self._home_is_old |= refresh
        if self.temporary:
            self.compute.allocate()
        flat = self.compute.flat
        if self._resident is None:
            shard = self._cast_into(flat[self.owned.main])
        else:
            shard = self._resident[within(self.owned.inner, self._resident_span)]
            if self._home_is_old:
                own = self._cast_into(self._resident[within(self.owned.main, self._resident_span)])
                if self.sharding.outer.shards_optimizer and self._outer is not None:
                    all_gather(shard, own, self._outer)
                self._home_is_old = False
        if self.sharding.inner.shards_optimizer:
            all_gather(flat, shard, self._inner)

    def _cast_into(self, own: torch.Tensor) -> torch.Tensor:
        """The main weights in the compute weights' dtype: themselves, or in ``own``."""
        if not self._casts:
            return self.main
        return own.copy_(self.main, non_blocking=True)

    def wait(self) -> None:
        """Make the compute wait for a gather that was started."""
        if self.handle is None:
            return
        handle = self.handle
        try:
            handle.wait()
        finally:
            # Interrupting the wait does not stop the gather: the memory is in use until that is over.
            self.handle = None if handle.done else handle
        self._current = True

    def finish_unshard(self) -> None:
        """Wait until a gather that was started has ended; its weights are still on their way for who uses them."""
        if self.handle is not None:
            self.handle.wait()

    def reshard(self) -> None:
        """Give back the memory of temporary compute weights, which nothing reads any more."""
        self.wait()
        if self.temporary:
            self._current = False
            self.compute.free()

    def reshard_unused(self) -> None:
        """As :meth:`reshard`, for weights that the compute never waits for: does not wait either."""
        if self.temporary and self.handle is not None:
            self.handle = None
            self.stream.run(self.compute.free)

    def abandon(self) -> None:
        """As :meth:`reshard`, in whatever state: a gather on its way may have failed, and is not waited for."""
        if self.handle is None:
            self.reshard()
        else:
            self.reshard_unused()


def _length(span: slice) -> int:
    return int(span.stop - span.start)
