"""Searches for a layout of a flat buffer: parameters in shards of equal size, with little padding."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.fsdp.sharding.layout import ELEMENT, ROW, Granularity, Layout, Slot, bad_boundary, block

# In elements. Parameters start at a multiple of 32 bytes in bfloat16, as vectorized kernels require.
ALIGNMENT = 16
# Rows stay whole as long as padding is at most this fraction of the parameters. If some rows have to be cut even so,
# padding may be half of it: saving memory is then worth cutting a few more.
WASTE = 0.01
# Shards of fewer elements than this may waste more: a few rows of padding cost little memory, and tensors of whole
# rows are easier to use.
SMALL_SHARD = 10_000
SMALL_WASTE = 0.05

# The search for a smaller shard stops at a hundredth of the allowed waste, because saving less is not worth the time.
_GOOD = WASTE / 100
# These bounds make the search time independent of the number of ranks.
_MAX_STEPS = 64
_MAX_CANDIDATES = 6
_MAX_HALVINGS = 8


def plan_layout(
    shapes: Sequence[tuple[int, ...]],
    num_shards: int,
    granularity: Granularity | Sequence[Granularity] = ROW,
    alignment: int = ALIGNMENT,
) -> Layout:
    """Pack parameters of the given shapes into ``num_shards`` equal shards with little padding.

    The search considers shard sizes up to :func:`allowed_shard`. It prefers the layout that cuts the fewest parameters
    inside a row, then the one with the fewest unaligned parameters, then the smallest. If all of them cut rows, it
    starts over with half the waste. If granularities other than ``row`` need larger shards, it takes the smallest one
    that it finds.

    Args:
        shapes: Shape of each parameter on this tensor-parallel rank.
        num_shards: Number of ranks that shard the buffer; at least 1.
        granularity: Where parameters may be cut: one granularity for all, or one per parameter.
        alignment: Shards start at a multiple of this many elements; so do parameters, where there is room.

    Returns:
        A layout whose ``slots`` are in the order of ``shapes``.

    Raises:
        ValueError: ``num_shards`` or ``alignment`` is below 1, or the number of granularities differs from that of
            shapes.
    """
    if num_shards < 1 or alignment < 1:
        raise ValueError(f"plan_layout: expected num_shards and alignment >= 1; got {num_shards} and {alignment}.")
    wanted = [granularity] * len(shapes) if isinstance(granularity, Granularity) else list(granularity)
    if len(wanted) != len(shapes):
        raise ValueError(f"plan_layout: expected a granularity for each of {len(shapes)} shapes; got {len(wanted)}.")
    slots = [Slot(0, tuple(shape), g) for shape, g in zip(shapes, wanted, strict=True)]
    # A single shard has no boundaries, so nothing restricts it.
    kinds = [_Kind(s.numel, s.granularity.unit(s.shape) if num_shards > 1 else 1, s.granularity == ROW) for s in slots]
    total = sum(k.numel for k in kinds)
    low = _round_up(max(-(-total // num_shards), 1), alignment)
    high = allowed_shard(total, num_shards, alignment)
    while (plan := _search(kinds, num_shards, low, high, alignment)) is None:
        # Nothing fits, so try larger shards. A unit that must stay whole does not fit into a smaller shard.
        whole = max(min(k.unit, k.numel) for k in kinds if not k.may_cut)
        low, high = high + 1, max(high + alignment, high * 9 // 8, _round_up(whole, alignment))
    if plan.cuts:
        high = allowed_shard(total, num_shards, alignment, cuts=True)
        plan = _search(kinds, num_shards, low, high, alignment) or plan
    placed = [
        Slot(offset, s.shape, ELEMENT if i in plan.cuts else s.granularity)
        for i, (offset, s) in enumerate(zip(plan.offsets, slots, strict=True))
    ]
    return Layout(tuple(placed), num_shards, plan.shard_numel)


def plan_layout_of_blocks(
    shapes: Sequence[tuple[int, ...]], num_shards: int, granularity: Granularity, rows: int, ratio: int
) -> Layout:
    """As :func:`plan_layout`, for parameters that are cut between blocks of ``rows`` rows only.

    Args:
        shapes: Shape of each parameter. Its number of rows is a multiple of ``rows``, unless ``ratio`` is 1: the last
            block may then be incomplete.
        num_shards: Number of ranks that shard the buffer.
        granularity: Where else parameters must not be cut.
        rows: Rows per block.
        ratio: Parameters and shards start at a multiple of this. It divides the elements of a block.

    Raises:
        ValueError: A parameter is not a whole number of blocks, or ``ratio`` does not divide these.
    """
    if ratio == 1:
        row_sizes = [max(math.prod(shape[1:]), 1) for shape in shapes]
        units = [math.lcm(granularity.unit(shape), rows * row) for shape, row in zip(shapes, row_sizes, strict=True)]
        return plan_layout(shapes, num_shards, [block(unit // row) for unit, row in zip(units, row_sizes, strict=True)])
    scaled, own = [], []
    for shape in shapes:
        unit = rows * max(math.prod(shape[1:]), 1)
        if math.prod(shape) % unit or unit % ratio:
            raise ValueError(
                f"Layout: expected blocks of {rows} rows with a multiple of {ratio} elements each; got {shape}."
            )
        together = math.lcm(granularity.unit(shape), unit) // unit
        # Measured in ``ratio`` elements, every offset that the search finds is a multiple of it.
        scaled.append((math.prod(shape) // unit, unit // ratio))
        own.append(block(together))
    # Copies of the tensor cores and of NCCL need values that begin at multiples of 16 bytes. A byte may hold two.
    plan = plan_layout(scaled, num_shards, own, math.lcm(2 * ALIGNMENT, ratio) // ratio)
    slots = [
        Slot(slot.offset * ratio, tuple(shape), block(slot.granularity.rows * rows))
        for slot, shape in zip(plan.slots, shapes, strict=True)
    ]
    return Layout(tuple(slots), num_shards, plan.shard_numel * ratio)


def allowed_shard(total: int, num_shards: int, alignment: int = ALIGNMENT, cuts: bool = False) -> int:
    """The largest shard size, in elements, whose waste is acceptable in order to keep rows whole.

    Args:
        total: Number of elements in all parameters.
        num_shards: Number of ranks.
        alignment: The shard size is a multiple of this.
        cuts: Some rows are cut even so.
    """
    share = -(-total // num_shards)
    # Allow at least the waste of the default alignment, even if `alignment` is finer.
    rounded = max(_round_up(max(share, 1), a) for a in (alignment, ALIGNMENT))
    waste = SMALL_WASTE if total < SMALL_SHARD * num_shards else WASTE
    return max(rounded, (total + math.floor(total * (waste / 2 if cuts else waste))) // num_shards)


class _Kind(NamedTuple):
    """The properties of a parameter that packing depends on: ``unit`` elements stay together unless ``may_cut``."""

    numel: int
    unit: int
    may_cut: bool


class _Plan(NamedTuple):
    """A packing: indices of parameters cut inside a unit, how many are unaligned, and each parameter's offset."""

    cuts: frozenset[int]
    unaligned: int
    shard_numel: int
    offsets: list[int]

    @property
    def cost(self) -> tuple[int, int, int]:
        """The quantities to minimize, most important first."""
        return len(self.cuts), self.unaligned, self.shard_numel


