"""The order of communication in one pass, which all ranks follow, and the position of this rank in it.

Collectives of different ranks match by their order alone. Every rank therefore issues them in the order of one plan,
independently of the units that its data passes through. An operation of a unit that this rank skips is still issued,
before the next operation that its computation requests.
"""

import logging
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from megatron.fsdp.comm.journal import JOURNAL
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.unit import Unit, WeightState

logger = logging.getLogger(__name__)

# Unusual backwards that are not made plans.
MOST_ATTEMPTS = 3
ORDERS_DIFFER = (
    "FSDP unit {} runs after one that is registered behind it, and ranks run units in different orders: their "
    "all-gathers do not match. Run units in the order in which they are registered (a rank may leave some out), make "
    "one unit of those whose order varies, or shard no weights (zero_dp_strategy=2)."
)

REORDERED = (
    "FSDP unit %s does not run in the order of the first iteration. All ranks have to do the same, or their "
    "collectives do not match, and an error follows. If each rank chooses its order, make one unit of those units."
)


class OpKind(IntEnum):
    """Kind of communication.

    An unshard gathers what its pass reads. If backward recomputes a forward, and forward reads other planes of
    quantized weights, a second operation gathers those.
    """

    UNSHARD = 0
    REDUCE = 1
    UNSHARD_FORWARD_ONLY = 2


class Op(NamedTuple):
    """One operation: ``unit_index`` is :attr:`Unit.index`."""

    kind: OpKind
    unit_index: int


class Plan:
    """The operations of one pass (forward or backward), and this rank's position in them.

    Args:
        requested: The operations in the order in which the computation requests them.
        order: Indices into ``requested`` in the order in which to issue them. None: that of ``requested``.

    Attributes:
        requested: The operations.
        direction: That of the pass. Only a backward issues operations in a different order than they are requested in.
        order: Indices into ``requested`` in the order in which operations are issued.
        repeated: Indices of operations that ``requested`` has earlier, too. Their unit is gathered again on every rank.
        issued: How many operations of ``order`` have been issued.
        done: How many operations of ``requested`` the computation has passed.
        recorded: The operations that this rank's computation has requested in this pass, in order.
    """

    def __init__(self, requested: list[Op], order: list[int] | None = None) -> None:
        self.requested = requested
        self.direction = Direction.FORWARD if order is None else Direction.BACKWARD
        self.order = order or list(range(len(requested)))
        first: dict[Op, int] = {}
        self.repeated = {index for index, op in enumerate(requested) if first.setdefault(op, index) < index}
        self._position = {index: position for position, index in enumerate(self.order)}
        self.issued = 0
        self.done = 0
        self.recorded: list[Op] = []

    def restart(self) -> None:
        """Begin a pass."""
        self.rewind()
        self.recorded = []

    def rewind(self) -> None:
        """Begin to issue the operations of a pass that the computation has not reached, and keep what is recorded."""
        self.issued = self.done = 0

    def request(self, op: Op) -> range | None:
        """Record that the computation requests ``op``, and advance to it.

        Returns:
            Indices in ``requested``: the operations that the computation has skipped since the last call, and then
            ``op``. None if ``op`` does not lie ahead in the plan. The caller then issues it at once, as do all other
            ranks that run the same code.
        """
        self.recorded.append(op)
        try:
            target = self.requested.index(op, self.done)
        except ValueError:
            return None
        first, self.done = self.done, target + 1
        return range(first, target + 1)

    def lies_ahead(self, op: Op) -> bool:
        """Whether the computation may still request ``op`` in this pass, as planned."""
        return op in self.requested[self.done :]

    def last_request(self, unit_index: int) -> Op | None:
        """The last operation on a unit that the computation has requested in this pass."""
        return next((op for op in reversed(self.recorded) if op.unit_index == unit_index), None)

    def finish(self) -> range:
        """End the pass. Returns the indices in ``requested`` of the operations that were skipped at its end."""
        first, self.done = self.done, len(self.requested)
        return range(first, len(self.requested))

    def ahead(self) -> Op | None:
        """The next operation to issue."""
        return self.requested[self.order[self.issued]] if self.issued < len(self.order) else None

    @property
    def repeats(self) -> bool:
        """Whether the next operation to issue is one of :attr:`repeated`."""
        return self.order[self.issued] in self.repeated

    def is_issued(self, index: int) -> bool:
        """Whether the operation at ``index`` in ``requested`` has been issued."""
        return self._position[index] < self.issued


