"""Where each parameter lies in a flat buffer, and which part of it each rank owns. Pure arithmetic, no tensors.

A parameter group's flat buffer is cut into as many shards as there are ranks, all of one size. A boundary between
two shards that falls inside a parameter falls between two of its rows (slices along dimension 0), so that every
rank's part of every parameter is a ``Shard(0)`` of it. Five ranks, three parameters::

    rank      |    0    |    1    |    2    |    3    |    4    |
    parameter |aaaaaaaaaaaaaaa bb bbbbbbbbbb bbbbbbbbbbbb c ....|
                        ^ inside a: on a row of a   ^ inside b: on a row of b

* A parameter crossed by one boundary is shifted until the boundary meets the edge of a row.
* A parameter crossed by two or more needs a shard size that is a multiple of its row.
* One-dimensional parameters can be cut anywhere: they fill the gaps that shifting leaves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Elements. A parameter starts at a multiple of 32 bytes in bfloat16, which is what vectorized kernels want.
ALIGNMENT = 16


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer: ``numel`` elements from ``offset`` on, in rows of ``row`` elements."""

    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of elements of one slice along dimension 0 (1 for an empty or one-dimensional parameter)."""
        return max(math.prod(self.shape[1:]), 1)

    @property
    def end(self) -> int:
        """Offset of the first element after this parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns.

    Attributes:
        start: First element, counted within the flattened parameter.
        stop: One past the last element; equal to ``start`` if the rank owns nothing of it.
        row_start: First row.
        shape: Shape of the part; dimension 0 is the number of rows.
        shard_offset: Where the part starts within the rank's shard.
    """

    start: int
    stop: int
    row_start: int
    shape: tuple[int, ...]
    shard_offset: int


@dataclass(frozen=True)
class Layout:
    """A validated packing of parameters into ``num_shards`` shards of ``shard_numel`` elements each."""

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    def __post_init__(self) -> None:
        end = 0
        for slot in sorted(self.slots, key=lambda s: s.offset):
            if slot.offset < end:
                raise ValueError(f"Layout: slots overlap at element {slot.offset}.")
            end = slot.end
            for boundary in self._boundaries_inside(slot):
                if (boundary - slot.offset) % slot.row:
                    raise ValueError(f"Layout: boundary {boundary} cuts a row of the slot at {slot.offset}.")
        if end > self.numel:
            raise ValueError(f"Layout: slots need {end} elements, the buffer has {self.numel}.")

    def _boundaries_inside(self, slot: Slot) -> range:
        first = (slot.offset // self.shard_numel + 1) * self.shard_numel if self.shard_numel else slot.end
        return range(first, slot.end, max(self.shard_numel, 1))

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def shard(self, rank: int) -> slice:
        """The part of the buffer that ``rank`` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, index: int, rank: int) -> Piece:
        """The part of parameter ``index`` that ``rank`` owns; empty parts start where the rank's shard would."""
        slot, shard = self.slots[index], self.shard(rank)
        start = min(max(shard.start - slot.offset, 0), slot.numel)
        stop = min(max(shard.stop - slot.offset, start), slot.numel)
        rows = (stop - start) // slot.row
        return Piece(
            start=start,
            stop=stop,
            row_start=start // slot.row,
            shape=(rows, *slot.shape[1:]) if slot.shape else (),
            shard_offset=slot.offset + start - shard.start if stop > start else 0,
        )


