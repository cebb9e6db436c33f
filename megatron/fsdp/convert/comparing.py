"""Compares two checkpoints, key by key and block by block."""

import argparse
import io
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.convert.inspecting import BLOCK, as_float64, countable

ABSOLUTE = 1e-8
RELATIVE = 1e-5


class Gap(NamedTuple):
    """How elements differ from others.

    Attributes:
        different_elements: The number of unequal elements; two nans are equal.
        max_absolute: Largest difference of two elements; inf if only one of them is nan or infinite.
        max_relative: Largest difference of two elements, relative to the larger magnitude.
        close: Whether every element is within ``ABSOLUTE + RELATIVE * |second|``, as in ``torch.allclose``.
    """

    different_elements: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    close: bool = True

    def with_block(self, block: "Gap") -> "Gap":
        """The gap of these elements and those of another block."""
        return Gap(
            self.different_elements + block.different_elements,
            max(self.max_absolute, block.max_absolute),
            max(self.max_relative, block.max_relative),
            self.close and block.close,
        )


class Difference(NamedTuple):
    """How a tensor differs between two checkpoints.

    Attributes:
        key: Its key.
        shapes: In the first and in the second checkpoint.
        dtypes: In the first and in the second checkpoint.
        gap: Of the elements. None if the shapes differ.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    gap: Gap | None

    @property
    def same(self) -> bool:
        """Whether nothing differs at all."""
        return self.gap is not None and not self.gap.different_elements and self.dtypes[0] == self.dtypes[1]

    @property
    def alike(self) -> bool:
        """Whether shape and dtype are the same and the elements close."""
        return self.gap is not None and self.gap.close and self.dtypes[0] == self.dtypes[1]

    @property
    def facts(self) -> dict[str, Any]:
        """Its attributes as plain data, those of the gap among them."""
        gap = {**dict.fromkeys(Gap._fields), "close": False} if self.gap is None else self.gap._asdict()
        return {"key": self.key, "shapes": self.shapes, "dtypes": [str(dtype) for dtype in self.dtypes], **gap}

    def __str__(self) -> str:
        what = f"{self.key}: {_either(*self.shapes)}, {_either(*self.dtypes)}"
        if self.gap is None:
            return what
        count, absolute, relative, close = self.gap
        sizes = f"{count:,} of {math.prod(self.shapes[0]):,} elements differ"
        return f"{what}: {sizes}, by {absolute:.3g} at most, relative {relative:.3g}{' (close)' if close else ''}"


def _either(first: object, second: object) -> str:
    return str(first) if first == second else f"{first} | {second}"


class Comparison(NamedTuple):
    """The differences between two checkpoints.

    Attributes:
        only_first: Keys that only the first one has.
        only_second: Keys that only the second one has.
        kinds: Keys that are a tensor in one and an object in the other.
        tensors: All tensors that both have.
        objects: Keys of the objects that differ.
    """

    only_first: list[str]
    only_second: list[str]
    kinds: list[str]
    tensors: list[Difference]
    objects: list[str]

    @property
    def same(self) -> bool:
        """Whether nothing differs at all."""
        names = (self.only_first, self.only_second, self.kinds, self.objects)
        return not any(names) and all(d.same for d in self.tensors)


def bytes_to_compare(first: CheckpointReader, second: CheckpointReader) -> int:
    """The total that ``compare`` reports as progress: the bytes of the first one's tensors that both have."""
    return sum(t.nbytes for key, t in first.tensors.items() if key in second.tensors)


def compare(
    first: CheckpointReader, second: CheckpointReader, progress: Callable[[int], None] = lambda _: None
) -> Comparison:
    """Compare two checkpoints, which may store their tensors in different chunks.

    Args:
        first: One checkpoint.
        second: The other.
        progress: Called with the number of bytes compared since the last call.
    """
    keys = [{*reader.tensors, *reader.objects} for reader in (first, second)]
    both = sorted(keys[0] & keys[1])
    tensors = []
    for key in (k for k in both if k in first.tensors and k in second.tensors):
        tensors.append(difference(key, first.tensors[key], second.tensors[key], progress))
    return Comparison(
        only_first=sorted(keys[0] - keys[1]),
        only_second=sorted(keys[1] - keys[0]),
        kinds=[k for k in both if (k in first.tensors) != (k in second.tensors)],
        tensors=tensors,
        objects=[
            k for k in both if k not in first.tensors and k not in second.tensors and _objects_differ(k, first, second)
        ],
    )


def difference(
    key: str, first: LazyTensor, second: LazyTensor, progress: Callable[[int], None] = lambda _: None
) -> Difference:
    """Compare two tensors, block by block. See :func:`compare` for ``progress``."""
    shapes, dtypes = (first.shape, second.shape), (first.dtype, second.dtype)
    if first.shape != second.shape:
        progress(first.nbytes)
        return Difference(key, shapes, dtypes, None)
    gap = Gap()
    first, second = countable(first), countable(second)
    for box in first.blocks(BLOCK):
        gap = gap.with_block(_compare_block(first.read(box), second.read(box)))
        progress(math.prod(box.sizes) * first.dtype.itemsize)
    return Difference(key, shapes, dtypes, gap)


def _compare_block(first: torch.Tensor, second: torch.Tensor) -> Gap:
    integers = not (first.is_floating_point() or first.is_complex())
    if first.dtype == second.dtype and integers and torch.equal(first, second):
        return Gap()
    if first.is_complex() and second.is_complex():
        pair = first.to(torch.complex128), second.to(torch.complex128)
    else:
        pair = as_float64(first), as_float64(second)
    a, b = pair
    unequal = (first != second) if integers and first.dtype == second.dtype else (a != b) & ~(a.isnan() & b.isnan())
    count = int(unequal.count_nonzero())
    if not count:
        return Gap()
    a, b = a[unequal], b[unequal]
    # Different integers may round to the same float64: they differ by at least one.
    gap = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).clamp(min=1.0 if integers else 0.0)
    scale = torch.maximum(a.abs(), b.abs())
    relative = (gap / scale).nan_to_num(nan=math.inf, posinf=math.inf)
    close = bool((gap <= ABSOLUTE + RELATIVE * b.abs()).logical_and(gap.isfinite()).all())
    return Gap(count, gap.max().item(), relative.max().item(), close)


def _objects_differ(key: str, first: CheckpointReader, second: CheckpointReader) -> bool:
    """Whether two objects differ; equal objects may have different bytes."""
    if first.object_bytes(key) == second.object_bytes(key):
        return False
    return not equal(first.read_object(key), second.read_object(key))


def equal(first: object, second: object) -> bool:
    """Whether two objects are equal, with all tensors and arrays in them; two nans are equal."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return alike and not _compare_block(first, second).different_elements
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, (argparse.Namespace, types.SimpleNamespace)):
        return equal(vars(first), vars(second))
    if isinstance(first, io.BytesIO) and isinstance(second, io.BytesIO):
        return first.getvalue() == second.getvalue()
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):
        return _array_facts(first) == _array_facts(second)
    return bool(first == second)


def _array_facts(array: Any) -> tuple[Any, Any, bytes]:
    return array.dtype, array.shape, array.tobytes()
