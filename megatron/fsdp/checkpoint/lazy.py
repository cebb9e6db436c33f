"""Tensors that are read on demand and in part. Conversions are built from them.

A conversion describes each tensor that it writes in terms of tensors that it reads: rows that are cut out, tensors that
are concatenated, layers that are stacked. Nothing is read until a block of the result is needed, so the memory that a
conversion takes does not grow with the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """An axis-aligned region of a tensor.

    Attributes:
        offsets: Index of its first element, per dimension.
        sizes: Number of indices, per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Return the region as an index into a tensor whose first element is at ``origin``, by default at 0."""
        first = self.offsets if origin is None else self.relative_to(origin).offsets
        return tuple(slice(o, o + n) for o, n in zip(first, self.sizes, strict=True))

    def relative_to(self, origin: tuple[int, ...]) -> "Region":
        """Return the region with offsets that count from ``origin``."""
        return Region(tuple(o - q for o, q in zip(self.offsets, origin, strict=True)), self.sizes)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that can be read in part.

    Attributes:
        shape: Of the full tensor.
        dtype: Of the tensors that ``read`` returns.
        read: Returns a region as a CPU tensor of shape ``region.sizes``. The caller may keep it but must not modify it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Region], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def full_tensor(self) -> torch.Tensor:
        """Read the full tensor."""
        return self.read(Region((0,) * len(self.shape), self.shape))

    def blocks(self, limit: int) -> Iterator[Region]:
        """Tile the tensor in row-major order with regions of at most ``limit`` bytes, or of a single element."""
        yield from blocks_of(Region((0,) * len(self.shape), self.shape), self.dtype.itemsize, limit)

    def read_into(self, target: torch.Tensor, origin: tuple[int, ...], limit: int) -> None:
        """Copy the region of the target's shape at ``origin`` into a tensor.

        Args:
            target: On any device, of any dtype.
            origin: Index of the region's first element, per dimension.
            limit: Largest number of bytes to read at a time.
        """
        for region in blocks_of(Region(origin, tuple(target.shape)), self.dtype.itemsize, limit):
            target[region.slices(origin)].copy_(self.read(region))

    def to(self, dtype: torch.dtype) -> "LazyTensor":
        """The same values in a different dtype."""
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda region: self.read(region).to(dtype))

    def within(self, dtype: torch.dtype, name: str) -> "LazyTensor":
        """The same tensor, whose reading raises ValueError if a finite value would be infinite in ``dtype``.

        Args:
            dtype: Of floating-point numbers, such as float16, whose range is smaller than that of most others.
            name: Of the tensor, for the message.
        """
        if not self.dtype.is_floating_point or torch.finfo(self.dtype).max <= torch.finfo(dtype).max:
            return self

        def read(region: Region) -> torch.Tensor:
            found = self.read(region)
            # Most blocks are finite, and then their ends tell, without another pass over all elements.
            ends = torch.stack(found.aminmax()) if found.numel() else found
            if not ends.to(dtype).isfinite().all() and (found.to(dtype).isinf() & found.isfinite()).any():
                raise ValueError(
                    f"{name}: expected values within the range of {dtype}; got up to {found.abs().max().item()}. "
                    "Choose a dtype with a larger range, such as bfloat16."
                )
            return found

        return LazyTensor(self.shape, self.dtype, read)

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        """Restrict one dimension to a range, as ``torch.narrow`` does.

        Raises:
            ValueError: The range is not inside the tensor.
        """
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise ValueError(f"expected a range of dimension {dim} of {self.shape}; got {start} to {start + length}.")

        def read(region: Region) -> torch.Tensor:
            return self.read(Region(_with(region.offsets, dim, region.offsets[dim] + start), region.sizes))

        return LazyTensor(_with(self.shape, dim, length), self.dtype, read)

    def with_rows(self, rows: int) -> "LazyTensor":
        """The first rows, followed by rows of zeros if the tensor has fewer."""
        missing = rows - self.shape[0]
        if missing <= 0:
            return self.narrow(0, 0, rows)
        shape = (missing, *self.shape[1:])
        zeros = LazyTensor(shape, self.dtype, lambda region: torch.zeros(region.sizes, dtype=self.dtype))
        return cat([self, zeros])

    def select(self, index: int) -> "LazyTensor":
        """Remove the first dimension by picking one index of it."""
        part = self.narrow(0, index, 1)
        return LazyTensor(
            self.shape[1:],
            self.dtype,
            lambda region: part.read(Region((0, *region.offsets), (1, *region.sizes))).squeeze(0),
        )

    def chunk(self, count: int) -> "list[LazyTensor]":
        """Split the first dimension into ``count`` equal parts.

        Raises:
            ValueError: The dimension is not a multiple of ``count``.
        """
        if self.shape[0] % count:
            raise ValueError(f"expected dimension 0 to be a multiple of {count}; got shape {self.shape}.")
        length = self.shape[0] // count
        return [self.narrow(0, i * length, length) for i in range(count)]


def of(tensor: torch.Tensor) -> LazyTensor:
    """Wrap a tensor that is already in memory."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda region: tensor[region.slices()])


def cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Concatenate tensors along a dimension, as ``torch.cat`` does.

    Raises:
        ValueError: There are no tensors, or they differ in dtype or in another dimension.
    """
    shapes = {_without(part.shape, dim) for part in parts}
    dtypes = {part.dtype for part in parts}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ValueError(f"expected tensors that differ in dimension {dim} only; got {[part.shape for part in parts]}.")
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[dim])

    def read(region: Region) -> torch.Tensor:
        begin, end = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
        found = []
        for part, first in zip(parts, starts, strict=False):
            low, high = max(begin, first), min(end, first + part.shape[dim])
            if low < high:
                found.append(
                    part.read(Region(_with(region.offsets, dim, low - first), _with(region.sizes, dim, high - low)))
                )
        if not found:
            return torch.empty(region.sizes, dtype=parts[0].dtype)
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    return LazyTensor(_with(parts[0].shape, dim, starts[-1]), parts[0].dtype, read)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Concatenate tensors of one shape along a new first dimension, as ``torch.stack`` does."""
    return cat([_as_one_of_several(part) for part in parts])


def _as_one_of_several(part: LazyTensor) -> LazyTensor:
    """The tensor behind a dimension of size 1."""
    return LazyTensor(
        (1, *part.shape),
        part.dtype,
        lambda region: part.read(Region(region.offsets[1:], region.sizes[1:])).unsqueeze(0),
    )


def blocks_of(region: Region, itemsize: int, limit: int) -> Iterator[Region]:
    """Tile a region in row-major order with regions of at most ``limit`` bytes, or of a single element.

    Args:
        region: The region to tile.
        itemsize: Bytes per element.
        limit: Largest size of a tile in bytes.
    """
    # The first dimension that can be cut. Those before it have size 1, so every tile is a run of rows.
    dim = next((d for d, size in enumerate(region.sizes) if size > 1), None)
    total = torch.Size(region.sizes).numel() * itemsize
    if dim is None or total <= limit:
        yield region
        return
    row = total // region.sizes[dim]
    length = max(limit // row, 1)
    for start in range(0, region.sizes[dim], length):
        part = Region(
            _with(region.offsets, dim, region.offsets[dim] + start),
            _with(region.sizes, dim, min(length, region.sizes[dim] - start)),
        )
        yield from blocks_of(part, itemsize, limit)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]
