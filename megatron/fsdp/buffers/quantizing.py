"""Quantizes the main weights of a whole model into compute weights, in one batch after each change."""

import functools
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from megatron.fsdp.comm.collectives import all_reduce
from megatron.fsdp.quantized.storage import WeightShard, WeightStorage


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
        self._shards: dict[tuple[Hashable, tuple[dist.ProcessGroup, ...]], tuple[WeightStorage, list[WeightShard]]] = {}

    def add(
        self, storage: WeightStorage, process_groups: tuple[dist.ProcessGroup, ...], shards: Sequence[WeightShard]
    ) -> None:
        """Add parameters, in the same order on every rank.

        Args:
            storage: How they are stored.
            process_groups: What their main weights are sharded over, as groups that tasks of the unshard stream may
                use.
            shards: This rank's shard of each.
        """
        self._shards.setdefault((storage.key, process_groups), (storage, []))[1].extend(shards)

    def run(self, version: int) -> None:
        """Quantize all shards, unless that is done for this version. Part of a task of the unshard stream."""
        if self._done == version:
            return
        for (_, process_groups), (storage, shards) in self._shards.items():
            storage.quantize(shards, functools.partial(_reduce_max, process_groups))
        self._done = version


def _reduce_max(process_groups: Sequence[dist.ProcessGroup], values: torch.Tensor) -> None:
    for group in process_groups:
        all_reduce(values, dist.ReduceOp.MAX, group)
