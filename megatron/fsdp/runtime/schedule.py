"""What to gather next, what to reduce when, and how much may be in flight."""

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.runtime.plan import Op, OpKind, Plan, merge_recorded
from megatron.fsdp.runtime.unit import Unit, WeightState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much may be in flight.

    Attributes:
        gathered: Units, the root aside, with gathered weights at a time.
        reducing: Units whose gradients are being reduced at a time.
        prefetch: Gather ahead of the computation.
        wait_for_reduction: Wait for every reduction where it is issued.
    """

    gathered: int
    reducing: int
    prefetch: bool
    wait_for_reduction: bool


class Schedule:
    """Drives the units of one model through forward and backward passes.

    The plan of the first pass is guessed from the order in which modules are registered. What the computation asks
    for in the first forward and backward is recorded, compared between ranks, and is the plan from then on; when
    parameters were frozen or unfrozen, what it asks for then.

    Args:
        units: All units; the root first, then in the order of registration.
        limits: How much may be in flight.
        exchange: Gathers a list of integers from every rank; None where there is nothing to compare with.
        on_backward_end: Called when a backward has ended; a method, held weakly.

    Attributes:
        reduce_now: Whether gradients that are not sharded are reduced in this backward, or wait for a later one.
    """

    def __init__(
        self,
        units: list[Unit],
        limits: Limits,
        exchange: Callable[[list[int]], list[list[int]]] | None,
        on_backward_end: Callable[[], None],
    ) -> None:
        self.units = units
        self.limits = limits
        self.reduce_now = True
        self._index = {id(unit): i for i, unit in enumerate(units)}
        self._exchange = exchange
        self._on_backward_end = weak_method(on_backward_end)
        self._forward = self._plan(self._guess_forward(0))
        self._backward = self._guessed_backward()
        self._known_backward_plans: dict[tuple[bool, ...], Plan] = {}
        self._recording = True
        self._in_backward = False
        self._end_of_backward: Callable[[], object] = lambda: None
        self._prefetched_first = False
        self._versions: list[list[int]] = []
        self._kept_for_backward: Unit | None = None
        self._reducing: deque[Unit] = deque()

    # Plans -----------------------------------------------------------------------------------------------------

    def _guess_forward(self, i: int) -> list[Op]:
        ops = [Op(OpKind.UNSHARD, i)]
        for child in self.units[i].children:
            ops += self._guess_forward(self._index[id(child)])
        return ops

    def _guess_backward(self, i: int) -> list[Op]:
        ops = [Op(OpKind.UNSHARD, i)]
        for child in reversed(self.units[i].children):
            ops += self._guess_backward(self._index[id(child)])
        return [*ops, Op(OpKind.REDUCE, i)] if self.units[i].trainable else ops

    def _guessed_backward(self) -> Plan:
        # The root, and the unit that forward ends with, are still gathered when backward begins.
        kept = [Op(OpKind.UNSHARD, 0), self._forward.asked[-1]]
        kept += [Op(OpKind.UNSHARD, i) for i, unit in enumerate(self.units) if unit.keeps_weights]
        return self._plan([op for op in self._guess_backward(0) if op not in kept])

    def _follow_freezing(self) -> None:
        """Plan the backward for the units that take gradients now, if others did before."""
        if any([unit.follow_freezing() for unit in self.units]):
            known = self._known_backward_plans.get(self._trainable())
            self._backward = known or self._guessed_backward()
            self._recording = known is None

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(unit.trainable for unit in self.units)

    def _plan(self, asked: list[Op]) -> Plan:
        return Plan(asked, distance=self.limits.gathered - 1 if self.limits.prefetch else 0)

    def _follow_recorded(self) -> None:
        """Make what was recorded the plan, if the ranks agree."""
        self._recording = False
        passes = []
        for plan in (self._forward, self._backward):
            ops = [plan.recorded]
            if self._exchange is not None:
                numbers = self._exchange([value for op in plan.recorded for value in op])
                ops = [[Op(OpKind(n[i]), n[i + 1]) for i in range(0, len(n), 2)] for n in numbers]
            passes.append(merge_recorded(ops))
        forward, backward = passes
        if forward is None or backward is None:
            logger.warning(
                "FSDP: ranks ran different units in the first iteration, in orders that cannot be merged. "
                "Communication follows the order in which the modules are registered."
            )
        else:
            self._forward, self._backward = self._plan(forward), self._plan(backward)
        self._known_backward_plans[self._trainable()] = self._backward

    # Passes ----------------------------------------------------------------------------------------------------

    def prefetch_first(self, until: Unit | None = None) -> None:
        """Start gathering what the next forward needs first, up to a unit; None: as far as the limits allow.

        To be called again, with a later unit.
        """
        if self._in_backward:
            return
        if not self._prefetched_first:
            self._prefetched_first = True
            self._forward.restart()
            self._versions = self._main_versions()
        self._prefetch(self._forward, until)

    def _main_versions(self) -> list[list[int]]:
        """Of all main weights. In-place changes count, but for those by the optimizer, and by way of ``.data``."""
        return [[e.main._version for group in unit.groups for e in group.params] for unit in self.units]

    def units_to_prefetch_first(self) -> list[Unit]:
        """What :meth:`prefetch_first` gathers, in that order, as far as main weights may be changed meanwhile."""
        if not self.limits.prefetch:
            return []
        units = {op.unit_index: self.units[op.unit_index] for op in self._forward.asked if op.kind is OpKind.UNSHARD}
        first: list[Unit] = []
        for unit in units.values():
            full = sum(u.temporary and not u.is_root for u in first) == self.limits.gathered
            if full or not all(group.weights.main_is_apart for group in unit.groups):
                break
            first.append(unit)
        return first

    def reset(self) -> None:
        """Bring every unit to rest, whatever was going on."""
        if self._in_backward:
            logger.warning(
                "FSDP: the last backward did not end. Its gradients are dropped, and with them those of earlier "
                "micro-batches that were not synchronized yet."
            )
        for unit in self.units:
            if self._in_backward:
                unit.abandon_gradients()
            unit.abandon()
        self._kept_for_backward = None
        self._prefetched_first = self._in_backward = False
        self._reducing.clear()

    def forward_failed(self) -> None:
        """See :class:`megatron.fsdp.runtime.unit.UnitListener`. A backward that recomputes goes on, or fails itself."""
        if not self._in_backward or self._backward_failed():
            self.reset()

    def _backward_failed(self) -> bool:
        """True if an exception ended the last backward: autograd then drops the callback at its end."""
        return self._in_backward and (torch._C._current_graph_task_id() == -1 or self._end_of_backward() is None)

    def show_main(self) -> None:
        """Make main weights the model's parameters, also of units that are gathered."""
        for unit in self.units:
            unit.show(compute=False)

    def begin_forward(self) -> None:
        """The model is about to run."""
        if self._in_backward:
            return
        for unit in self.units:
            unit.new_pass()
            if unit.state in (WeightState.FORWARD, WeightState.BACKWARD):
                unit.abandon()
        self._reshard_kept()
        self._follow_freezing()
        if self._prefetched_first and self._versions != self._main_versions():
            self.reset()
            for unit in self.units:
                unit.invalidate()
        if not self._prefetched_first:
            self._forward.restart()
        self._prefetched_first = False

    def end_forward(self) -> None:
        """The model has run."""
        if not self._in_backward:
            self._leave_out(self._forward, self._forward.rest())

    def begin_backward(self) -> None:
        """The first gradient of a backward has arrived."""
        if self._backward_failed():
            self.reset()
        if self._in_backward:
            return
        self._in_backward = True
        self._backward.restart()
        for unit in self.units:
            unit.new_backward()
        callback = weak_method(self.finish_backward)
        self._end_of_backward = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def finish_backward(self) -> None:
        """Backward has ended: release and reduce what is left, in the order of the plan."""
        for unit in self.units:
            if unit.state is WeightState.UNSHARDING:
                unit.reshard_unused()
            elif unit.state is not WeightState.SHARDED:
                unit.reshard()
        # Inputs that need no gradients tell nobody when their unit's backward ends: its gradients are still there.
        self._leave_out(self._backward, self._backward.rest())
        for unit in reversed(self.units):
            if unit.trainable and (unit.has_gradients() or (unit.took_part and not unit.reduced)):
                self._reduce(unit)
        self._kept_for_backward = None
        self._in_backward = False
        try:
            if self._recording:
                self._follow_recorded()
        except BaseException:
            for unit in self.units:
                unit.abandon_gradients()
            raise
        self._on_backward_end()

    # Units -----------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> bool:
        """See :class:`megatron.fsdp.runtime.unit.UnitListener`."""
        if self._backward_failed():
            self.reset()
        if unit.is_root:
            self.begin_forward()
        grad = torch.is_grad_enabled()
        if not self._in_backward:
            if self._kept_for_backward is not None and self._kept_for_backward is not unit:
                self._reshard_kept()
            self._ask(self._forward, unit, WeightState.FORWARD)
            return grad and not unit.is_root
        if unit.state is WeightState.BACKWARD:
            unit.show(compute=True)
            return False
        # Activations are recomputed. What is gathered for that stays for the backward that follows at once; if
        # another unit is recomputed first, then that backward is further away.
        if self._kept_for_backward is not None and self._kept_for_backward is not unit:
            self._reshard_kept()
        self._ask(self._backward, unit, WeightState.FORWARD)
        # Outputs of a recomputation that only restores saved tensors are thrown away, and its inputs with them.
        return grad and not unit.is_root and unit.calls_done >= unit.calls

    def after_forward(self, unit: Unit) -> bool:
        """See :class:`megatron.fsdp.runtime.unit.UnitListener`."""
        if unit.is_root:
            self.end_forward()
        if unit.state is not WeightState.FORWARD:
            return False
        grad = torch.is_grad_enabled()
        if grad and (unit.is_root or unit.keeps_weights):
            unit.to(WeightState.UNSHARDED)
        elif grad and (self._in_backward or self._forward.asked[-1].unit_index == self._index[id(unit)]):
            # Backward begins with the unit that forward ends with.
            unit.to(WeightState.UNSHARDED)
            self._kept_for_backward = unit
        else:
            unit.reshard()
        return grad

    def before_backward(self, unit: Unit) -> None:
        """See :class:`megatron.fsdp.runtime.unit.UnitListener`."""
        self.begin_backward()
        unit.took_part = True
        if unit.state is WeightState.BACKWARD:
            return
        if self._kept_for_backward is unit:
            self._kept_for_backward = None
        self._ask(self._backward, unit, WeightState.BACKWARD)

    def after_backward(self, unit: Unit) -> None:
        """See :class:`megatron.fsdp.runtime.unit.UnitListener`."""
        unit.calls_done += 1
        if unit.state is WeightState.BACKWARD:
            unit.reshard()
        if unit.trainable and unit.calls_done >= unit.calls:
            self._reduce(unit)

    def _reshard_kept(self) -> None:
        kept, self._kept_for_backward = self._kept_for_backward, None
        if kept is not None and kept.state is WeightState.UNSHARDED:
            kept.reshard()

    # Communication ---------------------------------------------------------------------------------------------

    def _ask(self, plan: Plan, unit: Unit, state: WeightState) -> None:
        """The computation needs the unit's weights now."""
        if unit.state in (WeightState.SHARDED, WeightState.UNSHARDING):
            self._reach(plan, Op(OpKind.UNSHARD, self._index[id(unit)]))
            if unit.state is WeightState.SHARDED:
                unit.unshard()
        unit.use(state)
        self._prefetch(plan)

    def _reduce(self, unit: Unit) -> None:
        """The unit's gradients are complete, or no more will come."""
        unit.reduced = False
        self._reach(self._backward, Op(OpKind.REDUCE, self._index[id(unit)]))
        if not unit.reduced:
            self._issue_reduction(unit)

    def _reach(self, plan: Plan, op: Op) -> None:
        indices = plan.ask(op)
        if indices is not None:
            self._leave_out(plan, indices[:-1])
            self._issue_until(plan, indices[-1])

    def _leave_out(self, plan: Plan, indices: range) -> None:
        """Issue operations that this rank's computation did not ask for, as other ranks' did."""
        for index in indices:
            self._issue_until(plan, index)
            unit = self.units[plan.asked[index].unit_index]
            if plan.asked[index].kind is OpKind.UNSHARD and unit.state is WeightState.UNSHARDING:
                unit.reshard_unused()

    def _issue_until(self, plan: Plan, index: int) -> None:
        """Issue operations in the order of the plan, up to the one at ``index`` in ``plan.asked``."""
        while not plan.is_issued(index):
            op = plan.ahead()
            assert op is not None, "an operation that is not issued is ahead"
            plan.issued += 1
            unit = self.units[op.unit_index]
            if op.kind is OpKind.REDUCE:
                self._issue_reduction(unit)
            elif unit.state is WeightState.SHARDED:
                unit.unshard()

    def _prefetch(self, plan: Plan, until: Unit | None = None) -> None:
        """Issue the gathers that come next, as far as the limit allows, and not beyond that of a unit."""
        while (op := plan.ahead()) is not None and op.kind is OpKind.UNSHARD:
            unit = self.units[op.unit_index]
            if unit.state is WeightState.SHARDED:
                full = unit.temporary and not unit.is_root and self._full()
                if not self.limits.prefetch or full or unit.slot_is_taken:
                    return
                unit.unshard()
            plan.issued += 1
            if unit is until:
                return

    def _full(self) -> bool:
        others = [u for u in self.units if u.state is not WeightState.SHARDED and u.temporary and not u.is_root]
        # Those that are kept for backward wait for it and for no place.
        gathered = [u for u in others if not (u.keeps_weights and u.state is WeightState.UNSHARDED)]
        return len(gathered) >= self.limits.gathered

    def _issue_reduction(self, unit: Unit) -> None:
        unit.reduced = True
        while len(self._reducing) >= self.limits.reducing:
            self._reducing.popleft().wait_for_gradients()
        if unit.reduce_gradients(self.reduce_now) and unit.reducing_frees_memory:
            self._reducing.append(unit)
        if self.limits.wait_for_reduction:
            unit.wait_for_gradients()

    def reduce_waiting(self) -> None:
        """Reduce what earlier micro-batches left, if no reduction has come after them."""
        for unit in reversed(self.units):
            unit.reduce_waiting()
