"""Decides which unit to unshard or reduce next, and limits the communication in flight."""

import logging
from collections import deque
from collections.abc import Callable

import torch

from megatron.fsdp.buffers.weights import PlaneSet, WeightBuffer, outdated
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.journal import JOURNAL
from megatron.fsdp.comm.streams import is_capturing
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.graph import is_frozen, listen
from megatron.fsdp.runtime.passes import Pass, PassState
from megatron.fsdp.runtime.plan import Op, OpKind, Plan, Plans
from megatron.fsdp.runtime.unit import Unit, WeightState, in_forward

logger = logging.getLogger(__name__)


class Schedule:
    """Drives the units of one model through forward and backward passes.

    It follows ``plans``, so every rank issues the same collectives in the same order.

    Args:
        units: All units; the root first, then in the order of registration.
        config: Settings of the model; the limits of the communication in flight.
        context: Has the streams, and gathers a list of integers from every rank.
        reduces_now: A method that says whether gradients that are not sharded are reduced in this backward.
        on_backward_end: A method to call when a backward has ended. Both are referred to weakly: the engine owns this.

    Attributes:
        plans: The order of communication.
        passes: Whether a backward runs or has failed.
        groups: All parameter groups, unit by unit.
        reducing: Units whose reductions have been issued and not waited for, oldest first.
        refresh_weights: Whether the next forward unshards all weights, even if they are up to date.
        in_callers_forward: Whether a forward runs whose caller unshards and reshards the units.
    """

    def __init__(
        self,
        units: list[Unit],
        config: FSDPConfig,
        context: CommContext,
        reduces_now: Callable[[], bool],
        on_backward_end: Callable[[], None],
    ) -> None:
        self.units, self._config, self._context = units, config, context
        self._prefetches = config.overlap_param_gather and config.max_unsharded_units > 1
        self.plans = Plans(units, config.max_unsharded_units - 1 if self._prefetches else 0, context.exchange)
        self.passes = Pass()
        self.reducing: deque[Unit] = deque()
        self._late: list[int] = []  # units; see :meth:`_reduce_late`
        self._reducing_shards: deque[Unit] = deque()
        self.refresh_weights = config.cuda_graph_mode
        self._keeps = self._has_skipped = self._in_order = False
        self._inner: list[Unit] | None = None  # those that a backward inside a forward uses, as that forward does
        self.in_callers_forward = False
        self.groups = [group for unit in units for group in unit.groups]
        self._weights = [group.weights for group in self.groups]
        self._reduces_apart = any(group.gradients.has_outer_stream for group in self.groups)
        self._params = [param for group in self.groups for param in group.params]
        self._reduces_now = weak_method(reduces_now)
        self._on_backward_end = weak_method(on_backward_end)
        listen(self)

    # Passes ----------------------------------------------------------------------------------------------------

    def prefetch_first(self, until: Unit | None = None) -> None:
        """Start the first unshards of the next forward, up to a unit. None: up to the limits.

        It may be called repeatedly, with a later unit each time. Does nothing in ``cuda_graph_mode``: a captured
        forward must contain its unshards and cannot wait for others.
        """
        if self._config.cuda_graph_mode or self.passes.state is not PassState.NO_BACKWARD:
            return
        if not self.passes.prefetched:
            # The backward of the forward that is recorded may still follow.
            self.plans.forward.rewind()
            self.passes.prefetched = True
        self._prefetch(self.plans.forward, until)

    def units_to_prefetch_first(self) -> list[Unit]:
        """The units that :meth:`prefetch_first` unshards, in order, while main weights of others are still updated.

        The list ends before a unit whose main weights are in the memory that an unshard writes to, or are quantized
        together with those of the other units.
        """
        first: list[Unit] = []
        for unit in self.plans.next_forward_units() if self._prefetches else ():
            full = sum(u.temporary and not u.is_root for u in first) == self._config.max_unsharded_units
            if full or unit.quantized or not all(group.weights.main_is_apart for group in unit.groups):
                break
            first.append(unit)
        return first

    def reset(self) -> None:
        """Reshard every unit, in any state."""
        if self.passes.state is not PassState.NO_BACKWARD:
            logger.warning(
                "FSDP: the last backward did not end. Its gradients and earlier ones that wait for others are dropped."
            )
            self.abandon_gradients()
        for unit in self.units:
            unit.abandon()
        self.passes.reset()
        self.in_callers_forward = False
        self.reducing.clear()
        self._reducing_shards.clear()

    def abandon_gradients(self) -> None:
        """Drop gradients that are not synchronized yet."""
        for group in self.groups:
            group.abandon_gradients()

    def forward_failed(self) -> None:
        """Reshard every unit, unless the forward is a recomputation: its backward then continues or fails."""
        if self.passes.has_failed or not self.passes.in_backward:
            self.reset()

    def reset_if_failed(self) -> None:
        """Reshard every unit if an exception has ended the last backward of this model."""
        if self.passes.has_failed:
            self.reset()

    def show_main(self) -> None:
        """Make main weights the model's parameters, including those of unsharded units."""
        for unit in self.units:
            unit.show(compute=False)

    def _begin_forward(self) -> None:
        """Prepare a forward of the model."""
        if self.plans.recording and is_capturing():
            raise RuntimeError(
                "A CUDA graph is captured before the order of communication is known. Run at least one whole iteration "
                "first, and one after freezing or unfreezing parameters."
            )
        # Not the mode of a unit's own forward: reentrant checkpointing turns gradients off, and ranks may skip a unit.
        self._keeps = torch.is_grad_enabled()
        if self.refresh_weights:
            # The first forward of an iteration, or one without gradients, may be captured, and must contain its
            # unshards. A replayed optimizer step does not mark weights as out of date either.
            self.refresh_weights = not torch.is_grad_enabled()
            self.invalidate()
        for unit in self.units:
            # The graph of an earlier forward may still be pending, and counts its own calls.
            if torch.is_grad_enabled():
                unit.new_pass()
            # The last forward ended with an exception outside of all hooks.
            if unit.state in (WeightState.FORWARD, WeightState.BACKWARD):
                unit.abandon()
        self._reshard_kept()
        self._follow_freezing()
        self._follow_writes()
        if not self.passes.prefetched:
            self.plans.forward.rewind()
        self.plans.forward.recorded = []
        self.passes.prefetched = False

    def _follow_writes(self) -> None:
        """Unshard weights again if main weights were written since; an expert's perhaps by the ranks that hold it."""
        if (written := outdated(self._weights)) and not self.passes.by_caller:
            self.invalidate(written)
            for unit in [u for u in self.units if u.state is not WeightState.SHARDED]:
                unit.unshard(PlaneSet.ALL if unit.keeps_weights else PlaneSet.FORWARD)

    def invalidate(self, written: list[WeightBuffer] | None = None) -> None:
        """Mark compute weights as out of date after main weights have changed; the next use unshards again."""
        JOURNAL.doubted |= written is not None  # perhaps not on ranks without elements, which issue something else
        for weights in written or self._weights:
            weights.invalidate()

    def _follow_freezing(self) -> None:
        """Apply changes of ``requires_grad`` since the last pass."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = [(param.trained, param.main.requires_grad, param.compute.requires_grad) for param in self._params]
        if any([trained is not main or trained is not compute for trained, main, compute in shown]):
            self.plans.follow_freezing()

    def _begin_backward(self) -> None:
        """Prepare a backward, if none is running. Called with the first gradient."""
        self.reset_if_failed()
        if self.passes.in_backward:
            return
        self.passes.begin_backward(weak_method(self.finish_backward))
        # Autograd looks at ``requires_grad`` of the weights when it has their gradients, as in an unsharded model.
        self._follow_freezing()
        self.plans.begin_backward()
        for unit in self.units:
            unit.new_backward()
        written = outdated(self._weights)
        self._in_order = not (written or self.plans.gathers() or self._orders_may_differ())
        if written:  # these are unsharded again, in the order of the plan
            self.invalidate(written)
            for unit in [u for u in self.units if u.state is WeightState.UNSHARDED]:
                unit.unshard()

    def finish_backward(self) -> None:
        """End a backward: reshard the remaining units and reduce the remaining gradients, in the order of the plan."""
        for unit in self.units:
            unit.let_go(Direction.BACKWARD)
            if not (self.in_callers_forward and (unit.held_by or unit.expected_by)):
                unit.reshard()
        # Nothing tells when the last call of such a unit ends. Its place in the plan is behind all of its calls.
        for unit in reversed(self.units):
            if unit.unwatched and unit.calls and unit.trainable and unit.has_gradients():
                self._reduce(unit)
        self._issue_skipped(self.plans.backward, self.plans.backward.finish())
        self._join_skipped()
        # If no input of a unit needs gradients, no hook runs at the end of its backward, so it is reduced here.
        for unit in reversed(self.units):
            if unit.trainable and (unit.has_gradients() or (unit.took_part and not unit.reduced)):
                self._reduce(unit)
        if self._orders_may_differ():
            self._reduce_late()
        self.passes.end_backward()
        try:
            # While the next micro-batch's forward runs, its recording is incomplete: a later backward's end follows it.
            if self.plans.recording and not self.in_callers_forward:
                self.plans.follow_recorded()
        except BaseException:
            self.abandon_gradients()
            raise
        self._on_backward_end()

    # Units -----------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> bool:
        """Handle the start of a module's forward. Returns whether to watch its inputs for the end of its backward."""
        self.reset_if_failed()
        if unit.state is WeightState.HELD:
            return False
        if self._inner is not None and unit in self._inner:  # a recomputation
            unit.show(compute=True)
            return False
        if unit.is_root and not self.passes.in_backward:
            self._begin_forward()
        elif not (self.passes.in_backward or in_forward(self.units)):
            self._follow_writes()  # the unit was called by itself
            self._keeps = torch.is_grad_enabled()
        unit.hidden |= self._keeps and not torch.is_grad_enabled() and not self.passes.in_backward
        if self.passes.in_backward and unit.state is WeightState.BACKWARD:
            self.before_inner_forward(unit)
            unit.show(compute=True)
            return False
        # In forward, the kept unit is the last one of an earlier forward. In backward, a unit that was unsharded for a
        # recomputation is kept for its backward, which follows at once unless another unit is recomputed first.
        if self.passes.kept is not unit and not unit.to_run:
            self._reshard_kept()
        if not unit.to_run and self.units[0].state is WeightState.FORWARD:
            unit.to_run |= unit.together
        self._use(self.plans.backward if self.passes.in_backward else self.plans.forward, unit, WeightState.FORWARD)
        # A recomputation that only restores saved tensors discards its outputs, so no backward reaches its inputs.
        grad = torch.is_grad_enabled() and (not unit.is_root or is_frozen(unit))
        return grad and (not self.passes.in_backward or unit.calls_done >= unit.calls)

    def after_forward(self, unit: Unit) -> bool:
        """Handle the end of a module's forward. Returns whether to watch its outputs for the start of backward."""
        if unit.state is WeightState.HELD or (self._inner is not None and unit in self._inner):
            return False
        forward = self.plans.forward
        if unit.is_root and not self.passes.in_backward:
            self._issue_skipped(forward, forward.finish())
            for each in self.units:
                each.to_run.clear()
                if each.state is WeightState.UNSHARDED and (each.together or not self._keeps):
                    self._leave(each, self._keeps)  # as on the ranks that have run it
            self._join_skipped()
        if unit.state is not WeightState.FORWARD:
            return False
        grad = torch.is_grad_enabled()
        # Ranks that skip the unit keep it, too, and cannot know that it is checkpointed and has no graph yet.
        self._leave(unit, grad if self.passes.in_backward else self._keeps)
        if not (self.passes.in_backward or in_forward(self.units)):
            # Outside of the model's forward its parameters are main weights, also those of units that stay unsharded:
            # what users write to them must not be lost. A hook may have written since the end of the unit's forward.
            for each in self.units:
                each.check_not_written()
            self.show_main()
        return grad

    def _leave(self, unit: Unit, keeps: bool) -> None:
        """Reshard a unit that a forward has used, or keep it for its other modules or for the backward."""
        if (keeps and unit.keeps_weights) or unit.to_run:
            unit.to(WeightState.UNSHARDED)
        elif keeps and (self.passes.in_backward or self._is_last(unit, self.plans.forward.done)):
            # Backward begins with the last unit of forward: keep it instead of unsharding it again.
            unit.to(WeightState.UNSHARDED)
            self.passes.kept = unit
            self._context.unshard_stream.follow()  # a later forward, on another stream, may reshard it
        else:
            unit.reshard(keep=self._keeps and not self.passes.in_backward)

    def _is_last(self, unit: Unit, done: int) -> bool:
        """Whether a forward ends with this unit, after ``done`` operations, and backward reads the same weights."""
        plan = self.plans.forward
        runs_again = done < len(plan.requested) and len(plan.requested) - 1 in plan.repeated
        return plan.requested[-1].unit_index == unit.index and not (unit.is_directional or runs_again)

    def before_inner_forward(self, unit: Unit) -> None:
        """Handle the forward of a module inside a unit, which may be recomputed in the unit's backward."""
        in_use = unit.state is WeightState.BACKWARD or Direction.BACKWARD in unit.held_by
        recomputed = unit.is_directional and self.passes.in_backward and in_use
        if recomputed and self._unshard_forward_only(unit):
            unit.prepare(Direction.FORWARD)

    def before_backward(self, unit: Unit) -> None:
        """Handle the gradient of an output: the unit's backward starts."""
        if self._inner is not None:
            if unit.state is not WeightState.FORWARD:
                self._use(self.plans.forward, unit, WeightState.FORWARD)
                self._inner.append(unit)
            return
        self._begin_backward()
        for each in self.plans.around[unit.index] if not self._in_order else ():
            # Hooks on a unit run before those on units around it that return its output or no tensor; not on all ranks.
            waits = each.state in (WeightState.SHARDED, WeightState.UNSHARDING)
            if waits and self.plans.backward.lies_ahead(op := Op(OpKind.UNSHARD, each.index)):
                self._advance_to(self.plans.backward, op)
                each.to(WeightState.UNSHARDED)
        unit.took_part = True
        if unit.state is not WeightState.BACKWARD:
            self._use(self.plans.backward, unit, WeightState.BACKWARD)

    def enter_aside(self, units: list[Unit]) -> None:
        """Unshard units for all of a backward that enters them at something else than their outputs."""
        by_caller = self.passes.by_caller
        for unit in () if by_caller else sorted(units, key=lambda each: each.index, reverse=True):
            self.before_backward(unit)
            unit.aside = True
            self.plans.unusual |= self._inner is None

    def begin_inner_backward(self) -> None:
        """Handle the start of a backward of autograd's: it may be one in a forward of this model, as for forces."""
        if not self.passes.in_backward and in_forward(self.units):
            if any(unit.runs_forward() for unit in self.units):
                self._inner = []
            else:
                self.reset()

    def end_inner_backward(self) -> None:
        """Reshard the units that a backward in a forward has used."""
        inner, self._inner = self._inner, None
        for unit in inner or ():
            unit.aside = False
            self._leave(unit, self._keeps)

    def after_backward(self, unit: Unit) -> None:
        """Handle complete gradients of the inputs of one call: this call's backward has ended."""
        if self._inner is not None:
            if unit in self._inner and not unit.aside:
                self._inner.remove(unit)
                self._leave(unit, self._keeps)
            return
        unit.calls_done += 1
        if unit.aside:
            return
        done = unit.calls_done >= unit.calls and not unit.unwatched
        if unit.state is WeightState.BACKWARD and (done or not unit.together):
            unit.reshard()
        # Nothing tells when the backward of a call ends whose inputs need no gradients, as a recurrence's first one.
        if unit.trainable and done:
            self._reduce(unit)

    def _reshard_kept(self) -> None:
        kept, self.passes.kept = self.passes.kept, None
        if kept is not None and kept.state is WeightState.UNSHARDED:
            kept.reshard(keep=not self.passes.in_backward)

    # Passes whose caller unshards and reshards units ------------------------------------------------------------

    # The forward of one micro-batch and the backward of another may run at once. A unit is resharded when neither
    # needs it. Both requests and prefetches follow from the caller's order alone, which is the same on all ranks.

    def begin_callers_forward(self) -> None:
        """Begin a forward whose caller unshards and reshards the units, and unshard the root."""
        self.reset_if_failed()
        self._begin_forward()
        self.in_callers_forward = True
        for unit in self.units:
            # The root may still be held by the last forward. It is requested again, so that it is recorded.
            unit.held_by.discard(Direction.FORWARD)
        self.hold(self.units[0], Direction.FORWARD)

    def end_callers_forward(self) -> None:
        """End a forward: let go of units that backward does not need as soon as it begins."""
        self.in_callers_forward = False
        for unit in self.units:
            self.let_go(unit, Direction.FORWARD)

    def begin_callers_backward(self) -> None:
        """Begin a backward whose caller unshards and reshards the units, unless it has begun; unshard the root."""
        self.reset_if_failed()
        if self.passes.by_caller:
            return
        self.passes.begin_callers_backward()
        self._in_order = False
        self.plans.begin_backward()
        for unit in self.units:
            unit.new_backward()
        self.hold(self.units[0], Direction.BACKWARD)

    def end_failed_callers_pass(self) -> None:
        """Reshard every unit, before an ordinary forward, if an exception has ended the schedule of a caller's pass."""
        if self.in_callers_forward or self.passes.by_caller:
            self.reset()

    def hold(self, unit: Unit, direction: Direction) -> None:
        """Unshard a unit for a pass, until :meth:`let_go`, and prefetch the next units of the pass."""
        if direction in unit.held_by:
            return
        unit.took_part |= direction is Direction.BACKWARD
        plan = self.plans.forward if direction is Direction.FORWARD else self.plans.backward
        # Also if the other pass has unsharded it: the order that is recorded must be that of this pass.
        self._advance_to(plan, Op(OpKind.UNSHARD, unit.index))
        self._unshard(plan, unit)
        unit.hold(direction)
        self._prefetch(plan)

    def let_go(self, unit: Unit, direction: Direction) -> None:
        """Reshard a unit unless the other pass needs it, and reduce its gradients if backward held it."""
        was_held = direction in unit.held_by
        if direction is Direction.FORWARD and torch.is_grad_enabled() and unit.keeps_weights:
            return
        unit.let_go(direction)
        if was_held and direction is Direction.BACKWARD and unit.trainable:
            self._reduce(unit)

    # Communication ---------------------------------------------------------------------------------------------

    def _use(self, plan: Plan, unit: Unit, state: WeightState) -> None:
        """Unshard a unit whose weights the computation needs, and prefetch the next units."""
        unit.check_not_written()  # since it was used last in this forward
        if self.passes.kept is unit:
            self.passes.kept = None
        if unit.state in (WeightState.SHARDED, WeightState.UNSHARDING):
            self._advance_to(plan, Op(OpKind.UNSHARD, unit.index))
        self._unshard(plan, unit)
        if unit.is_directional and plan.direction is Direction.BACKWARD and state is WeightState.FORWARD:
            self._unshard_forward_only(unit)
        if not self.passes.in_backward:
            unit.follow_writes()
        unit.use(state, Direction.BACKWARD if state is WeightState.BACKWARD else Direction.FORWARD)
        self._prefetch(plan)

    def _unshard(self, plan: Plan, unit: Unit) -> None:
        """Unshard what the pass of a plan reads."""
        unit.expected_by.add(plan.direction)
        # A unit that is not sharded may have been prefetched for the other pass, and lack planes.
        if unit.state is WeightState.SHARDED or unit.is_directional:
            in_forward = PlaneSet.ALL if unit.keeps_weights else PlaneSet.FORWARD
            unit.unshard(PlaneSet.BACKWARD if plan.direction is Direction.BACKWARD else in_forward)

    def _unshard_forward_only(self, unit: Unit) -> bool:
        """Unshard what backward needs to recompute a forward only. Returns whether this is the first recomputation."""
        plan, index = self.plans.backward, unit.index
        # Requested even if it was prefetched, so that it is recorded.
        first = plan.last_request(index) == Op(OpKind.UNSHARD, index) or unit.lacks(Direction.FORWARD)
        if first:
            self._advance_to(plan, Op(OpKind.UNSHARD_FORWARD_ONLY, index))
            unit.unshard(PlaneSet.FORWARD_ONLY)
        return first

    def _reduce(self, unit: Unit) -> None:
        """Reduce a unit's complete gradients, unless :meth:`_advance_to` has already issued the reduction."""
        unit.reduced, unit.complete = False, True
        op = Op(OpKind.REDUCE, unit.index)
        last = self.plans.up_to(op) if self._in_order else op
        if last is None:
            return  # it waits for others, or for the end of the backward
        self._advance_to(self.plans.backward, last)
        if unit.reduced:
            return
        if self._orders_may_differ():
            self._late.append(unit.index)  # other ranks may not run it now
        else:
            self._issue_reduction(unit)

    def _orders_may_differ(self) -> bool:
        """Whether a request that does not lie ahead may be one of this rank alone."""
        return self.plans.may_differ and not self.in_callers_forward

    def _reduce_late(self) -> None:
        """Reduce what ranks have reduced out of the plan's order, in one order. A collective."""
        rows, self._late = self.plans.exchange(self._late), []
        for index in sorted({index for row in rows for index in row}, reverse=True):
            self._issue_reduction(self.units[index])

    def _advance_to(self, plan: Plan, op: Op) -> None:
        """Issue all operations of the plan up to ``op``, which the computation requests."""
        if self._in_order and op.kind is not OpKind.REDUCE and plan is self.plans.backward:
            return
        indices = plan.request(op)
        if indices is None:
            self.plans.check_stray(op, plan)
        else:
            self._issue_skipped(plan, indices[:-1])
            self._issue_until(plan, indices[-1])

    def _issue_skipped(self, plan: Plan, indices: range) -> None:
        """Issue operations that this rank's computation has skipped: those of other ranks may have requested them."""
        for index in indices:
            self._issue_until(plan, index)
            unit = self.units[plan.requested[index].unit_index]
            if plan.requested[index].kind is OpKind.REDUCE and unit is self.passes.kept and not unit.ran:
                self._reshard_kept()  # kept for ranks that run it
            if plan.requested[index].kind is OpKind.REDUCE or unit.state is not WeightState.UNSHARDING:
                continue
            self._has_skipped = True
            in_forward = plan is self.plans.forward and self._keeps
            later = plan is self.plans.backward and unit.ran and not self.plans.recording
            later = later and plan.requested[index] not in plan.requested[index + 1 :]
            # It stays unsharded as on the ranks that run it now, or until its backward comes later than on these.
            if later or (in_forward and unit.keeps_weights) or (unit.together and plan is self.plans.forward):
                unit.to(WeightState.UNSHARDED)
            elif in_forward and self._is_last(unit, index + 1) and not self.in_callers_forward:
                unit.to(WeightState.UNSHARDED)
                self.passes.kept = unit
            else:
                unit.let_go(plan.direction, keep=in_forward)

    def _join_skipped(self) -> None:
        """Wait for unshards that only other ranks use: what this rank writes to main weights next is not for them."""
        if self._has_skipped:
            self._has_skipped = False
            self._context.join_unshards()

    def _issue_until(self, plan: Plan, index: int) -> None:
        """Issue operations in the order of the plan, up to the one at ``index`` in ``plan.requested``."""
        while not plan.is_issued(index):
            op = plan.ahead()
            assert op is not None, "an operation that is not issued is ahead"
            self._issue(plan, op)

    def _issue(self, plan: Plan, op: Op) -> None:
        """Issue the operation that is ahead."""
        unit = self.units[op.unit_index]
        # Nothing told that the backward of its last call has ended; ranks that skipped that call gather it again.
        in_use = op.kind is OpKind.UNSHARD and unit.state is WeightState.BACKWARD and plan.repeats
        plan.issued += 1
        if op.kind is OpKind.REDUCE:
            self._issue_reduction(unit)
        elif op.kind is OpKind.UNSHARD_FORWARD_ONLY:
            unit.unshard(PlaneSet.FORWARD_ONLY)
        else:
            if in_use:
                unit.reshard()
            self._unshard(plan, unit)
            if in_use:
                unit.use(WeightState.BACKWARD, Direction.BACKWARD)

    def _prefetch(self, plan: Plan, until: Unit | None = None) -> None:
        """Issue the unshards that come next, as far as the limit allows, and not beyond that of a unit."""
        while (op := plan.ahead()) is not None and op.kind is not OpKind.REDUCE:
            unit = self.units[op.unit_index]
            waits = unit.state is WeightState.SHARDED
            if op.kind is OpKind.UNSHARD_FORWARD_ONLY:
                waits = waits or not self._prefetches
            elif not waits:
                waits = plan.repeats  # in use
            elif self._prefetches:
                waits = unit.slot_is_taken or (unit.temporary and not unit.is_root and self._full(plan))
            if waits:
                return
            self._issue(plan, op)
            if unit is until:
                return

    def _full(self, plan: Plan) -> bool:
        others = [u for u in self.units if u.state is not WeightState.SHARDED and u.temporary and not u.is_root]
        if self.in_callers_forward and self.passes.by_caller:  # each of the two passes may unshard as many units
            others = [u for u in others if plan.direction in u.held_by | u.expected_by]
        # Units that stay unsharded until their backward do not count: the limit could not be kept with them.
        unsharded = [u for u in others if not ((u.keeps_weights or u.to_run) and u.state is WeightState.UNSHARDED)]
        return len(unsharded) >= self._config.max_unsharded_units

    def _issue_reduction(self, unit: Unit) -> None:
        unit.reduced = True
        while len(self.reducing) >= self._config.max_reducing_units:
            earlier = self.reducing.popleft()
            earlier.wait_for_gradients(outer=False)
            if self._reduces_apart:
                # The reduction of its shard over the outer axis may go on for as long as that of the next unit.
                self._reducing_shards.append(earlier)
                while len(self._reducing_shards) > self._config.max_reducing_units:
                    self._reducing_shards.popleft().wait_for_gradients()
        if unit.reduce_gradients(self._reduces_now()) and unit.reducing_frees_memory:
            self.reducing.append(unit)
        if not self._config.overlap_grad_reduce:
            unit.wait_for_gradients()

    def reduce_waiting(self) -> None:
        """Start reducing what earlier micro-batches left unreduced."""
        for unit in reversed(self.units):
            unit.reduce_waiting()
