"""The plans of one model's passes: guessed at first, then what a pass has recorded and all ranks agree on."""

import logging
from collections.abc import Callable

from megatron.fsdp.runtime.plan import Op, OpKind, Plan, merge_recorded
from megatron.fsdp.runtime.unit import Unit

logger = logging.getLogger(__name__)


class Plans:
    """The plan of the forward, and that of the backward for the units that take gradients at the moment.

    Both are guessed from the order in which modules are registered. The recordings of the first forward and backward
    replace them. After parameters were frozen or unfrozen, the backward is guessed and recorded again.

    Args:
        units: All units; the root first, then in the order of registration.
        distance: How many reductions an unshard may overtake.
        exchange: Gathers a list of integers from every rank.

    Attributes:
        forward: Plan of the forward.
        backward: Plan of the backward.
        recording: The pass that runs is to be recorded.
    """

    def __init__(self, units: list[Unit], distance: int, exchange: Callable[[list[int]], list[list[int]]]) -> None:
        self._units = units
        self._distance = distance
        self._exchange = exchange
        self.forward = self._plan([Op(OpKind.UNSHARD, i) for i in range(len(units))])
        self.backward = self._guessed_backward()
        self.recording = True
        self._known: dict[tuple[bool, ...], Plan] = {}

    def _plan(self, requested: list[Op]) -> Plan:
        return Plan(requested, self._distance)

    def _guessed_backward(self) -> Plan:
        # The root, and the unit that forward ends with, are still unsharded when backward begins.
        last = [op for op in self.forward.requested[-1:] if not self._units[op.unit_index].is_directional]
        kept = [Op(OpKind.UNSHARD, 0), *last]
        kept += [Op(OpKind.UNSHARD, i) for i, unit in enumerate(self._units) if unit.keeps_weights]
        index = {id(unit): i for i, unit in enumerate(self._units)}

        def requested(unit: Unit) -> list[Op]:
            ops = [Op(OpKind.UNSHARD, index[id(unit)])]
            if unit.is_directional and ops[0] not in kept:
                # It may be recomputed. Ranks that skip it do not know, and have to issue what the others need.
                ops.append(Op(OpKind.UNSHARD_FORWARD_ONLY, index[id(unit)]))
            for child in reversed(unit.children):
                ops += requested(child)
            return [*ops, Op(OpKind.REDUCE, index[id(unit)])] if unit.trainable else ops

        return self._plan([op for op in requested(self._units[0]) if op not in kept])

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(unit.trainable for unit in self._units)

    def follow_freezing(self) -> None:
        """Plan the backward for the units that take gradients now, if others did before."""
        if any([unit.follow_freezing() for unit in self._units]):
            known = self._known.get(self._trainable())
            self.backward = known or self._guessed_backward()
            self.recording = known is None

    def follow_recorded(self) -> None:
        """Make what was recorded the plans, if the ranks' recordings can be merged. A collective."""
        self.recording = False
        forward, backward = (self._merged(plan.recorded) for plan in (self.forward, self.backward))
        if forward == []:
            forward = self.forward.requested  # a second backward of the forward that was recorded
        if forward is None or backward is None:
            logger.warning(
                "FSDP: ranks ran different units in the first iteration, in orders that cannot be merged. "
                "Communication follows the order in which the modules are registered."
            )
        else:
            self.forward, self.backward = self._plan(forward), self._plan(backward)
        self._known[self._trainable()] = self.backward

    def _merged(self, recorded: list[Op]) -> list[Op] | None:
        rows = self._exchange([value for op in recorded for value in op])
        return merge_recorded([[Op(OpKind(row[i]), row[i + 1]) for i in range(0, len(row), 2)] for row in rows])

    def next_forward_units(self) -> list[Unit]:
        """The units that the next forward will unshard, in order."""
        indices = dict.fromkeys(op.unit_index for op in self.forward.requested if op.kind is OpKind.UNSHARD)
        return [self._units[index] for index in indices]
