"""The weights of one parameter group: main weights, and the compute weights that are unsharded from them."""

import functools

import torch

from megatron.fsdp.buffers.flat_buffer import FlatBuffer, slot_view
from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.buffers.quantizing import QuantizationBatch, SharedBy
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

    An unshard takes up to two all-gathers, first over the outer axis and then over the inner axis. The strategy says
    which compute weights stay *resident* while the unit is sharded:

    * all of them, if every rank keeps whole compute weights. Main weights of the same dtype are this rank's slice of
      that buffer, without a copy;
    * the inner rank's shard of them, in hybrid FSDP, where the main weights are only a slice of that shard;
    * none, if the main weights are all of the shard. An unshard casts the main weights into their place in the
      unsharded buffer and gathers in place. A rank then holds one copy of its weights, and its compute weights cannot
      be older than its main weights.

    Quantized compute weights are bytes, and the inner rank's shard of them always stays resident: the weights of the
    whole model are quantized in one batch, before most of them are unsharded.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        sharding: Where weights and optimizer state live.
        axes: Process groups that they are sharded over.
        context: Devices of compute and main weights, and the stream that runs unshards.
        pool: Provides the memory of unsharded weights.

    Attributes:
        temporary: The compute weights have memory only while they are unsharded.
        compute: Compute weights, one view per parameter.
        owned: Which slices of the flat buffer this rank holds.
        main: Main weights, flat: the elements ``owned.main`` of the buffer.
        resident: Compute weights that stay in memory while the unit is sharded; None if none do.
        stream: Runs unshards.
        handle: Of an unshard that was started and not waited for; else None.
        batch: Quantizes main weights into :attr:`own_bytes`; None if compute weights are not quantized.
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
        device, stream = context.device, context.unshard_stream
        self.layout = layout
        self.sharding = sharding
        self._axes = axes
        self.temporary = sharding.inner.shards_parameters
        self.stream = stream
        self._inner = stream.group(axes.gather)
        self._outer = None if axes.outer is None else stream.group(axes.outer)
        self.owned = Ownership.of(layout, sharding, axes)
        self.compute = FlatBuffer(layout, dtypes.stored, device, pool if self.temporary else None)
        self.resident: torch.Tensor | None = self.compute.flat
        self._resident_span = slice(0, layout.numel)
        if sharding.keeps_shard or (self.temporary and dtypes.quantized):
            self.resident = torch.zeros(_length(self.owned.inner), dtype=dtypes.stored, device=device)
            self._resident_span = self.owned.inner
        elif self.temporary:
            self.resident = None
        self._casts = dtypes.main_params != dtypes.stored or context.offloads
        if not self.main_is_apart:
            assert self.resident is not None
            self.main = self.resident[within(self.owned.main, self._resident_span)]
        else:
            self.main = context.main_buffer(_length(self.owned.main), dtypes.main_params).zero_()
        self._loaded: torch.Tensor | None = None
        self._current = False
        self._resident_current = False
        # Whether the resident weights are older than the main weights. Only tasks of the stream read and write this,
        # and these run one after the other.
        self._resident_is_old = False
        self.handle: Handle | None = None
        self.batch: QuantizationBatch | None = None
        self._quantized = dtypes.quantized

    def shared_by(self) -> SharedBy:
        """The ranks that share main weights. The first call may be a collective of these ranks."""
        divided, axes = self.sharding.inner.shards_optimizer, self._axes
        group = axes.inner if divided and not self.sharding.outer.shards_optimizer else axes.dp_group
        return SharedBy(self._inner if group is axes.inner else self.stream.group(group), divided)

    @property
    def own_bytes(self) -> torch.Tensor:
        """Quantized compute weights of the elements ``owned.main``, which stay resident."""
        assert self._quantized and self.resident is not None
        return self.resident[within(self.owned.main, self._resident_span)]

    @property
    def main_is_apart(self) -> bool:
        """True if the main weights have memory of their own, so that unshards only read them."""
        return self.resident is None or self._casts

    @property
    def _needs_nothing(self) -> bool:
        """True if compute weights and main weights are the same memory on every rank."""
        return not self._casts and not self.sharding.inner.shards_optimizer

    def load(self, tensors: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
        """Copy whole parameters into one buffer, which :meth:`initialize_main` makes main weights of.

        Args:
            tensors: Value of each parameter, on any device, in the order of the layout; None for values that follow.
            dtype: Their dtype. If the compute weights have another, the buffer is a temporary one in this dtype, so
                that main weights get the exact values.

        Returns:
            Views of the buffer, one per parameter. The buffer is that of the compute weights if the dtype is theirs.
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
        """Make main weights of what was loaded. Compute weights are freed if they are temporary."""
        flat = self.compute.flat if self._loaded is None else self._loaded
        self._loaded = None
        if self.resident is not None and self.resident is not flat and not self._quantized:
            self.resident.copy_(flat[self._resident_span])
        if self.main_is_apart:
            self.main.copy_(flat[self.owned.main])
        # Ranks may have initialized their parameters differently. The first unshard gets the owners' values.
        self._current = self._resident_current = self._needs_nothing
        if self.temporary:
            self.compute.free()

    def invalidate(self) -> None:
        """The main weights have changed: unshard before the next use."""
        # An unshard that nothing has waited for was of the old ones, so every rank has to start another. Waiting keeps
        # the compute from writing main weights that the stream still reads.
        self.wait()
        self._current = self._resident_current = self._needs_nothing
        if self.batch is not None:
            self.batch.version += 1

    def unshard(self) -> Handle | None:
        """Start to unshard the compute weights; None if they are up to date or an unshard was started."""
        if self._current or self.handle is not None:
            return None
        refresh, self._resident_current = not self._resident_current, True
        version = 0 if self.batch is None else self.batch.version
        self.handle = self.stream.run(functools.partial(self._unshard, refresh, version))
        return self.handle

    def _unshard(self, refresh: bool, version: int = 0) -> None:
        """Task. It allocates in the stream, so the memory follows the stream's order from here to :meth:`reshard`."""
        # If this raises, for instance because memory runs out, the resident weights are refreshed by the next unshard.
        self._resident_is_old |= refresh
        if self.temporary:
            self.compute.allocate()
        flat = self.compute.flat
        if self.resident is None:
            shard = self._cast_into(flat[self.owned.main], version)
        else:
            shard = self.resident[within(self.owned.inner, self._resident_span)]
            if self._resident_is_old:
                own = self._cast_into(self.resident[within(self.owned.main, self._resident_span)], version)
                if self.sharding.outer.shards_optimizer and self._outer is not None:
                    all_gather(shard, own, self._outer)
                self._resident_is_old = False
        if self.sharding.inner.shards_optimizer:
            all_gather(flat, shard, self._inner)

    def _cast_into(self, own: torch.Tensor, version: int) -> torch.Tensor:
        """The main weights in the compute weights' dtype: themselves, or a copy in ``own``."""
        if not self._casts:
            return self.main
        if self.batch is not None:
            self.batch.run(version)  # writes ``own``, and the bytes of all other groups
            return own
        # From pinned host memory the copy does not block the host. The all-gather follows it in the stream's order.
        return own.copy_(self.main, non_blocking=True)

    def wait(self) -> None:
        """Make the compute wait for an unshard that was started."""
        if self.handle is None:
            return
        handle = self.handle
        try:
            handle.wait()
        finally:
            # An interrupted wait does not stop the unshard, which uses the memory until it has ended.
            self.handle = None if handle.done else handle
        self._current = True

    def finish_unshard(self) -> None:
        """Make the compute wait for an unshard that was started, and leave the handle to :meth:`wait`."""
        if self.handle is not None:
            self.handle.wait()

    def reshard(self) -> None:
        """Free temporary compute weights, which nothing reads after the compute issued so far.

        On CUDA that compute may still run. Only a later task of the stream gets the memory, and it waits for the
        compute issued before it.
        """
        self.wait()
        if self.temporary:
            self._current = False
            self.compute.free()

    def reshard_unused(self) -> None:
        """As :meth:`reshard`, without a wait, for weights that the compute does not use."""
        if self.temporary and self.handle is not None:
            self.handle = None
            # Behind the unshard in the stream's order: the collective of the other ranks still needs the memory.
            self.stream.run(self.compute.free)

    def abandon(self) -> None:
        """As :meth:`reshard`, in any state. An unshard in flight may have failed, and is not waited for."""
        if self.handle is None:
            self.reshard()
        else:
            self.reshard_unused()


def _length(span: slice) -> int:
    return int(span.stop - span.start)
