"""The order of communication in one pass, which all ranks follow, and how far this rank is.

Collectives of different ranks match by their order alone. So every rank issues them in the order of one plan, whatever
its own model does. An operation that this rank's data did not ask for is still issued, before the next one that it did
ask for.
"""

from enum import IntEnum
from typing import NamedTuple


class OpKind(IntEnum):
    """Kind of communication."""

    UNSHARD = 0
    REDUCE = 1


class Op(NamedTuple):
    """One operation: ``unit_index`` is the unit's index in the order of registration."""

    kind: OpKind
    unit_index: int


class Plan:
    """The operations of one pass (forward or backward), and how far this rank is.

    Args:
        asked: The operations in the order in which the computation asks for them.
        distance: How many reductions an unshard may be issued ahead of.

    Attributes:
        asked: The operations.
        order: Indices into ``asked`` in the order in which operations are issued.
        issued: How many operations of ``order`` have been issued.
        done: How many operations of ``asked`` the computation is past.
        recorded: What the computation asked for in this pass, in order.
    """

    def __init__(self, asked: list[Op], distance: int) -> None:
        self.asked = asked
        self.order = hoist_unshards(asked, distance)
        self._position = {index: position for position, index in enumerate(self.order)}
        self.issued = 0
        self.done = 0
        self.recorded: list[Op] = []

    def restart(self) -> None:
        """A pass begins."""
        self.issued = self.done = 0
        self.recorded = []

    def ask(self, op: Op) -> range | None:
        """The computation asks for ``op``.

        Returns:
            The indices in ``asked`` of the operations that it left out since the last call, followed by that of ``op``.
            None if ``op`` is not ahead in the plan. The caller then issues it at once, as do all ranks that run the
            same code.
        """
        self.recorded.append(op)
        try:
            target = self.asked.index(op, self.done)
        except ValueError:
            return None
        first, self.done = self.done, target + 1
        return range(first, target + 1)

    def rest(self) -> range:
        """End the pass: the indices in ``asked`` of the operations that were left out at its end."""
        first, self.done = self.done, len(self.asked)
        return range(first, len(self.asked))

    def ahead(self) -> Op | None:
        """The next operation to issue."""
        return self.asked[self.order[self.issued]] if self.issued < len(self.order) else None

    def is_issued(self, index: int) -> bool:
        """Whether the operation at ``index`` in ``asked`` has been issued."""
        return self._position[index] < self.issued


def hoist_unshards(asked: list[Op], distance: int) -> list[int]:
    """The order in which to issue operations: every unshard ahead of up to ``distance`` reductions before it.

    A backward asks for: unshard 3, reduce 3, unshard 2, reduce 2, unshard 1, reduce 1. With a distance of 1 it issues:
    unshard 3, unshard 2, reduce 3, unshard 1, reduce 2, reduce 1. So unit 2 is unsharded while unit 3 computes.

    Returns:
        Indices into ``asked``. Unshards keep their order, and so do reductions.
    """
    order: list[int] = []
    for index, op in enumerate(asked):
        position, crossed = len(order), 0
        if op.kind is OpKind.UNSHARD:
            while position and asked[order[position - 1]].kind is OpKind.REDUCE and crossed < distance:
                position -= 1
                crossed += 1
        order.insert(position, index)
    return order


def merge_recorded(recorded: list[list[Op]]) -> list[Op] | None:
    """One plan for ranks with these recordings: the longest, if every other is a subsequence of it, else None."""
    longest = max(recorded, key=len)
    return longest if all(_is_subsequence(other, longest) for other in recorded) else None


def _is_subsequence(short: list[Op], long: list[Op]) -> bool:
    remaining = iter(long)
    return all(op in remaining for op in short)