def hoist_unshards(requested: list[Op], distance: int, may_overtake: Callable[[Op, Op], bool]) -> list[int]:
    """Return the order in which to issue operations: every unshard overtakes up to ``distance`` reductions, if it may.

    A backward requests: unshard 3, reduce 3, unshard 2, reduce 2, unshard 1, reduce 1. With a distance of 1 it issues:
    unshard 3, unshard 2, reduce 3, unshard 1, reduce 2, reduce 1. Unit 2 is therefore unsharded while unit 3 computes.

    Returns:
        Indices into ``requested``. Unshards keep their order, and so do reductions.
    """
    order: list[int] = []
    for index, op in enumerate(requested):
        position, crossed = len(order), 0
        if op.kind is not OpKind.REDUCE:
            while position and crossed < distance and may_overtake(op, requested[order[position - 1]]):
                position -= 1
                crossed += 1
        order.insert(position, index)
    return order


def merge_recorded(recorded: list[list[Op]]) -> list[Op] | None:
    """One plan for ranks with these recordings: the longest, if every other is a subsequence of it, else None."""
    longest = max(recorded, key=len)
    return longest if all(_is_subsequence(other, longest) for other in recorded) else None


def out_of_order(recorded: list[Op], requested: list[Op]) -> list[Op]:
    """The unshards of a recording that did not lie ahead in its plan."""
    found, done = [], 0
    for op in recorded:
        if op in requested[done:]:
            done = requested.index(op, done) + 1
        elif op.kind is not OpKind.REDUCE:
            found.append(op)
    return found


def with_others(recorded: list[Op], guessed: list[Op], others: set[int]) -> list[Op]:
    """Add the operations of other units that recorded ones lack, each after the one before it in ``guessed``."""
    result, place = list(recorded), 0
    for op in guessed:
        if op in result[place:]:
            place = result.index(op, place) + 1
        elif op.unit_index in others and op not in result:
            result.insert(place, op)
            place += 1
    return result


def _unshards(unit: Unit) -> list[Op]:
    """The operations that unshard a unit for its backward."""
    ops = [Op(OpKind.UNSHARD, unit.index)]
    if unit.is_directional:
        # It may be recomputed. Ranks that skip it do not know, and have to issue what the others need.
        ops.append(Op(OpKind.UNSHARD_FORWARD_ONLY, unit.index))
    return ops


def _begins(unit: Unit, requested: list[Op]) -> int:
    """Where the operations of a unit, or of units inside it, begin."""
    own = next((place for place, op in enumerate(requested) if op.unit_index == unit.index), len(requested))
    return min([own, *(_begins(child, requested) for child in unit.children)])


def _is_subsequence(short: list[Op], long: list[Op]) -> bool:
    remaining = iter(long)
    return all(op in remaining for op in short)


