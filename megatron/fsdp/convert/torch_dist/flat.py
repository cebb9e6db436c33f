"""Tensors that are stored flat: slices of buffers, and grids of flattened shards."""

import math
from collections.abc import Iterator
from itertools import product

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.reader import intersection


def unflatten(flat: LazyTensor, start: int, shape: tuple[int, ...]) -> LazyTensor:
    """View elements of a flat tensor, from ``start`` on, as a row-major tensor.

    Raises:
        ValueError: The flat tensor is too short.
    """
    numel = math.prod(shape)
    if len(flat.shape) != 1 or not 0 <= start <= start + numel <= flat.shape[0]:
        raise ValueError(f"expected {numel} elements from {start} on inside a flat tensor; got shape {flat.shape}.")

    def read(region: Region) -> torch.Tensor:
        return _read_flat(flat, (), start, shape, region)

    return LazyTensor(shape, flat.dtype, read)


def ungrid(stored: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """View a grid of flattened shards of equal size, of shape (*grid, elements of a shard), as the full tensor.

    Args:
        stored: The grid: one dimension for each of the tensor, and one for the elements.
        shape: The shape of the tensor.

    Raises:
        ValueError: The grid does not divide the shape.
    """
    grid = stored.shape[:-1]
    if len(grid) != len(shape) or any(size % count for size, count in zip(shape, grid, strict=True)):
        raise ValueError(f"expected a grid of parts of a tensor of shape {shape}; got shape {stored.shape}.")
    part = tuple(size // count for size, count in zip(shape, grid, strict=True))
    if math.prod(part) != stored.shape[-1]:
        raise ValueError(f"expected {grid} parts of {math.prod(part)} elements each; got shape {stored.shape}.")

    def read(region: Region) -> torch.Tensor:
        result = torch.empty(region.sizes, dtype=stored.dtype)
        for cell in _cells(part, region):
            shard = Region(tuple(c * n for c, n in zip(cell, part, strict=True)), part)
            if (common := intersection(shard, region)) is not None:
                found = _read_flat(stored, cell, 0, part, common.relative_to(shard.offsets))
                result[common.slices(region.offsets)] = found
        return result

    return LazyTensor(shape, stored.dtype, read)


def _cells(part: tuple[int, ...], region: Region) -> Iterator[tuple[int, ...]]:
    """The indices of the shards that overlap with a region."""
    ranges = [range(o // n, -(-(o + s) // n)) for o, s, n in zip(region.offsets, region.sizes, part, strict=True)]
    yield from product(*ranges)


def _read_flat(
    flat: LazyTensor, before: tuple[int, ...], start: int, shape: tuple[int, ...], region: Region
) -> torch.Tensor:
    """Read a region of a row-major tensor, which is stored in the last dimension of ``flat`` at index ``before``."""
    if math.prod(region.sizes) == 0:
        return torch.empty(region.sizes, dtype=flat.dtype)
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    first = sum(o * s for o, s in zip(region.offsets, strides, strict=True))
    last = first + sum((n - 1) * s for n, s in zip(region.sizes, strides, strict=True))
    # Read everything from the region's first element to its last. Callers read whole rows, so little is wasted.
    span = Region((*before, start + first), (*(1 for _ in before), last - first + 1))
    return flat.read(span).reshape(-1).as_strided(region.sizes, strides)
