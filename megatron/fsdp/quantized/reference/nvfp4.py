"""Weights in NVFP4, in plain torch: 4-bit floats (e2m1), two per byte, with scales of blocks and of the full weight.

The scale of a block is an 8-bit float (e4m3), relative to a float32 scale that comes from the largest magnitude of the
full weight. With blocks of 16 x 16, forward and backward read the same values. The arithmetic, with its order of
roundings, is that of Transformer Engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from megatron.fsdp.quantized.reference.base import E4M3, ReferenceStorage, ReferenceTensor, divide, matrices, to_e4m3
from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard, register_format

_BLOCK = 16
_LARGEST = 6.0
# The largest 4-bit value times the largest scale of a block.
_LARGEST_SCALED = _LARGEST * torch.finfo(E4M3).max


class NVFP4Tensor(ReferenceTensor):
    """A weight in NVFP4 that appears as a plain tensor. Use :meth:`quantize` to make one.

    Its planes are the 4-bit values, of which the first of a pair is in the lower half of the byte, and the scales of
    every 16 values of a row. In blocks of 16 x 16, sixteen rows have equal scales.
    """

    @classmethod
    def quantize(
        cls, value: torch.Tensor, rows: int = 16, dtype: torch.dtype | None = None, keep_initial: bool = False
    ) -> Self:
        """Quantize a full weight.

        Args:
            value: The values, [rows, columns], in any floating-point dtype.
            rows: Rows of a block of 16 columns: 16 or 1.
            dtype: Dtype that the result appears to have. None: that of ``value``.
            keep_initial: Keep ``value``, so that sharding the model makes main weights of it.

        Raises:
            ValueError: Rows or columns are not divisible by those of a block.
        """
        if rows not in (1, _BLOCK):
            raise ValueError(f"Expected rows=16 or rows=1, the rows of a block of NVFP4; got {rows}.")
        return cls.of(NVFP4Storage(rows), value, dtype, keep_initial)


@dataclass(frozen=True)
class NVFP4Storage(ReferenceStorage):
    """The storage of :class:`NVFP4Tensor`. The state is the largest magnitude of the full weight."""

    rows: int

    planes = (Plane(2), Plane(_BLOCK))

    @property
    def block_rows(self) -> int:
        return self.rows

    def shape_problem(self, weight: torch.Tensor) -> str | None:
        if weight.dim() == 2 and weight.shape[0] % self.rows == weight.shape[1] % _BLOCK == 0:
            return None
        return f"NVFP4 needs matrices whose rows are divisible by {self.rows} and whose columns are by {_BLOCK}."

    def new_state(self, shape: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        return {"largest": torch.zeros(1, device=device)}

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        if not shards:
            return
        state = [_state(shard)["largest"] for shard in shards]
        for largest in state:
            largest.zero_()
        for shard, values in matrices(shards):
            _state(shard)["largest"].copy_(values.abs().amax())
        of_all = torch.cat(state)
        reduce_max(of_all)
        for largest, reduced in zip(state, of_all, strict=True):
            largest.copy_(reduced)
        for shard, values in matrices(shards):
            self._encode(shard, values)

    def _encode(self, shard: WeightShard, values: torch.Tensor) -> None:
        blocks = values.unflatten(0, (-1, self.rows)).unflatten(2, (-1, _BLOCK))
        of_weight = divide(_LARGEST_SCALED, _state(shard)["largest"])
        # Not `amax / 6 * of_weight`, which would round in a different order.
        scales = blocks.abs().amax((1, 3), keepdim=True) * (of_weight * (1 / _LARGEST))
        stored = to_e4m3(scales)
        multiplier = divide(1.0, stored.view(E4M3).float() * divide(1.0, of_weight))
        codes = _to_e2m1((blocks * multiplier).clamp(-_LARGEST, _LARGEST)).view(-1, 2)
        shard.planes[0].copy_(codes[:, 0] | codes[:, 1] << 4)
        shard.planes[1].copy_(stored.expand(-1, self.rows, -1, 1).reshape(-1))

    def decode(self, parameter: ReferenceTensor, direction: Direction) -> torch.Tensor:
        codes, scales = parameter.planes
        values = _from_e2m1(torch.stack([codes & 15, codes >> 4], dim=1))
        of_blocks = scales.view(E4M3).float() * (parameter.state["largest"] / _LARGEST_SCALED)
        return values.view(-1, _BLOCK) * of_blocks.view(-1, 1)


def _state(shard: WeightShard) -> dict[str, torch.Tensor]:
    parameter: Any = shard.parameter
    return parameter.state


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15 of values from -6 to 6. Half-way values go to the even code."""
    magnitude = values.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for boundary in (1.25, 2.5, 5.0):
        code += magnitude > boundary
    for boundary in (0.75, 1.75, 3.5):
        code += magnitude >= boundary
    # Negative values that are rounded to 0 keep their sign; a negative 0 has none.
    return code + 8 * (values < 0)


def _from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes from 0 to 15."""
    # e4m3 has the same bits in other places, and an exponent that is larger by 6. Looking the values up in a table
    # would make the host wait on CUDA while the table is copied there.
    return ((codes & 8) << 4 | (codes & 7) << 2).view(E4M3).float() * 64


register_format(NVFP4Tensor, lambda parameter: parameter.stored_as)  # type: ignore[attr-defined]
