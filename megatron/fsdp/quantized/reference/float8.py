"""Weights in 8-bit floats (e4m3), with one scale per weight or per block, in plain torch.

The scale maps the largest magnitude of the present values to the largest 8-bit value. With *delayed scaling* it is the
largest magnitude of the last few quantizations, so that the scale is known before the values are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from megatron.fsdp.quantized.reference.base import E4M3, ReferenceStorage, ReferenceTensor, divide, matrices, to_e4m3
from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard, register_format

# Rows and columns that share a scale. None: all elements of the parameter.
Block = tuple[int, int] | None


class Float8Tensor(ReferenceTensor):
    """A weight in 8-bit floats that appears as a plain tensor. Use :meth:`quantize` to make one."""

    @classmethod
    def quantize(
        cls,
        value: torch.Tensor,
        block: Block = None,
        dtype: torch.dtype | None = None,
        keep_initial: bool = False,
        history: int = 0,
    ) -> Self:
        """Quantize a full weight.

        Args:
            value: The values, in any floating-point dtype.
            block: Rows and columns that share a scale, as (128, 128) or (1, 128). None: one scale.
            dtype: Dtype that the result appears to have. None: that of ``value``.
            keep_initial: Keep ``value``, so that sharding the model makes main weights of it.
            history: Delayed scaling: take the scale from the largest magnitude of that many earlier quantizations, and
                let larger values saturate. One with the magnitude of the one before it does not count. The first
                quantization after the model has been sharded has no earlier ones, and takes the present magnitude. The
                history is not part of checkpoints: a resumed process starts without one, and a model that is in
                training keeps its own when it loads. 0: no delayed scaling.

        Raises:
            ValueError: Delayed scaling in blocks.
        """
        if history and block is not None:
            raise ValueError(f"Expected one scale per weight with delayed scaling (history={history}); got {block=}.")
        return cls.of(_storage(value.shape, block, history), value, dtype, keep_initial)

    @property
    def raw(self) -> torch.Tensor:
        """The 8-bit values as bytes, in the weight's shape."""
        return self.planes[0].view(self.shape)


def _storage(shape: torch.Size, block: Block, history: int) -> ReferenceStorage:
    """The storage for a weight of this shape: with a plane of scales if no block is cut by the end of a row or column.

    Other weights, such as those whose rows are a little longer than a whole number of blocks, hold all scales on
    every rank, and may be sharded anywhere.
    """
    whole = (
        block is not None
        and len(shape) == 2
        and shape.numel() > 0
        and all(size % of_block == 0 for size, of_block in zip(shape, block, strict=True))
        and block[0] * block[1] % _SCALE_BYTES == 0
    )
    return BlockStorage(block) if whole and block is not None else Float8Storage(block, history)


