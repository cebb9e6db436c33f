"""The layout of a flat buffer: where each parameter lies and which shard slice each rank owns. No tensors are involved.

A parameter group's flat buffer is split into equal shards, one per rank. Each parameter has a granularity, which
restricts where a boundary between two shards may cut it. By default, boundaries fall between rows (slices along
dimension 0), so every rank's shard slice is a ``Shard(0)`` of the parameter. Five ranks, four parameters::

    rank      |    0    |    1    |    2    |    3    |    4    |
    parameter |aaaaaaaaaaaaa b cccccccccccccccccccc dddddddd....|
                        ^ a is shifted: between two of its rows   ^ padding
                                  ^         ^ between rows of c at both: only if its row divides the shard
                                                      ^ d is shifted; b fills a gap that shifting left

* If one boundary crosses a parameter, the parameter is shifted until the boundary meets the edge of a row.
* If two or more boundaries cross it, the shard size has to be a multiple of its row.
* Parameters that can be cut anywhere (one-dimensional ones) fill the gaps that shifting leaves.
* If a shard size that suits every row would waste too much memory, a few parameters are cut inside a row. This is
  allowed for the default granularity only; every other granularity is guaranteed.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

_KINDS = ("row", "tensor", "parameter", "block", "element")


@dataclass(frozen=True)
class Granularity:
    """Where a boundary between two shards may cut a parameter. Use ``ROW``, ``TENSOR``, ``PARAMETER``, ``ELEMENT``
    or ``block(n)``.

    Attributes:
        kind: ``row``: between rows; if that wastes too much memory, the layout may cut inside rows. ``tensor``: only
            parameters with fewer than two dimensions may be cut. ``parameter``: no cuts. ``block``: between blocks of
            rows, the last of which may be incomplete. ``element``: anywhere.
        rows: Rows per block; 1 for every other kind.
    """

    kind: str
    rows: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"Granularity: expected a kind out of {', '.join(_KINDS)}; got {self.kind!r}.")
        if self.rows < 1 or (self.rows > 1 and self.kind != "block"):
            raise ValueError(f"Granularity: expected rows >= 1, and 1 unless block; got {self.kind!r}, {self.rows}.")

    def __str__(self) -> str:
        return f"block({self.rows})" if self.kind == "block" else self.kind

    def unit(self, shape: tuple[int, ...]) -> int:
        """The number of elements that stay together: a parameter of this shape is cut only at multiples of it."""
        numel, row = math.prod(shape), max(math.prod(shape[1:]), 1)
        units = {
            "row": row,
            "block": min(self.rows * row, numel),
            "tensor": numel if len(shape) > 1 else 1,
            "parameter": numel,
        }
        return max(units.get(self.kind, 1), 1)


ROW = Granularity("row")
TENSOR = Granularity("tensor")
PARAMETER = Granularity("parameter")
ELEMENT = Granularity("element")


def block(rows: int) -> Granularity:
    """A granularity with boundaries between blocks of ``rows`` rows. Raises ValueError if ``rows`` is below 1."""
    return Granularity("block", rows)


def parse_granularity(text: str) -> Granularity:
    """Parse a granularity.

    Args:
        text: ``row``, ``tensor``, ``parameter``, ``element``, or ``block(128)`` with any positive number of rows.
            ``whole_row``, which never cuts a row, is an alias of ``block(1)``.

    Raises:
        ValueError: The text is none of these.
    """
    if text.strip() == "whole_row":
        return block(1)
    match = re.fullmatch(r"(row|tensor|parameter|element)|block\((\d*[1-9]\d*)\)", text.strip())
    if match is None:
        raise ValueError(
            "shard_granularity: expected row, whole_row, tensor, parameter, element or block(<rows>), as in "
            f"block(128); got {text!r}."
        )
    return Granularity(match[1]) if match[1] else block(int(match[2]))


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer: ``numel`` elements starting at ``offset``, in rows of ``row`` elements.

    ``granularity`` is the one that the layout achieved: ``ELEMENT`` if it had to cut a ``ROW`` parameter inside a row.
    """

    offset: int
    shape: tuple[int, ...]
    granularity: Granularity = ROW

    @property
    def numel(self) -> int:
        """Number of elements in the full parameter."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of elements in one slice along dimension 0 (1 for an empty or one-dimensional parameter)."""
        return max(math.prod(self.shape[1:]), 1)

    @property
    def end(self) -> int:
        """Offset of the first element after this parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardSlice:
    """The slice of one parameter that one rank owns.

    Attributes:
        start: First element, counted in the flattened parameter.
        stop: One past the last element; equal to ``start`` if the rank owns no element.
        row_start: First row: the row that contains ``start``.
        shape: Shape of the slice. For whole rows, dimension 0 is the number of rows and the other dimensions are the
            parameter's. For a slice that begins or ends inside a row it is flat, ``(stop - start,)``; see
            :func:`boxes`.
        shard_offset: Offset of the slice within the rank's shard, in elements.
        whole_rows: True if the slice begins and ends at the edge of a row. An empty slice does.
    """

    start: int
    stop: int
    row_start: int
    shape: tuple[int, ...]
    shard_offset: int
    whole_rows: bool = True


@dataclass(frozen=True)
class Layout:
    """A validated packing of parameters into ``num_shards`` shards of ``shard_numel`` elements each.

    Raises:
        ValueError: Slots overlap or do not fit, or a boundary cuts a slot where its granularity forbids it.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    def __post_init__(self) -> None:
        end = 0
        for slot in sorted(self.slots, key=lambda s: (s.offset, s.end)):
            if slot.offset < end:
                raise ValueError(f"Layout: slots overlap at element {slot.offset}.")
            end = slot.end
            unit = slot.granularity.unit(slot.shape)
            boundary = bad_boundary(slot.offset, slot.numel, unit, self.shard_numel)
            if boundary is not None:
                raise ValueError(
                    f"Layout: boundary {boundary} cuts a {slot.granularity.kind} of the slot at {slot.offset}."
                )
        if end > self.numel:
            raise ValueError(f"Layout: slots need {end} elements, the buffer has {self.numel}.")

    @property
    def numel(self) -> int:
        """Number of elements in the full buffer, including padding."""
        return self.num_shards * self.shard_numel

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    @property
    def cut_rows(self) -> tuple[int, ...]:
        """Indices of the parameters that a boundary cuts inside a row."""
        return tuple(
            i
            for i, slot in enumerate(self.slots)
            if bad_boundary(slot.offset, slot.numel, slot.row, self.shard_numel) is not None
        )

    def packed(self, ratio: int) -> "Layout":
        """The layout of an array with one element for each ``ratio`` elements of this one, and flat parameters.

        Raises:
            ValueError: A parameter or a shard does not begin at a multiple of ``ratio``.
        """
        sizes = [self.shard_numel, *(number for slot in self.slots for number in (slot.offset, slot.numel))]
        if any(size % ratio for size in sizes):
            raise ValueError(f"Layout: expected sizes that are multiples of {ratio}; got {sizes}.")
        slots = tuple(Slot(slot.offset // ratio, (slot.numel // ratio,), ELEMENT) for slot in self.slots)
        return Layout(slots, self.num_shards, self.shard_numel // ratio)

    def shard(self, rank: int) -> slice:
        """The range of the buffer that ``rank`` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def shard_slice(self, index: int, rank: int) -> ShardSlice:
        """The slice of parameter ``index`` that ``rank`` owns, possibly empty."""
        slot, shard = self.slots[index], self.shard(rank)
        start = min(max(shard.start - slot.offset, 0), slot.numel)
        stop = min(max(shard.stop - slot.offset, start), slot.numel)
        whole_rows = start == stop or (start % slot.row == 0 and stop % slot.row == 0)
        rows = ((stop - start) // slot.row, *slot.shape[1:]) if slot.shape else ()
        return ShardSlice(
            start=start,
            stop=stop,
            row_start=start // slot.row,
            shape=rows if whole_rows else (stop - start,),
            shard_offset=slot.offset + start - shard.start if stop > start else 0,
            whole_rows=whole_rows,
        )


class Box(NamedTuple):
    """An axis-aligned block of a tensor: ``sizes[d]`` indices starting at ``offsets[d]`` in dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cover a range of a row-major tensor by as few boxes as possible, in order and without overlap.

    Each box is contiguous, so flat storage of the range holds the boxes one after another. Two dimensions need at most
    three boxes: the end of a row, whole rows, and the beginning of a row. ``n`` dimensions need at most ``2n - 1``.

    Args:
        shape: Shape of the tensor.
        start: First element, counted in the flattened tensor.
        stop: One past the last element. An empty range has no boxes.

    Raises:
        ValueError: The range exceeds the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"boxes: expected a range within a tensor of shape {shape}; got {start}..{stop}.")
    covered = []
    while start < stop:
        covered.append(_largest_box(shape, start, stop))
        start += math.prod(covered[-1].sizes)
    return covered


def _largest_box(shape: tuple[int, ...], start: int, stop: int) -> Box:
    """The largest contiguous box that begins at ``start`` and does not pass ``stop``."""
    offsets: list[int] = []
    for d, size in enumerate(shape):
        stride = math.prod(shape[d + 1 :])
        offsets.append(start // stride % size)
        if start % stride == 0 and stop - start >= stride:
            count = min((stop - start) // stride, size - offsets[-1])
            inner = shape[d + 1 :]
            return Box((*offsets, *(0 for _ in inner)), (*(1 for _ in range(d)), count, *inner))
    return Box((), ())


def bad_boundary(offset: int, numel: int, unit: int, shard_numel: int) -> int | None:
    """The first boundary that cuts a unit of the parameter, or None.

    Checking two boundaries is enough, so this needs no loop over what may be thousands: if the first one falls between
    units, the second does so only if the shard size is a multiple of the unit, and then all of them do.
    """
    if unit == 1 or not shard_numel:
        return None
    first = (offset // shard_numel + 1) * shard_numel
    if first < offset + numel and (first - offset) % unit:
        return first
    second = first + shard_numel
    return second if second < offset + numel and shard_numel % unit else None
