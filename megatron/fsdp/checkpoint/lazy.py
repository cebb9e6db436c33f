"""Tensors that are read when they are needed, and only as much of them: conversions are built of these.

A conversion says for every tensor that it writes how it is put together from those that it reads: rows cut out, parts
put in a row, layers stacked. Nothing is read before a block of the result is asked for, so memory does not grow with
the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """An axis-aligned part of a tensor.

    Attributes:
        offsets: Where it begins, per dimension.
        sizes: How long it is, per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that can be read in part.

    Attributes:
        shape: Of the whole.
        dtype: Of what ``read`` returns.
        read: Returns a part of it: a CPU tensor of shape ``box.sizes``, which the caller may keep but not change.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the whole in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.read(Box((0,) * len(self.shape), self.shape))

    def blocks(self, limit: int) -> Iterator[Box]:
        """Boxes that tile the tensor in row order, none over ``limit`` bytes unless one element is.

        Args:
            limit: Bytes.
        """
        yield from blocks_of(Box((0,) * len(self.shape), self.shape), self.dtype.itemsize, limit)

    def to(self, dtype: torch.dtype) -> "LazyTensor":
        """The same values in another dtype."""
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda box: self.read(box).to(dtype))

    def narrow(self, dim: int, start: int, length: int) -> "LazyTensor":
        """A part along one dimension, as ``torch.narrow``.

        Raises:
            ValueError: It is not inside the tensor.
        """
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise ValueError(f"expected a part of dimension {dim} of {self.shape}; got {start} to {start + length}.")

        def read(box: Box) -> torch.Tensor:
            return self.read(Box(_with(box.offsets, dim, box.offsets[dim] + start), box.sizes))

        return LazyTensor(_with(self.shape, dim, length), self.dtype, read)

    def select(self, dim: int, index: int) -> "LazyTensor":
        """One entry of a dimension, without that dimension, as ``torch.select``."""
        part = self.narrow(dim, index, 1)

        def read(box: Box) -> torch.Tensor:
            return part.read(Box(_inserted(box.offsets, dim, 0), _inserted(box.sizes, dim, 1))).squeeze(dim)

        return LazyTensor(self.shape[:dim] + self.shape[dim + 1 :], self.dtype, read)

    def unsqueeze(self, dim: int) -> "LazyTensor":
        """The tensor with a dimension of length 1 put in, as ``torch.unsqueeze``."""

        def read(box: Box) -> torch.Tensor:
            return self.read(Box(_without(box.offsets, dim), _without(box.sizes, dim))).unsqueeze(dim)

        return LazyTensor(_inserted(self.shape, dim, 1), self.dtype, read)

    def chunk(self, count: int, dim: int = 0) -> "list[LazyTensor]":
        """Equal parts along a dimension.

        Raises:
            ValueError: The dimension is not a multiple of ``count``.
        """
        if self.shape[dim] % count:
            raise ValueError(f"expected dimension {dim} to be a multiple of {count}; got shape {self.shape}.")
        length = self.shape[dim] // count
        return [self.narrow(dim, i * length, length) for i in range(count)]


def of(tensor: torch.Tensor) -> LazyTensor:
    """A tensor that is in memory already."""

    def read(box: Box) -> torch.Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]

    return LazyTensor(tuple(tensor.shape), tensor.dtype, read)


def cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors in a row along a dimension, as ``torch.cat``.

    Raises:
        ValueError: There are none, or they differ in dtype or in another dimension.
    """
    shapes = {_without(part.shape, dim) for part in parts}
    dtypes = {part.dtype for part in parts}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ValueError(f"expected parts that differ in dimension {dim} only; got {[part.shape for part in parts]}.")
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[dim])

    def read(box: Box) -> torch.Tensor:
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        found = []
        for part, first in zip(parts, starts, strict=False):
            low, high = max(begin, first), min(end, first + part.shape[dim])
            if low < high:
                found.append(part.read(Box(_with(box.offsets, dim, low - first), _with(box.sizes, dim, high - low))))
        if not found:
            return torch.empty(box.sizes, dtype=parts[0].dtype)
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    return LazyTensor(_with(parts[0].shape, dim, starts[-1]), parts[0].dtype, read)


def stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors of one shape along a new dimension, as ``torch.stack``."""
    return cat([part.unsqueeze(dim) for part in parts], dim)


def blocks_of(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes that tile a box in row order, none over ``limit`` bytes unless one element is.

    Args:
        box: Part of a tensor.
        itemsize: Bytes of an element.
        limit: Bytes.
    """
    # The first dimension that can be cut; what comes before it is of length 1.
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    total = torch.Size(box.sizes).numel() * itemsize
    if dim is None or total <= limit:
        yield box
        return
    row = total // box.sizes[dim]
    length = max(limit // row, 1)
    for start in range(0, box.sizes[dim], length):
        part = Box(
            _with(box.offsets, dim, box.offsets[dim] + start),
            _with(box.sizes, dim, min(length, box.sizes[dim] - start)),
        )
        yield from blocks_of(part, itemsize, limit)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _inserted(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])