_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class Float8Storage(ReferenceStorage):
    """8-bit values that ranks may split anywhere. Each block's scale comes from all ranks, and is on all ranks.

    The state is, for each block, what its 8-bit values are multiplied by, and with delayed scaling the largest
    magnitudes of the last ``history + 1`` quantizations, the latest first; 0 where there are none.
    """

    block: Block
    history: int = 0

    planes = (Plane(),)
    block_rows = None

    def new_state(self, shape: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        state = {"inverse_scale": torch.ones(_count(shape, self.block), device=device)}
        return {**state, "history": torch.zeros(self.history + 1, device=device)} if self.history else state

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        if not shards:
            return
        counts = [_count(shard.parameter.shape, self.block) for shard in shards]
        of_shards = [
            _largest(shard.values(), self._blocks_of(shard), count) for shard, count in zip(shards, counts, strict=True)
        ]
        largest = torch.cat(of_shards)
        # A block may continue on other ranks.
        reduce_max(largest)
        for shard, present in zip(shards, largest.split(counts), strict=True):
            parameter: Any = shard.parameter
            scale = _scale(self._magnitude(parameter.state, present))
            shard.planes[0].copy_(to_e4m3(shard.values() * scale[self._blocks_of(shard)]))
            parameter.state["inverse_scale"].copy_(scale.reciprocal())

    def decode(self, parameter: ReferenceTensor, direction: Direction) -> torch.Tensor:
        codes = parameter.planes[0].view(E4M3).float()
        blocks = _blocks(parameter.shape, self.block, 0, codes.numel(), codes.device)
        return codes * parameter.state["inverse_scale"][blocks]

    def _blocks_of(self, shard: WeightShard) -> torch.Tensor:
        stop = shard.start + shard.main.numel()
        return _blocks(shard.parameter.shape, self.block, shard.start, stop, shard.planes[0].device)

    def _magnitude(self, state: dict[str, torch.Tensor], present: torch.Tensor) -> torch.Tensor:
        """The magnitude that becomes the largest 8-bit value. Enters the present one into the history.

        Weights may be quantized again without a change, as in evaluations with ``cuda_graph_mode``. That must not
        change bytes, so it does not count. The last entry is there to repeat the latest quantization.
        """
        if not self.history:
            return present
        history = state["history"]
        repeated = present == history[0]
        earlier = torch.where(repeated, history[1:].max(), history[:-1].max())
        history.copy_(torch.where(repeated, history, torch.cat([present, history[:-1]])))
        return torch.where(earlier > 0, earlier, present)


@dataclass(frozen=True)
class BlockStorage(ReferenceStorage):
    """8-bit values and a plane of float32 scales. Ranks hold whole blocks, so nothing is reduced.

    The scales are what the 8-bit values are multiplied by.
    """

    block: tuple[int, int]

    @property
    def planes(self) -> tuple[Plane, ...]:
        return Plane(), Plane(self.block[0] * self.block[1] // _SCALE_BYTES)

    @property
    def block_rows(self) -> int:
        return self.block[0]

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        for shard, values in matrices(shards):
            blocks = self._in_blocks(values)
            scale = _scale(blocks.abs().amax((1, 3), keepdim=True))
            shard.planes[0].copy_(to_e4m3(blocks * scale).view(-1))
            shard.planes[1].copy_(scale.reciprocal().view(-1).view(torch.uint8))

    def decode(self, parameter: ReferenceTensor, direction: Direction) -> torch.Tensor:
        codes = self._in_blocks(parameter.planes[0].view(parameter.shape).view(E4M3).float())
        # A copy, since the bytes may not lie at a multiple of 4.
        inverse = parameter.planes[1].clone().view(torch.float32)
        return codes * inverse.view(codes.shape[0], 1, codes.shape[2], 1)

    def _in_blocks(self, matrix: torch.Tensor) -> torch.Tensor:
        """[rows of blocks, rows, columns of blocks, columns]."""
        return matrix.unflatten(0, (-1, self.block[0])).unflatten(2, (-1, self.block[1]))


def _grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int, int]:
    """The length of a row of a weight as a matrix, the rows of blocks, and the blocks in such a row."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = max(torch.Size(shape[1:]).numel() if len(shape) > 1 else torch.Size(shape).numel(), 1)
    return columns, -(-rows // block[0]), -(-columns // block[1])


def _count(shape: Sequence[int], block: Block) -> int:
    """The number of scales of a weight."""
    if block is None:
        return 1
    _, down, across = _grid(shape, block)
    return down * across


def _blocks(shape: Sequence[int], block: Block, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """The block of each element from ``start`` to ``stop`` of a flattened weight."""
    if block is None:
        return torch.zeros((), dtype=torch.int64, device=device).expand(stop - start)
    columns, _, across = _grid(shape, block)
    elements = torch.arange(start, stop, device=device)
    return elements // columns // block[0] * across + elements % columns // block[1]


def _largest(values: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The largest magnitude in each block; 0 where there are no elements."""
    return values.new_zeros(count).scatter_reduce_(0, blocks, values.abs(), "amax")


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """The factors that blocks' values are multiplied by."""
    return torch.where(largest > 0, divide(torch.finfo(E4M3).max, largest), 1.0)


register_format(Float8Tensor, lambda parameter: parameter.stored_as)  # type: ignore[attr-defined]