def plan_layout(shapes: Sequence[tuple[int, ...]], num_shards: int, alignment: int = ALIGNMENT) -> Layout:
    """Pack parameters of the given shapes into ``num_shards`` equal shards with as little padding as rows allow.

    Args:
        shapes: Shape of each parameter, as this rank computes with it.
        num_shards: Number of ranks that share the buffer; at least 1.
        alignment: Shards, and parameters where possible, start at a multiple of this many elements.

    Returns:
        A layout whose ``slots`` are in the order of ``shapes``.
    """
    if num_shards < 1:
        raise ValueError(f"plan_layout: expected num_shards >= 1; got {num_shards}.")
    sizes = [Slot(0, tuple(shape)) for shape in shapes]
    # One shard has no boundary to respect.
    rigid = [i for i, s in enumerate(sizes) if s.row > 1 and s.numel and num_shards > 1]
    fluid = [i for i, s in enumerate(sizes) if not (s.row > 1 and s.numel and num_shards > 1)]
    best: Layout | None = None
    for shard_numel, step in _candidate_shards(
        [sizes[i] for i in rigid], sum(s.numel for s in sizes), num_shards, alignment
    ):
        if best is not None and shard_numel >= best.shard_numel:
            break
        layout = _pack_at_least(sizes, rigid, fluid, num_shards, shard_numel, step, alignment)
        if layout is not None and (best is None or layout.shard_numel < best.shard_numel):
            best = layout
    assert best is not None, "a shard that holds every parameter always packs"
    return best


def _candidate_shards(rigid: list[Slot], total: int, num_shards: int, alignment: int) -> list[tuple[int, int]]:
    """Shard sizes worth trying, smallest first, each with the step by which it may grow.

    If every parameter of more than ``limit`` elements has a row that divides the shard, and the shard is at least
    ``limit``, then the others are crossed by at most one boundary and can be shifted. Each distinct size of a
    parameter is one ``limit`` to try.
    """
    lower = -(-total // num_shards)
    candidates = set()
    for limit in {0} | {s.numel for s in rigid}:
        step = math.lcm(alignment, *{s.row for s in rigid if s.numel > limit})
        candidates.add((_round_up(max(lower, limit, 1), step), step))
    return sorted(candidates)


def _pack_at_least(
    sizes: list[Slot], rigid: list[int], fluid: list[int], num_shards: int, shard_numel: int, step: int, alignment: int
) -> Layout | None:
    """The first layout that packs, growing the shard by multiples of ``step``; None if a few tries do not get there."""
    for _ in range(16):
        offsets, end = _place(sizes, rigid, fluid, shard_numel, alignment)
        missing = end - num_shards * shard_numel
        if missing <= 0:
            return Layout(tuple(Slot(o, s.shape) for o, s in zip(offsets, sizes, strict=True)), num_shards, shard_numel)
        shard_numel += _round_up(-(-missing // num_shards), step)
    return None


def _place(
    sizes: list[Slot], rigid: list[int], fluid: list[int], shard_numel: int, alignment: int
) -> tuple[list[int], int]:
    """Offsets for a given shard size, and where the last parameter ends."""
    offsets = [0] * len(sizes)
    cursor = 0
    gaps: list[tuple[int, int]] = []
    for i in rigid:
        offset = _first_fit(cursor, sizes[i], shard_numel, alignment)
        if offset > cursor:
            gaps.append((cursor, offset))
        offsets[i] = offset
        cursor = offset + sizes[i].numel
    for i in fluid:
        offsets[i], cursor = _place_fluid(sizes[i].numel, gaps, cursor, alignment)
    return offsets, cursor


def _place_fluid(numel: int, gaps: list[tuple[int, int]], cursor: int, alignment: int) -> tuple[int, int]:
    """Put a parameter that can be cut anywhere into the first gap that holds it, else at the end."""
    for g, (start, stop) in enumerate(gaps):
        offset = _round_up(start, alignment)
        if offset + numel <= stop:
            gaps[g] = (offset + numel, stop)
            return offset, cursor
    offset = _round_up(cursor, alignment)
    return offset, offset + numel


def _first_fit(cursor: int, size: Slot, shard_numel: int, alignment: int) -> int:
    """The first offset from ``cursor`` on at which the first boundary inside the parameter meets the edge of a row."""

    def shifted(start: int) -> int:
        boundary = (start // shard_numel + 1) * shard_numel
        if boundary >= start + size.numel:
            return start
        return start + (boundary - start) % size.row

    aligned = _round_up(cursor, alignment)
    unaligned = shifted(cursor)
    # A row that is no multiple of the alignment meets it only after some rows: give up alignment rather than search.
    for _ in range(4):
        offset = shifted(aligned)
        if offset % alignment == 0:
            return offset
        aligned = _round_up(offset, alignment)
    return unaligned


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