class Plans:
    """The plan of the forward, and that of the backward for the units that take gradients at the moment.

    Both are guessed from the order in which modules are registered. The recordings of the first forward and backward
    replace them. After parameters were frozen or unfrozen, the backward is guessed from the forward and recorded again.

    Args:
        units: All units; the root first, then in the order of registration.
        distance: How many reductions an unshard may overtake.
        exchange: Gathers a list of integers from every rank.

    Attributes:
        forward: Plan of the forward.
        backward: Plan of the backward, of the one that runs if that gathers more units than usual.
        recording: The pass that runs is to be recorded.
        exchange: The argument.
        around: By index, the units that a unit is inside of, the root first.
        orders_differ: Ranks have run units in orders that cannot be merged.
        unusual: The backward that is recorded has entered units at something else than their outputs.
    """

    def __init__(self, units: list[Unit], distance: int, exchange: Callable[[list[int]], list[list[int]]]) -> None:
        self._units = units
        self._distance = distance
        self.around: dict[int, list[Unit]] = {0: []}
        for unit in units:  # one comes after those around it
            self.around |= {child.index: [*self.around[unit.index], unit] for child in unit.children}
        # Of each unit and of those around it.
        self._slots = {unit.index: {each.slot for each in (*self.around[unit.index], unit)} - {None} for unit in units}
        self.exchange = exchange
        self.forward = Plan([Op(OpKind.UNSHARD, unit.index) for unit in units])
        self.backward = self._usual = self._guessed_backward()
        self.recording = True
        self.orders_differ = self.unusual = self._has_warned = False
        self._attempts = 0
        self._known: dict[tuple[tuple[bool, bool], ...], Plan] = {}
        self._gathered = {unit.index for unit in units if unit.temporary or unit.is_directional}

    def _backward(self, requested: list[Op]) -> Plan:
        return Plan(requested, hoist_unshards(requested, self._distance, self._may_overtake))

    def _may_overtake(self, unshard: Op, other: Op) -> bool:
        """Whether the other is a reduction, and neither its unit nor one around it has the slot of the unshard."""
        return other.kind is OpKind.REDUCE and self._units[unshard.unit_index].slot not in self._slots[other.unit_index]

    def _kept(self) -> list[Op]:
        """Units that keep their weights, and the one that forward ends with: unsharded when its backward begins."""
        last = [op for op in self.forward.requested[-1:] if not self._units[op.unit_index].is_directional]
        return [*last, *(Op(OpKind.UNSHARD, unit.index) for unit in self._units if unit.keeps_weights)]

    def begin_backward(self) -> None:
        """Begin a backward, which also gathers units that are usually kept for it and that another pass has resharded.

        All ranks keep the same units, those that a rank has skipped included, so they gather the same ones.
        """
        kept = {op.unit_index for op in self._kept()}
        lost = {index for index in kept if self._units[index].state is WeightState.SHARDED}
        self.backward = self._usual
        requested = self._usual.requested
        if lost := lost - {op.unit_index for op in requested if op.kind is OpKind.UNSHARD}:
            requested = list(requested)
            for unit in (self._units[index] for index in sorted(lost, reverse=True)):  # from the inside outwards
                if (place := _begins(unit, requested)) < len(requested):
                    requested[place:place] = _unshards(unit)
            every = self._guessed_backward(kept=[]).requested
            self.backward = self._backward(with_others(requested, every, lost))  # those without gradients
        self.backward.restart()

    def _guessed_backward(self, kept: list[Op] | None = None) -> Plan:
        kept = self._kept() if kept is None else kept
        indices = dict.fromkeys(op.unit_index for op in self.forward.requested)
        place = {index: number for number, index in enumerate(indices)}

        def requested(unit: Unit) -> list[Op]:
            ops = [] if Op(OpKind.UNSHARD, unit.index) in kept else _unshards(unit)
            parts: list[tuple[int, list[Op]]] = []
            for child in unit.children:
                inner = requested(child)
                cut = len(inner) - child.trainable
                parts += [(place[child.ends_behind], inner[:cut]), (place[child.index], inner[cut:])]
            ops += [op for _, part in sorted(parts, key=lambda part: part[0], reverse=True) for op in part]
            return [*ops, Op(OpKind.REDUCE, unit.index)] if unit.trainable else ops

        return self._backward(requested(self._units[0]))

    def _kinds(self) -> tuple[tuple[bool, bool], ...]:
        return tuple((unit.trainable, unit.keeps_weights) for unit in self._units)

    def follow_freezing(self) -> None:
        """Plan the backward for the units that take gradients now, if others did before."""
        if any([group.follow_freezing() for unit in self._units for group in unit.groups]):
            self.follow_units()

    def follow_units(self) -> None:
        """Plan the backward for the units that take gradients, and those that keep their weights after forward, now."""
        known = self._known.get(self._kinds())
        self.backward = self._usual = known or self._guessed_backward()
        self.recording = known is None

    def follow_recorded(self) -> None:
        """Make what was recorded the plans, if the ranks' recordings can be merged. A collective.

        Raises:
            RuntimeError: Only some ranks have unsharded a unit out of the plan's order.
        """
        self.recording = False
        (forward, _), (backward, unusual) = (self._merged(plan) for plan in (self.forward, self.backward))
        self.unusual = False
        if unusual and self._attempts < MOST_ATTEMPTS:
            # A backward from the inside of a unit has an order of its own. The next one is probably an ordinary one.
            self.recording = True
            self._attempts += 1
            return
        if forward == []:
            forward = self.forward.requested  # a second backward of the forward that was recorded
        self.orders_differ = forward is None or backward is None
        if forward is None or backward is None:
            logger.warning(
                "FSDP: ranks ran different units in the first iteration, in orders that cannot be merged. "
                "Communication follows the order in which the modules are registered."
            )
        else:
            self._follow(forward, backward)
        self._known[self._kinds()] = self._usual

    def _follow(self, forward: list[Op], backward: list[Op]) -> None:
        """Make these the plans, with the operations that they lack and that one rank alone may request later."""
        ran = {op.unit_index for op in forward}
        reduced = {op.unit_index for op in backward if op.kind is OpKind.REDUCE}
        never = {unit.index for unit in self._units if unit.index not in ran}
        if never:
            names = [self._units[index].label for index in sorted(never)]
            logger.info("FSDP: no rank has run %s; weights are gathered in case that one does.", names)
        last, every = forward[-1], [Op(OpKind.UNSHARD, unit.index) for unit in self._units]
        self.forward = Plan(with_others(forward, every, never))
        keeps = last in backward or self._units[last.unit_index].keeps_weights
        if self.forward.requested[-1] != last and not keeps:
            backward = [last, *backward]  # its weights were kept for the backward that was recorded
        unreduced = {unit.index for unit in self._units if unit.trainable and unit.index not in reduced}
        guessed = self._guessed_backward().requested
        self.backward = self._usual = self._backward(with_others(backward, guessed, never | unreduced))

    def _merged(self, plan: Plan) -> tuple[list[Op] | None, bool]:
        """The ranks' recordings as one, and whether a rank's is unusual."""
        rows = self.exchange([int(self.unusual), *(value for op in plan.recorded for value in op)])
        recorded = [[Op(OpKind(row[i]), row[i + 1]) for i in range(1, len(row), 2)] for row in rows]
        # Without weights to gather, nothing has been communicated.
        temporary = {unit.index for unit in self._units if unit.temporary}
        strays = [[op for op in out_of_order(r, plan.requested) if op.unit_index in temporary] for r in recorded]
        if any(found != strays[0] for found in strays):
            first = next(op for found in strays for op in found)
            raise RuntimeError(ORDERS_DIFFER.format(self._units[first.unit_index].label))
        return merge_recorded(recorded), any(row[0] for row in rows)

    def up_to(self, op: Op) -> Op | None:
        """The last reduction to issue when the gradients for ``op`` are complete, if only gradients are communicated.

        As in torch's DDP, those that the plan has earlier come first, even if this rank's computation comes to them
        later: other ranks may run units in the plan's order.

        Returns:
            ``op`` itself if it does not lie ahead. None if another one has to come first.
        """
        ahead, found = self.backward.requested[self.backward.done :], None
        if op not in ahead:
            return op
        for each in (one for one in ahead if one.kind is OpKind.REDUCE):
            unit = self._units[each.unit_index]
            if unit.awaits_backward:
                break
            found = each if unit.complete else found
        return found

    @property
    def may_differ(self) -> bool:
        """Whether ranks may run units in orders that are not this plan's."""
        return self.recording or self.orders_differ

    def check_stray(self, op: Op, plan: Plan) -> None:
        """Warn once of an operation that did not lie ahead in its plan, and let the ranks compare what they issue.

        Raises:
            RuntimeError: Ranks are known to run units in different orders, and the operation gathers weights.
        """
        unit, gathers = self._units[op.unit_index], op.kind is not OpKind.REDUCE
        JOURNAL.doubted |= not self.may_differ and (not gathers or unit.state is WeightState.SHARDED)
        # The root is first in every pass of every rank.
        if unit.is_root or (gathers and not unit.temporary):
            return
        if gathers and self.orders_differ:
            raise RuntimeError(ORDERS_DIFFER.format(unit.label))
        # Backwards from the inside of a unit and of recomputed units have orders of their own.
        usual = plan is self.forward or not (gathers or self.unusual)
        if usual and not (self.may_differ or self._has_warned):
            self._has_warned = True
            logger.warning(REORDERED, unit.label)

    def gathers(self) -> bool:
        """Whether the backward gathers weights."""
        requested = self.backward.requested
        return any([op.kind is not OpKind.REDUCE and op.unit_index in self._gathered for op in requested])

    def next_forward_units(self) -> list[Unit]:
        """The units that the next forward will unshard, in order."""
        indices = dict.fromkeys(op.unit_index for op in self.forward.requested if op.kind is OpKind.UNSHARD)
        return [self._units[index] for index in indices]
