"""Weights in MXFP8, in plain torch: 8-bit floats (e4m3) with a power of 2 as the scale of every 32 values.

Blocks lie along the dimension that a matmul sums over. Forward sums over columns and the gradient of the input sums
over rows, so there are two copies of the weight, and a pass gathers the one that it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Self

from megatron.fsdp.quantized.reference.base import E4M3, ReferenceStorage, ReferenceTensor, matrices, to_e4m3
from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard, register_format

_BLOCK = 32
_FORWARD, _BACKWARD = (frozenset({direction}) for direction in (Direction.FORWARD, Direction.BACKWARD))


class MXTensor(ReferenceTensor):
    """A weight in MXFP8 that appears as a plain tensor. Use :meth:`quantize` to make one.

    Its planes are the values in blocks of 1 x 32 and their scales, and the values in blocks of 32 x 1 and their scales.
    All are in the order of the weight; scales are E8M0, a byte with an exponent.
    """

    @classmethod
    def quantize(cls, value: torch.Tensor, dtype: torch.dtype | None = None, keep_initial: bool = False) -> Self:
        """Quantize a full weight.

        Args:
            value: The values, [rows, columns], in any floating-point dtype.
            dtype: Dtype that the result appears to have. None: that of ``value``.
            keep_initial: Keep ``value``, so that sharding the model makes main weights of it.

        Raises:
            ValueError: Rows or columns are not divisible by 32.
        """
        return cls.of(MXStorage(), value, dtype, keep_initial)


@dataclass(frozen=True)
class MXStorage(ReferenceStorage):
    """The storage of :class:`MXTensor`. Ranks hold whole blocks, so nothing is reduced."""

    planes = (Plane(1, _FORWARD), Plane(_BLOCK, _FORWARD), Plane(1, _BACKWARD), Plane(_BLOCK, _BACKWARD))
    block_rows = _BLOCK

    def shape_problem(self, weight: torch.Tensor) -> str | None:
        if weight.dim() == 2 and weight.shape[0] % _BLOCK == weight.shape[1] % _BLOCK == 0:
            return None
        return f"MXFP8 needs matrices whose rows and columns are divisible by {_BLOCK}."

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        for shard, values in matrices(shards):
            for dim in (1, 0):
                blocks = values.unflatten(dim, (-1, _BLOCK))
                exponents = _exponents(blocks.abs().amax(dim + 1, keepdim=True))
                codes, scales = shard.planes[:2] if dim == 1 else shard.planes[2:]
                codes.copy_(to_e4m3(blocks * _inverse(exponents)).view(-1))
                scales.copy_(exponents.view(-1))

    def decode(self, parameter: ReferenceTensor, direction: Direction) -> torch.Tensor:
        forward = direction is Direction.FORWARD
        dim = 1 if forward else 0
        codes, scales = parameter.planes[:2] if forward else parameter.planes[2:]
        blocks = codes.view(parameter.shape).view(E4M3).float().unflatten(dim, (-1, _BLOCK))
        shape = [*blocks.shape]
        shape[dim + 1] = 1
        return blocks * scales.view(torch.float8_e8m0fnu).float().view(shape)


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """The E8M0 scale of blocks with these largest magnitudes, which values are divided by.

    It is the smallest power of 2 with which no value is beyond the range of e4m3, as in Transformer Engine. The example
    in the specification of MX (and torchao by default) rounds it down instead, and the largest values of many blocks
    saturate: everything above 448 of 512.
    """
    bits = (largest * (1 / torch.finfo(E4M3).max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # The smallest scale is 2**-127, a denormal number whose mantissa is 0x400000. 255 is no number.
    fits = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(fits, exponent, exponent + 1).clamp(max=254).to(torch.uint8)


def _inverse(exponents: torch.Tensor) -> torch.Tensor:
    """1 / scale, or 1 for the smallest scale, as in Transformer Engine: values are then too small for e4m3."""
    inverse = ((254 - exponents.int()) << 23).view(torch.float32)
    return torch.where(exponents == 0, 1.0, inverse)


register_format(MXTensor, lambda parameter: parameter.stored_as)  # type: ignore[attr-defined]