class _Sizes(NamedTuple):
    """Shard sizes to try: multiples of ``step``. Each of them cuts at least ``forced`` parameters inside a unit."""

    forced: int
    first: int
    last: int
    step: int


def _search(kinds: list[_Kind], num_shards: int, low: int, high: int, alignment: int) -> _Plan | None:
    """Find the cheapest plan with a shard size from ``low`` to ``high``; None if nothing fits."""
    total = sum(k.numel for k in kinds)
    good = low + math.floor(low * _GOOD)
    best: _Plan | None = None

    def attempt(in_order: bool, shard_numel: int) -> _Plan | None:
        packer = _Packer(kinds, shard_numel, num_shards * shard_numel - total, alignment, in_order)
        offsets = packer.pack()
        if offsets is None:
            return None
        placed = [(i, o, k) for i, (o, k) in enumerate(zip(offsets, kinds, strict=True))]
        cuts = frozenset(i for i, o, k in placed if bad_boundary(o, k.numel, k.unit, shard_numel) is not None)
        return _Plan(cuts, sum(o % alignment != 0 for o in offsets), shard_numel, offsets)

    for sizes in _candidates(kinds, low, high, alignment):
        # Model order wins among plans of equal cost, so it is tried first.
        for in_order in (True, False):
            if best is None or best.cost > (sizes.forced, 0, max(sizes.first, good)):
                plan = _smallest(functools.partial(attempt, in_order), sizes, good, best)
                if plan is not None and (best is None or plan.cost < best.cost):
                    best = plan
    return best


