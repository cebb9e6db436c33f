"""Records what one rank does, by replacing methods of single objects while the recording goes on.

The engine has no line that exists for this: who does not record pays nothing. What is replaced are the schedule's
answers to the hooks (when a unit computes), what gives work to the stream (what is communicated, for which unit), and
the stream's ``run`` (when that work is done, and how long the computation waits for it).
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.fsdp.comm.streams import Handle, Stream, Task
from megatron.fsdp.runtime.autograd import in_backward
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.tools.trace.clock import Clock
from megatron.fsdp.tools.trace.timeline import Kind, RankTrace, Row, Span


class Activity(NamedTuple):
    """What the computation does at a moment, or what is communicated, as in a :class:`Span`."""

    row: Row
    kind: Kind
    unit: str = ""
    backward: bool = False
    size: int = 0
    work: int = 0


class _Marked(NamedTuple):
    """An activity between two marks."""

    activity: Activity
    start: Any
    end: Any


_OUTSIDE = Activity(Row.COMPUTE, Kind.OUTSIDE)
_OPTIMIZER = Activity(Row.COMPUTE, Kind.OPTIMIZER)
_ENGINE = Activity(Row.COMPUTE, Kind.ENGINE)
_OTHER_WORK = Activity(Row.REDUCTIONS, Kind.OTHER)


class Replacements:
    """Methods of single objects that are other than those of their class for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Let ``around(method, *arguments)`` run where ``owner.name(*arguments)`` is called."""
        method = getattr(owner, name)

        @functools.wraps(method)  # learning rate schedulers mark the optimizer's step with an attribute
        def instead(_: Any, *args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name)))
        # A method and no plain function: the schedule makes weak references to its own.
        vars(owner)[name] = MethodType(instead, owner)

    def undo(self) -> None:
        """Make everything what it was."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before


