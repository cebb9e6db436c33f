"""The weights of one parameter group: main weights, and the compute weights that are unsharded from them."""

import functools
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.flat_buffer import FlatBuffer, gap_views, slot_view
from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.buffers.quantizing import QuantizationBatch, SharedBy
from megatron.fsdp.comm.backends import require_group, runs_ahead
from megatron.fsdp.comm.collectives import as_sent, broadcast, collectives_of
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import Handle, is_capturing
from megatron.fsdp.quantized.storage import Direction, Plane
from megatron.fsdp.sharding.layout import Layout
from megatron.fsdp.sharding.mesh import DataParallelAxes
from megatron.fsdp.sharding.ownership import Ownership, within
from megatron.fsdp.sharding.precision import Dtypes
from megatron.fsdp.sharding.strategy import Sharding


class PlaneSet(Enum):
    """Which planes to unshard. Ranks that agree on the order of unshards also agree on their planes."""

    ALL = "all"
    FORWARD = "those that forward reads"
    BACKWARD = "those that backward reads"
    FORWARD_ONLY = "those that forward reads and backward does not"

    def includes(self, plane: "WeightPlane") -> bool:
        """Whether the set includes a plane."""
        if self is PlaneSet.ALL or len(plane.directions) == len(Direction):
            return self is not PlaneSet.FORWARD_ONLY
        return (Direction.BACKWARD if self is PlaneSet.BACKWARD else Direction.FORWARD) in plane.directions