def _smallest(attempt: Callable[[int], _Plan | None], sizes: _Sizes, good: int, best: _Plan | None) -> _Plan | None:
    """Bisect for the smallest shard whose plan is as good as that of the largest size, and stop early at ``good``.

    Args:
        attempt: Returns a plan for a shard size, or None if it does not fit.
        sizes: Candidate shard sizes.
        good: A shard size that is small enough.
        best: The best plan so far. Returns None if the largest size is worse.
    """
    step = sizes.step
    found = attempt(sizes.last)
    if found is None or (best is not None and found.cost[:2] > best.cost[:2]):
        return None
    wanted = found.cost[:2]
    low, high = sizes.first // step, sizes.last // step
    for probe in range(_MAX_HALVINGS):
        if low >= high or found.shard_numel <= good:
            break
        middle = low if probe == 0 else (low + high) // 2
        plan = attempt(middle * step)
        if plan is not None and plan.cost[:2] <= wanted:
            found, high = plan, middle
        else:
            low = middle + 1
    return found


def _candidates(kinds: list[_Kind], low: int, high: int, alignment: int) -> list[_Sizes]:
    """Shard sizes from ``low`` to ``high`` that are worth trying, most promising first.

    Each step is a multiple of some units. With such a shard size, parameters with these units are always cut between
    units, wherever they lie.
    """
    weight: dict[int, int] = {}
    for k in kinds:
        if 1 < k.unit < k.numel:
            weight[k.unit] = weight.get(k.unit, 0) + k.numel
    steps = {alignment}
    for unit in sorted(weight, key=lambda u: -weight[u]):
        for step in sorted(steps):
            multiple = math.lcm(step, unit)
            if multiple <= high and len(steps) < _MAX_STEPS:
                steps.add(multiple)
    found = []
    for step in steps:
        first, last = _round_up(low, step), high // step * step
        if first <= last:
            found.append(_Sizes(sum(_is_forced(k, last) for k in kinds), first, last, step))
    return sorted(found)[:_MAX_CANDIDATES]


