"""The weights of one parameter group: main weights, and the compute weights that are made of them."""

import torch
import torch.distributed as dist

from megatron.fsdp.buffer import FlatBuffer, all_gather
from megatron.fsdp.device import Handle, Stream
from megatron.fsdp.layout import Layout
from megatron.fsdp.pool import Pool
from megatron.fsdp.precision import Dtypes
from megatron.fsdp.strategy import Placements


class WeightBuffer:
    """Main weights of one group, and the buffer that its compute weights are views of.

    Where compute weights are sharded, no shard of them is kept: gathering casts the main shard into this rank's part
    of the gathered buffer and gathers in place. So a rank holds one copy of its weights, and compute weights can
    never be older than the main weights they come from.

    Where every rank keeps whole compute weights of the main weights' dtype, the main weights are this rank's part of
    that very buffer.

    Args:
        layout: Packing of the group's parameters.
        dtypes: Dtypes of the group.
        placements: Where weights and optimizer state live.
        group: Process group of the axis they are sharded over.
        stream: Runs gathers.
        pool: Gives memory to gathered weights.
        device: Where the weights are.

    Attributes:
        compute: Compute weights, one view per parameter.
        main: Main weights, flat: this rank's shard (``layout.shard_numel`` elements) or, if the optimizer state is
            not sharded, all of them (``layout.numel``).
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        placements: Placements,
        group: dist.ProcessGroup,
        stream: Stream,
        pool: Pool,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.placements = placements
        self._stream = stream
        self._group = stream.group(group)
        self.compute = FlatBuffer(layout, dtypes.compute, device, pool)
        self._span = layout.shard(group.rank()) if placements.shards_optimizer else slice(0, layout.numel)
        self._own = self.compute.flat[self._span]
        self._shares_memory = not placements.shards_parameters and dtypes.main_params == dtypes.compute
        self._casts = dtypes.main_params != dtypes.compute
        self.main = (
            self._own
            if self._shares_memory
            else torch.zeros(self._own.numel(), dtype=dtypes.main_params, device=device)
        )
        self._current = False
        self._handle: Handle | None = None

    @property
    def temporary(self) -> bool:
        """True if the compute weights' memory exists only while they are gathered."""
        return self.placements.shards_parameters

    def load(self, tensors: list[torch.Tensor]) -> None:
        """Take over whole parameters: main weights from them, cast; the compute weights are released if temporary.

        Args:
            tensors: Value of each parameter, on any device, in the order of the layout.
        """
        for view, tensor in zip(self.compute.views, tensors, strict=True):
            view.copy_(tensor)
        if not self._shares_memory:
            self.main.copy_(self._own)
        # Ranks may have been initialized differently: whole compute weights come from their owners at the first use.
        self._current = self._shares_memory and not self.placements.shards_optimizer
        if self.temporary:
            self.compute.drain()

    def invalidate(self) -> None:
        """The main weights have changed: gather before the next use."""
        # A gather that nothing waited for was of the old ones; every rank has to start another.
        self.wait()
        self._current = self._shares_memory and not self.placements.shards_optimizer

    def gather(self) -> None:
        """Start making the compute weights whole and equal to the main weights, unless they are."""
        if not self._current and self._handle is None:
            self._handle = self._stream.run(self._gather)

    def _gather(self) -> None:
        if self.temporary:
            self.compute.fill()
        source = self.main
        if self._casts:
            self._own.copy_(self.main)
            source = self._own
        if self.placements.shards_optimizer:
            all_gather(self.compute.flat, source, self._group)

    def wait(self) -> None:
        """Make the compute wait for a gather that was started."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
            self._current = True

    def release(self) -> None:
        """Give back the memory of temporary compute weights, which nothing reads any more."""
        self.wait()
        if self.temporary:
            self._current = False
            self.compute.drain()

    def discard(self) -> None:
        """As :meth:`release`, for weights that the compute never waits for: does not wait either."""
        if self.temporary and self._handle is not None:
            self._handle = None
            self._stream.run(self.compute.drain)
