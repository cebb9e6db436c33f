"""The order of communication that all ranks follow: what to gather and reduce in one pass, and where a rank is in it.

Collectives match up between ranks by their order alone. So every rank issues them in the order of one plan, whatever
its own model does: an operation that this rank's data did not ask for is still issued when a later one is asked for.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class OpKind(IntEnum):
    """What is communicated."""

    GATHER = 0
    REDUCE = 1


class Op(NamedTuple):
    """One operation: ``unit`` is the unit's index in the order of registration."""

    kind: OpKind
    unit: int


class Plan:
    """The operations of one pass (forward or backward), and how far this rank is.

    Args:
        ops: The operations, in order.

    Attributes:
        issued: Operations before this index have been issued.
        done: Operations before this index are behind the computation, too.
        recorded: What the computation asked for in this pass, in order.
    """

    def __init__(self, ops: list[Op]) -> None:
        self.ops = ops
        self.issued = 0
        self.done = 0
        self.recorded: list[Op] = []

    def restart(self) -> None:
        """A pass begins."""
        self.issued = self.done = 0
        self.recorded = []

    def reach(self, op: Op) -> Iterator[tuple[Op, bool]]:
        """Move on to ``op``, which the computation asks for.

        Yields:
            The operations in between, which it passed over, with whether they have been issued. Nothing if the plan
            does not have ``op`` ahead: the caller issues it then, as all ranks do that run the same code.
        """
        self.recorded.append(op)
        try:
            target = self.ops.index(op, self.done)
        except ValueError:
            return
        while self.done < target:
            yield self._advance()
        self._advance()

    def rest(self) -> Iterator[tuple[Op, bool]]:
        """The operations that are left when the pass ends, with whether they have been issued."""
        while self.done < len(self.ops):
            yield self._advance()

    def _advance(self) -> tuple[Op, bool]:
        op, was_issued = self.ops[self.done], self.done < self.issued
        self.done += 1
        self.issued = max(self.issued, self.done)
        return op, was_issued

    def ahead(self) -> Op | None:
        """The first operation that has not been issued."""
        return self.ops[self.issued] if self.issued < len(self.ops) else None


def hoist_gathers(ops: list[Op], distance: int) -> list[Op]:
    """Move every gather ahead of up to ``distance`` reductions before it, so that it can be issued early.

    A backward asks for: gather 3, reduce 3, gather 2, reduce 2. With a distance of 1 the plan is: gather 3, gather 2,
    reduce 3, gather 1, reduce 2: unit 2 is on its way while unit 3 computes.
    """
    hoisted: list[Op] = []
    for op in ops:
        position = len(hoisted)
        if op.kind is OpKind.GATHER:
            crossed = 0
            while position and hoisted[position - 1].kind is OpKind.REDUCE and crossed < distance:
                position -= 1
                crossed += 1
        hoisted.insert(position, op)
    return hoisted


def merge_recorded(recorded: list[list[Op]]) -> list[Op] | None:
    """One plan for ranks that recorded these: the longest, if it holds every other in its order, else None."""
    longest = max(recorded, key=len)
    return longest if all(_is_subsequence(other, longest) for other in recorded) else None


def _is_subsequence(short: list[Op], long: list[Op]) -> bool:
    remaining = iter(long)
    return all(op in remaining for op in short)