class _Packer:
    """Places parameters one after another into shards of a given size.

    Rigid parameters restrict where boundaries cut them. Fluid ones can be cut anywhere, and fill the gaps.

    Args:
        kinds: The parameters to place.
        shard_numel: Size of a shard, in elements.
        room: Number of elements that may stay empty before or between parameters.
        alignment: Parameters start at a multiple of this many elements while there is room.
        in_order: Keep the order of rigid parameters; fluid ones that fill no gap come last. Otherwise, choose the next
            parameter so that it leaves no gap.
    """

    def __init__(self, kinds: list[_Kind], shard_numel: int, room: int, alignment: int, in_order: bool) -> None:
        self._shard = shard_numel
        self._room = room
        self._alignment = alignment
        self._in_order = in_order
        self._cursor = 0
        self._offsets = [0] * len(kinds)
        self._rigid: list[tuple[_Kind, list[int]]] = []
        self._fluid: list[tuple[_Kind, list[int]]] = []
        self._possible = True
        queues: dict[tuple[_Kind, int], list[int]] = {}
        for i, kind in enumerate(kinds):
            queues.setdefault((kind, i if in_order else 0), []).append(i)
        for (kind, _), queue in queues.items():
            forced = _is_forced(kind, shard_numel)
            self._possible &= kind.may_cut or not forced
            (self._fluid if kind.unit == 1 or forced else self._rigid).append((kind, queue[::-1]))
        if not in_order:
            # Units that divide the shard pack best, large before small. The others would shift them, so they come last.
            self._rigid.sort(key=lambda q: (shard_numel % q[0].unit != 0, -q[0].unit, -q[0].numel))
            self._fluid.sort(key=lambda q: (q[0].numel % alignment != 0, -q[0].numel))

    def pack(self) -> list[int] | None:
        """Place every parameter and return the offsets; None if they do not fit."""
        while self._possible and (self._rigid or self._fluid):
            self._possible = self._place_next()
        return self._offsets if self._possible else None

    def _place_next(self) -> bool:
        start = _round_up(self._cursor, self._alignment)
        if start - self._cursor > self._room:
            start = self._cursor
        rigid, offset = self._nearest(start)
        if rigid is not None and offset == start:
            self._put(self._rigid, rigid, start)
            return True
        fluid = self._filler(offset - start if rigid is not None else None)
        if fluid is not None:
            self._put(self._fluid, fluid, start)
            return True
        if rigid is not None and offset - self._cursor <= self._room:
            self._put(self._rigid, rigid, offset)
            return True
        # No room left for a gap. A large parameter covers many boundaries, so that few have to be cut; one whose
        # unit divides the shard would be cut inside units at each of them.
        cuttable = [(self._shard % k.unit != 0, k.numel, -i) for i, (k, _) in enumerate(self._next()) if k.may_cut]
        if cuttable:
            self._put(self._rigid, -max(cuttable)[2], start)
        return bool(cuttable)

    def _next(self) -> list[tuple[_Kind, list[int]]]:
        """The rigid queues that the next parameter may come from."""
        return self._rigid[:1] if self._in_order else self._rigid

    def _nearest(self, start: int) -> tuple[int | None, int]:
        """The rigid queue whose parameter fits earliest at or after ``start``, and its offset; None if none is left."""
        nearest, nearest_offset = None, 0
        for i, (kind, _) in enumerate(self._next()):
            offset = self._first_fit(start, kind)
            if nearest is None or offset < nearest_offset:
                nearest, nearest_offset = i, offset
            if offset == start:
                break
        return nearest, nearest_offset

    def _first_fit(self, start: int, kind: _Kind) -> int:
        """The first offset at or after ``start`` that suits the boundaries, aligned if possible."""
        offset = aligned = _shifted(start, kind, self._shard)
        # A unit that is not a multiple of the alignment may need many shifts until it is aligned, so give up early.
        for _ in range(4):
            if aligned % self._alignment == 0:
                return aligned if aligned - self._cursor <= self._room else offset
            aligned = _shifted(_round_up(aligned, self._alignment), kind, self._shard)
        return offset

    def _filler(self, gap: int | None) -> int | None:
        """The fluid queue to fill a gap of this size from, if any; ``gap`` is None if no rigid parameter is left."""
        if gap is None:
            return 0 if self._fluid else None
        fits = (i for i, (kind, _) in enumerate(self._fluid) if kind.numel <= gap)
        filler = next(fits, None)
        if filler is not None or self._in_order or not self._fluid:
            return filler
        # None fits, so cover the boundary with the smallest one and keep the others for other boundaries.
        return min(range(len(self._fluid)), key=lambda i: self._fluid[i][0].numel)

    def _put(self, queues: list[tuple[_Kind, list[int]]], index: int, offset: int) -> None:
        kind, queue = queues[index]
        self._offsets[queue.pop()] = offset
        if not queue:
            queues.pop(index)
        self._room -= offset - self._cursor
        self._cursor = offset + kind.numel


def _is_forced(kind: _Kind, shard_numel: int) -> bool:
    """Whether, wherever the parameter lies, several boundaries cross it and cannot all fall between its units."""
    remainder = shard_numel % kind.unit
    return remainder != 0 and kind.numel > 2 * shard_numel - remainder


def _shifted(start: int, kind: _Kind, shard_numel: int) -> int:
    """The first offset at or after ``start`` where every boundary falls between units. Not for forced parameters."""
    boundary = (start // shard_numel + 1) * shard_numel
    # This ends at the second boundary at the latest.
    while True:
        offset = max(start, boundary - shard_numel)
        if offset + kind.numel <= boundary:
            return offset
        offset += (boundary - offset) % kind.unit
        if offset + kind.numel <= boundary + shard_numel or shard_numel % kind.unit == 0:
            return offset
        boundary += shard_numel


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