class WeightPlane:
    """One array of a group's compute weights: the weights themselves, or one array of the bytes of quantized ones.

    Args:
        layout: Packing of its elements.
        dtype: Their dtype.
        sharding: Where weights and optimizer state live.
        axes: Process groups that they are sharded over.
        device: Device of its memory.
        pool: Provides the memory of unsharded weights.
        quantized: Whether it has bytes of quantized weights, of which this rank's shard stays resident.
        directions: The passes that read it.

    Attributes:
        buffer: The memory of the full array.
        shard: The inner rank's shard of it, which an all-gather over the inner axis sends.
        own: The part of ``shard`` that this rank's main weights are, or are cast into.
        is_resident: ``shard`` stays in memory while the unit is sharded. Otherwise it lies in ``buffer``, as it does if
            the full array stays.
        is_current: The array is whole and up to date.
        kept: What this rank keeps of the array from forward to backward. Only tasks of the stream use it.
        generation: That of the main weights that ``shard`` was made from. Only tasks of the stream read and write
            this, and these run one after the other.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        sharding: Sharding,
        axes: DataParallelAxes,
        device: torch.device,
        pool: Pool,
        quantized: bool,
        directions: frozenset[Direction],
    ) -> None:
        temporary = sharding.inner.shards_parameters
        self.directions = directions
        owned = Ownership.of(layout, sharding, axes)
        self.buffer = FlatBuffer(layout, dtype, device, pool if temporary else None)
        apart = sharding.keeps_shard or (temporary and quantized)
        self.is_resident = apart or not temporary
        if apart:
            self.shard = torch.zeros(_length(owned.inner), dtype=dtype, device=device)
        else:
            self.shard = self.buffer.flat[owned.inner]
        self.own = self.shard[within(owned.main, owned.inner)]
        self.is_current = False
        self.kept: torch.Tensor | None = None
        self.generation = -1


class WeightBuffer:
    """Main weights of one group, and the buffer that its compute weights are views of.

    An unshard takes up to two all-gathers, first over the outer axis and then over the inner axis. The strategy says
    which compute weights stay *resident* while the unit is sharded:

    * all of them, if every rank keeps full compute weights. Main weights of the same dtype are this rank's slice of
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
        planes: The arrays of bytes of quantized compute weights; empty for others.
        ranks_after_forward: Number of ranks that hold the weights together from a forward to its backward. None: all.

    Attributes:
        temporary: The compute weights have memory only while they are unsharded.
        planes: The arrays of compute weights; one unless they are quantized.
        owned: Which slices of the flat buffer this rank holds.
        main: Main weights, flat: the elements ``owned.main`` of the buffer.
        stream: Runs unshards.
        collectives: How shards are gathered. Replaced only while no unshard is in flight.
        batch: Quantizes main weights into the planes; None if compute weights are not quantized.
        keeps: Every rank keeps a shard since a forward: the next unshard of a backward gathers those.
        unsharding: The planes of each unshard that was started and not waited for.
        version: Version counter of the main weights when they were last unsharded; None before the first unshard since
            :meth:`invalidate`. If the counter differs, main weights were written after that. It sees every write
            through the sharded parameters, their ``.data`` and their local tensors, and is the same on all ranks that
            run the same code, also where a shard is empty.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        sharding: Sharding,
        axes: DataParallelAxes,
        context: CommContext,
        pool: Pool,
        planes: Sequence[Plane] = (),
        ranks_after_forward: int | None = None,
    ) -> None:
        self.layout = layout
        self.sharding = sharding
        self._axes = axes
        self.temporary = sharding.inner.shards_parameters
        self.stream = stream = context.unshard_stream
        self.collectives = collectives_of(context.dp_group, context.device)
        self._inner = stream.group(axes.gather)
        # The stream that updates this rank's shard; another one than ``stream`` where that takes an all-gather.
        gathers = axes.outer is not None and sharding.outer.shards_optimizer and not planes
        self._update_stream = context.outer_stream if gathers and runs_ahead(context.device) else stream
        self._outer = None if axes.outer is None else self._update_stream.group(axes.outer)
        self._reader: Handle | None = None
        # The planes of quantized weights differ between forward and backward.
        near = axes.neighbours(ranks_after_forward) if self.temporary and not planes else None
        self._near = None if near is None else stream.group(near)
        self.keeps = False
        self.owned = Ownership.of(layout, sharding, axes)
        make = functools.partial(WeightPlane, sharding=sharding, axes=axes, device=context.device, pool=pool)
        self.planes = [
            make(layout.packed(plane.values_per_byte), torch.uint8, quantized=True, directions=plane.directions)
            for plane in planes
        ] or [make(layout, dtypes.compute, quantized=False, directions=frozenset(Direction))]
        self._quantized = bool(planes)
        self._casts = dtypes.main_params != dtypes.compute or context.offloads or self._quantized
        if self.main_is_apart:
            self.main = context.main_buffer(_length(self.owned.main), dtypes.main_params).zero_()
        else:
            # ``.data``: a collective counts as a write of the buffer, and must not as one of the main weights.
            self.main = self.planes[0].own.data
        self._loaded: torch.Tensor | None = None
        self.batch: QuantizationBatch | None = None
        self.unsharding: dict[Handle, list[WeightPlane]] = {}
        self._last: Handle | None = None
        self.version: int | None = None
        self._generation = 0

    def shared_by(self) -> SharedBy:
        """The ranks that share main weights. The first call may be a collective of these ranks."""
        divided, axes = self.sharding.inner.shards_optimizer, self._axes
        group = axes.inner if divided and not self.sharding.outer.shards_optimizer else axes.dp_group
        return SharedBy(self._inner if group is axes.inner else self.stream.group(group), divided)

    @property
    def compute(self) -> FlatBuffer:
        """Compute weights that are not quantized, one view per parameter; or the first plane of quantized ones."""
        return self.planes[0].buffer

    @property
    def main_is_apart(self) -> bool:
        """True if the main weights have memory of their own, so that unshards only read them."""
        return not self.planes[0].is_resident or self._casts

    def load(self, tensors: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
        """Copy full parameters into one buffer, which :meth:`initialize_main` makes main weights of.

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
            absent = [view for view, tensor in zip(views, tensors, strict=True) if tensor is None]
            for zeros in gap_views(self.compute.flat, self.layout) + absent:
                zeros.zero_()  # on CUDA, _foreach_zero_ has no codes
        else:
            self._loaded = torch.zeros(self.layout.numel, dtype=dtype, device=self.compute.flat.device)
            views = [slot_view(self._loaded, self.layout, index) for index in range(len(tensors))]
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return views

    def initialize_main(self, from_first: bool = False) -> None:
        """Make main weights of what was loaded. Compute weights are freed if they are temporary.

        Args:
            from_first: The first data-parallel rank gives what it has loaded to the others. A collective.
        """
        flat = self.compute.flat if self._loaded is None else self._loaded
        self._loaded = None
        if from_first:
            group = self.stream.group(self._axes.dp_group)
            self.stream.run(functools.partial(broadcast, flat, 0, group)).wait()
        if self.planes[0].is_resident and not self._quantized:
            self.planes[0].shard.copy_(flat[self.owned.inner])
        if self.main_is_apart:
            self.main.copy_(flat[self.owned.main])
        # Ranks may have initialized their parameters differently. The first unshard gets the owners' values.
        self.begin()

    def begin(self) -> None:
        """Start with the main weights, which have values. Compute weights are freed if they are temporary."""
        self._set_outdated()
        if self.temporary:
            self._free()

    def _set_outdated(self) -> None:
        self.version = None
        for plane in self.planes:
            # Compute weights and main weights may be the same memory on every rank.
            plane.is_current = not self._casts and not self.sharding.inner.shards_optimizer

    def invalidate(self) -> None:
        """The main weights have changed: unshard before the next use."""
        # An unshard that nothing has waited for was of the old ones, so every rank has to start another. Waiting keeps
        # the compute from writing main weights that the stream still reads.
        self.wait()
        self._set_outdated()
        self.drop_kept()
        self._generation += 1
        if self.batch is not None:
            self.batch.version += 1

    def unshard(self, planes: PlaneSet = PlaneSet.ALL) -> Handle | None:
        """Start to unshard compute weights; None if they are up to date or their unshard was started."""
        if outdated([self]):  # shards that stay in memory are of the old ones
            self.invalidate()
        started = [plane for each in self.unsharding.values() for plane in each]
        wanted = [p for p in self.planes if not p.is_current and p not in started and planes.includes(p)]
        if not wanted:
            return None
        self.version = self.main._version
        if self.keeps and planes is PlaneSet.BACKWARD:
            self.keeps = False
            handle = self.stream.run(self._unshard_kept)
        else:
            version = 0 if self.batch is None else self.batch.version
            generation, update = self._generation, None
            if self._update_stream is not self.stream and any(plane.generation != generation for plane in wanted):
                shards = functools.partial(self._update_shards, wanted, generation, self._reader)
                update = self._update_stream.run(shards)
            handle = self.stream.run(functools.partial(self._unshard, wanted, generation, version, update))
            self._reader = None if self._update_stream is self.stream else handle
        self.unsharding[handle] = wanted
        return handle

    def _update_shards(self, planes: list[WeightPlane], generation: int, reader: Handle | None) -> None:
        """Task of the outer stream: gather shards over the outer axis, while other units are gathered over the inner.

        Shards stay in memory, and an unshard of the earlier weights that nothing waited for may still read them.
        """
        if reader is not None:
            reader.wait()
        for plane in planes:
            self._update(plane, generation, 0)

    def _update(self, plane: WeightPlane, generation: int, version: int) -> None:
        """Make the inner rank's shard of main weights, where it stays in memory."""
        if plane.is_resident and plane.generation != generation:
            own = self._cast_into(plane.own, version)
            if self.sharding.outer.shards_optimizer and self._outer is not None:
                self._all_gather(plane.shard, own, self._outer)
            plane.generation = generation

    def _unshard(self, planes: list[WeightPlane], generation: int, version: int, update: Handle | None = None) -> None:
        """Task. It allocates in the stream, so the memory follows the stream's order from here to :meth:`reshard`."""
        require_group(self._inner)
        if update is not None:
            update.wait()  # the stream of the task does
        for plane in planes:
            if self.temporary:
                plane.buffer.allocate()
            shard = plane.shard
            if plane.is_resident:
                self._update(plane, generation, version)
            else:
                shard = self._cast_into(plane.own, version)
            if self.sharding.inner.shards_optimizer:
                self._all_gather(plane.buffer.flat, shard, self._inner)

    def _unshard_kept(self) -> None:
        """Task: gather what the neighbours have kept since the forward."""
        assert self._near is not None
        require_group(self._near)
        for plane in self.planes:
            plane.buffer.allocate()
            assert plane.kept is not None, "every rank keeps a shard when it reshards after forward"
            own = self._near_part(plane).copy_(plane.kept)
            plane.kept = None
            self._all_gather(plane.buffer.flat, own, self._near)

    def _all_gather(self, flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.collectives.all_gather(as_sent(flat), as_sent(shard), group)

    def _near_part(self, plane: WeightPlane) -> torch.Tensor:
        """The part of a full array that this rank keeps from forward to backward."""
        assert self._near is not None
        return plane.buffer.flat.view(self._near.size(), -1)[self._near.rank()]

    def _keep(self) -> None:
        """Task: copy this rank's part of the weights, in memory of the stream, and free them."""
        for plane in self.planes:
            plane.kept = self._near_part(plane).clone()
        self._free()

    def gather_all(self) -> None:
        """Gather over all ranks in backward, too, from now on."""
        if self._near is not None:
            self.keeps = False
            self.stream.run(self._drop_kept).wait()  # tasks before it may be gathering from the neighbours
            self._near = None

    def drop_kept(self) -> None:
        """Free what is kept for a backward, which then gathers main weights again."""
        if self.keeps:
            self.keeps = False
            self.stream.run(self._drop_kept)

    def _drop_kept(self) -> None:
        for plane in self.planes:
            plane.kept = None

    def _cast_into(self, own: torch.Tensor, version: int) -> torch.Tensor:
        """The main weights in the compute weights' dtype: themselves, or a copy in ``own``."""
        if not self._casts:
            return self.main
        if self.batch is not None:
            self.batch.run(version)  # writes ``own``, and the bytes of all other planes and groups
            return own
        # From pinned host memory the copy does not block the host. The all-gather follows it in the stream's order.
        return own.copy_(self.main, non_blocking=True)

    def wait(self) -> None:
        """Make the compute, which may be on another stream than before, wait for the unshards that were started."""
        if not self.unsharding and self._last is not None:  # a stream runs its tasks in order
            self._last.wait()
        for handle in list(self.unsharding):
            try:
                handle.wait()
            finally:
                # An interrupted wait does not stop the unshard, which uses the memory until it has ended.
                waited = self.unsharding.pop(handle) if handle.done else []
            for plane in waited:
                plane.is_current = True
            self._last = None if is_capturing() else handle  # an event of one capture is none of another

    def reshard(self, keep: bool = False) -> None:
        """Free temporary compute weights, which nothing reads after the compute issued so far.

        On CUDA that compute may still run. An unshard that nothing has waited for may have failed, and is not waited
        for.

        Args:
            keep: See :meth:`megatron.fsdp.runtime.unit.Unit.reshard`.
        """
        if not self.temporary:
            return
        for plane in self.planes:
            plane.is_current = False
        if keep and self._near is not None:
            self.unsharding.clear()
            self.keeps = True
            self.stream.run(self._keep)
        elif self.unsharding:
            self.unsharding.clear()
            # Behind the unshard in the stream's order: the collective of the other ranks still needs the memory.
            self.stream.run(self._free)
        else:
            self.stream.follow()
            self._free()

    def _free(self) -> None:
        for plane in self.planes:
            plane.buffer.free()


def outdated(buffers: list[WeightBuffer]) -> list[WeightBuffer]:
    """The buffers on the axes of one whose main weights were written since they were unsharded, but by no optimizer.

    All ranks write dense weights. The ranks that hold an expert may write it alone, and unshard no dense weights again.
    """
    written = [weights._axes for weights in buffers if weights.version not in (None, weights.main._version)]
    return [weights for weights in buffers if weights._axes in written] if written else []


def _length(span: slice) -> int:
    return int(span.stop - span.start)