class Lane:
    """What the computation does: at each moment one thing, on top of things that this has interrupted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stack = [_OUTSIDE]
        self._open = True
        self.start = self._since = clock.mark()
        self.end: Any = None
        self.passed: list[_Marked] = []

    def change(self, stack: list[Activity]) -> None:
        """From now on the computation does what is last in ``stack``."""
        if self._open and stack[-1] != self._stack[-1]:
            now = self._clock.mark()
            self.passed.append(_Marked(self._stack[-1], self._since, now))
            self._since = now
        self._stack = stack

    def enter(self, activity: Activity, below: Activity | None = None) -> None:
        """Begin something, within what is going on; or around ``below``, which has begun already."""
        place = len(self._stack) if below is None else self._stack.index(below)
        self.change([*self._stack[:place], activity, *self._stack[place:]])

    def leave(self, activity: Activity, then: Activity | None = None) -> None:
        """End something, whatever is on top of it, and begin something else at once."""
        rest = list(self._stack)
        if activity in rest[1:]:
            del rest[len(rest) - 1 - rest[::-1].index(activity)]
        self.change(rest if then is None else [*rest, then])

    def leave_all(self, kinds: tuple[Kind, ...], then: Activity | None = None) -> None:
        """End everything of some kinds."""
        rest = [activity for activity in self._stack if activity is _OUTSIDE or activity.kind not in kinds]
        self.change(rest if then is None else [*rest, then])

    @property
    def stack(self) -> tuple[Activity, ...]:
        """What is going on, last, and what it has interrupted."""
        return tuple(self._stack)

    @contextmanager
    def during(self, activity: Activity, then: Activity | None = None) -> Iterator[None]:
        """The computation does this within the context, and something else afterwards if nothing is raised."""
        self.enter(activity)
        try:
            yield
        except BaseException:
            self.leave(activity)
            raise
        self.leave(activity, then)

    def close(self) -> None:
        """Nothing is recorded any more."""
        if self._open:
            self._open = False
            self.end = self._clock.mark()
            self.passed.append(_Marked(self._stack[-1], self._since, self.end))


class _Waited(Handle):
    """A handle that records who waits for it."""

    def __init__(self, handle: Handle, work: Activity, lane: Lane) -> None:
        self._handle = handle
        self._work = work
        self._lane = lane

    @property
    def done(self) -> bool:
        return self._handle.done

    @property
    def ended(self) -> bool:
        return self._handle.ended

    def wait(self) -> None:
        with self._lane.during(self._work._replace(row=Row.WAITS, backward=in_backward(), size=0)):
            self._handle.wait()


# Methods of the engine that are called between passes.
_METHODS = ("finish_gradients", "start_reductions", "unshard_persistent", "prefetch_first", "invalidate_weights")


class Recorder:
    """Records one model on this rank from :meth:`start` to :meth:`stop`.

    Args:
        engine: Engine of the model to record.
        clock: Makes marks where the model computes.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._observed = engine
        self._clock = clock
        self._replacements = Replacements()
        self._optimizer_hooks: list[Any] = []
        self._streams: list[Stream] = []
        self._work = _OTHER_WORK
        self._works = itertools.count(1)
        self._communicated: list[_Marked] = []
        self._lane: Lane | None = None

    @property
    def lane(self) -> Lane:
        """What the computation does."""
        assert self._lane is not None, "only after start"
        return self._lane

    def start(self) -> None:
        """Replace methods, and begin."""
        self._lane = Lane(self._clock)
        schedule = self._observed.schedule
        hooks: dict[str, Callable[..., Any]] = {
            "before_forward": self._before_forward,
            "after_forward": self._after_forward,
            "before_backward": self._before_backward,
            "after_backward": self._after_backward,
            "finish_backward": self._finish_backward,
        }
        for name, around in hooks.items():
            self._replacements.replace(schedule, name, around)
        for name in (
            "finish_gradients",
            "start_reductions",
            "unshard_persistent",
            "prefetch_first",
            "invalidate_weights",
        ):
            self._replacements.replace(self._observed, name, self._engine)
        for unit in self._observed.units:
            self._watch_unit(unit)
        streams = {id(group.weights.stream): group.weights.stream for group in self._observed.groups}
        streams[id(self._observed.context.stream)] = self._observed.context.stream
        self._streams = list(streams.values())
        for stream in self._streams:
            self._replacements.replace(stream, "run", self._run)
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(lambda *_: self.lane.enter(_OPTIMIZER)),
            register_optimizer_step_post_hook(lambda *_: self.lane.leave(_OPTIMIZER)),
        ]

    def _watch_unit(self, unit: Unit) -> None:
        for group in unit.groups:
            gather = Activity(Row.GATHERS, Kind.GATHER, unit.label, size=group.unshard_bytes)
            reduce = Activity(Row.REDUCTIONS, Kind.REDUCTION, unit.label, size=group.reduce_bytes)
            for owner, name, work in (
                (group.weights, "unshard", gather),
                (group.gradients, "reduce", reduce),
                (group.gradients, "reduce_waiting", reduce),
            ):
                self._replacements.replace(owner, name, functools.partial(self._issue, work))
            # What is on its way already was given to the stream by the method that is not replaced yet.
            weights, gradients = group.weights, group.gradients
            if weights.handle is not None:
                weights.handle = self._numbered(weights.handle, gather)
            started = gradients.in_flight.handles
            started[:] = [self._numbered(handle, reduce) for handle in started]

    def _numbered(self, handle: Handle, work: Activity) -> Handle:
        return _Waited(handle, work._replace(work=next(self._works)), self.lane)

    def stop(self) -> None:
        """End, and make every method what it was."""
        self.lane.close()
        self._replacements.undo()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()

    def trace(self, rank: int) -> RankTrace:
        """What was recorded. Waits for communication that is still on its way."""
        for stream in self._streams:
            stream.run(lambda: None).wait()
        self._clock.settle()
        everyone = self._observed.index.dense
        time = self._clock.time
        marked = [*self.lane.passed, *self._communicated]
        spans = [Span(*a[:4], time(start), time(end), a.size, a.work) for a, start, end in marked]
        return RankTrace(
            rank=rank,
            device=_device_name(self._observed.device),
            units=tuple(unit.label for unit in self._observed.units),
            start=time(self.lane.start),
            end=time(self.lane.end),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            clock_error=self._clock.error,
            all_meet=all(group.axes is everyone and everyone.outer is None for group in self._observed.groups),
        )

    # Communication ---------------------------------------------------------------------------------------------

    def _issue(self, work: Activity, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``method`` gives to the stream is ``work``."""
        before, self._work = self._work, work
        try:
            return method(*args, **kwargs)
        finally:
            self._work = before

    def _run(self, run: Callable[[Task], Handle], task: Task) -> Handle:
        """Replaces :meth:`megatron.fsdp.comm.streams.Stream.run`."""
        work = self._work._replace(backward=in_backward(), work=next(self._works))

        def timed() -> None:
            start = self._clock.mark()
            try:
                task()
            finally:
                self._communicated.append(_Marked(work, start, self._clock.mark()))

        return _Waited(run(timed), work, self.lane)

    # Computation -----------------------------------------------------------------------------------------------

    def _engine(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.lane.during(_ENGINE):
            return method(*args, **kwargs)

    def _before_forward(self, method: Callable[[Unit], bool], unit: Unit) -> bool:
        if unit.is_root and not in_backward():
            # What an exception ended has not said so.
            self.lane.leave_all((Kind.FORWARD, Kind.RECOMPUTATION, Kind.BACKWARD, Kind.ENGINE))
        with self.lane.during(_engine_of(unit), then=_computing(_forward_kind(), unit)):
            return method(unit)

    def _after_forward(self, method: Callable[[Unit], bool], unit: Unit) -> bool:
        self.lane.leave(_computing(_forward_kind(), unit), then=_engine_of(unit))
        try:
            return method(unit)
        finally:
            self.lane.leave(_engine_of(unit))

    def _before_backward(self, method: Callable[[Unit], None], unit: Unit) -> None:
        backward = _computing(Kind.BACKWARD, unit)
        inside = [a for a in self.lane.stack if a.kind is Kind.BACKWARD and _is_inside(a.unit, unit)]
        then: Activity | None = backward
        if backward in self.lane.stack:  # this is the gradient of another output
            then = None
        elif inside:  # a unit inside has the same output, and heard of it first
            then = None
            self.lane.enter(backward, below=inside[0])
        with self.lane.during(_engine_of(unit), then=then):
            method(unit)

    def _after_backward(self, method: Callable[[Unit], None], unit: Unit) -> None:
        self.lane.leave(_computing(Kind.BACKWARD, unit), then=_engine_of(unit))
        try:
            method(unit)
        finally:
            self.lane.leave(_engine_of(unit))

    def _finish_backward(self, method: Callable[[], None]) -> None:
        engine = _ENGINE._replace(backward=True)
        self.lane.leave_all((Kind.BACKWARD, Kind.RECOMPUTATION), then=engine)
        try:
            method()
        finally:
            self.lane.leave(engine)


def _computing(kind: Kind, unit: Unit) -> Activity:
    return Activity(Row.COMPUTE, kind, unit.label, kind is not Kind.FORWARD)


def _is_inside(label: str, unit: Unit) -> bool:
    return label != unit.label and (unit.is_root or label.startswith(f"{unit.name}."))


def _forward_kind() -> Kind:
    return Kind.RECOMPUTATION if in_backward() else Kind.FORWARD


def _engine_of(unit: Unit) -> Activity:
    return _ENGINE._replace(unit=unit.label, backward=in_backward())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
