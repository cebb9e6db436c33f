"""Quantizes the main weights of a whole model into compute weights, in one batch after each change."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.fsdp.comm.collectives import all_reduce
from megatron.fsdp.quantized.storage import WeightShard, WeightStorage


@dataclass(frozen=True)
class SharedBy:
    """The ranks that share main weights; see :class:`megatron.fsdp.quantized.storage.ReduceMax`.

    Attributes:
        process_group: These ranks, as a group that tasks of the unshard stream may use.
        divided: Each has a shard. If False, each has all main weights, so that there is nothing to reduce.
    """

    process_group: dist.ProcessGroup
    divided: bool

    def __call__(self, values: torch.Tensor) -> None:
        """See ``ReduceMax``."""
        if self.divided:
            all_reduce(values, dist.ReduceOp.MAX, self.process_group)


class QuantizationBatch:
    """All quantized parameters of a model.

    A batch for the model instead of one per unit: an all-reduce of scales in every unit would delay every all-gather
    by its latency. The first unshard of a quantized weight after a change runs the batch.

    Attributes:
        version: Grows whenever main weights may have changed. Unshards pass it to :meth:`run`.
    """

    def __init__(self) -> None:
        self.version = 0
        # Only tasks of the unshard stream read and write this, and these run one after the other.
        self._done = -1
        self._shards: dict[tuple[Hashable, SharedBy], tuple[WeightStorage, list[WeightShard]]] = {}

    def add(self, storage: WeightStorage, ranks: SharedBy, shards: Sequence[WeightShard]) -> None:
        """Add parameters, in the same order on every rank.

        Args:
            storage: How they are stored.
            ranks: What their main weights are shared by.
            shards: This rank's shard of each.
        """
        self._shards.setdefault((storage.key, ranks), (storage, []))[1].extend(shards)

    def run(self, version: int) -> None:
        """Quantize all shards, unless that is done for this version. Part of a task of the unshard stream."""
        if self._done == version:
            return
        for (_, ranks), (storage, shards) in self._shards.items():
            storage.quantize(shards, ranks)
        self._done = version
