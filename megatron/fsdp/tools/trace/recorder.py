"""Records one rank's activity, by replacing methods of individual objects during the recording.

The engine contains no code for this, so it costs nothing without a recording. The recorder replaces the schedule's
hooks (which unit computes), the methods that issue communication (for which unit), and the stream's ``run`` (when the
communication takes place, and how long the computation waits for it).
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.fsdp.comm.streams import Handle, Stream, Task
from megatron.fsdp.helpers.autograd import in_backward
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.tools.trace.clock import HostClock
from megatron.fsdp.tools.trace.spans import Kind, RankTrace, Row, Span


class Activity(NamedTuple):
    """The current computation or communication; its fields are those of a :class:`Span`."""

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
    """Temporary replacements of methods on individual objects."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Make ``owner.name(*arguments)`` call ``around(method, *arguments)``."""
        method = getattr(owner, name)

        @functools.wraps(method)  # learning rate schedulers set an attribute of the optimizer's step
        def instead(_: Any, *args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name)))
        # Not a plain function, because the schedule creates weak references to its methods.
        vars(owner)[name] = MethodType(instead, owner)

    def undo(self) -> None:
        """Restore all methods."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before


class ComputeTrack:
    """The activities of the computation, as a stack: the last one is current, and has interrupted the others."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._stack = [_OUTSIDE]
        self._open = True
        self.start = self._since = clock.mark()
        self.end: Any = None
        self.passed: list[_Marked] = []

    def change(self, stack: list[Activity]) -> None:
        """Make the last activity of ``stack`` the current one."""
        if self._open and stack[-1] != self._stack[-1]:
            now = self._clock.mark()
            self.passed.append(_Marked(self._stack[-1], self._since, now))
            self._since = now
        self._stack = stack

    def enter(self, activity: Activity, below: Activity | None = None) -> None:
        """Begin an activity on top of the stack, or beneath ``below``, which has begun already."""
        position = len(self._stack) if below is None else self._stack.index(below)
        self.change([*self._stack[:position], activity, *self._stack[position:]])

    def leave(self, activity: Activity, then: Activity | None = None) -> None:
        """End an activity, wherever it is in the stack, and begin ``then`` at the same time."""
        rest = list(self._stack)
        if activity in rest[1:]:
            del rest[len(rest) - 1 - rest[::-1].index(activity)]
        self.change(rest if then is None else [*rest, then])

    def leave_all(self, kinds: tuple[Kind, ...]) -> None:
        """End all activities of some kinds."""
        self.change([activity for activity in self._stack if activity is _OUTSIDE or activity.kind not in kinds])

    @property
    def stack(self) -> tuple[Activity, ...]:
        """The current activity, last, and those that it has interrupted."""
        return tuple(self._stack)

    @contextmanager
    def instead_of(self, before: Activity, activity: Activity) -> Iterator[None]:
        """End an activity, and record another one within the context."""
        self.leave(before, then=activity)
        try:
            yield
        finally:
            self.leave(activity)

    @contextmanager
    def during(self, activity: Activity, then: Activity | None = None) -> Iterator[None]:
        """Record an activity within the context, followed by ``then`` unless an exception ends the context."""
        self.enter(activity)
        try:
            yield
        except BaseException:
            self.leave(activity)
            raise
        self.leave(activity, then)

    def close(self) -> None:
        """Stop recording."""
        if self._open:
            self._open = False
            self.end = self._clock.mark()
            self.passed.append(_Marked(self._stack[-1], self._since, self.end))


class _TracedHandle(Handle):
    """A handle that records the time that the computation first waits for it."""

    def __init__(self, handle: Handle, work: Activity, track: ComputeTrack) -> None:
        self._handle = handle
        self._work = work
        self._track = track
        self._is_recorded = False

    @property
    def done(self) -> bool:
        return self._handle.done

    @property
    def ended(self) -> bool:
        return self._handle.ended

    def wait(self) -> None:
        if getattr(_TASK, "runs", False):  # a stream waits for another one, and not the computation
            return self._handle.wait()
        wait = self._work._replace(row=Row.WAITS, backward=in_backward(), size=0)
        with nullcontext() if self._is_recorded else self._track.during(wait):
            self._handle.wait()
        self._is_recorded = True


# Whether this thread runs a stream's task.
_TASK = threading.local()
# Methods of the engine that are called between passes.
_METHODS = ("finish_gradients", "unshard_persistent", "invalidate_weights")
_OF_SCHEDULE = ("reduce_waiting", "prefetch_first")


class StepRecorder:
    """Records one model on this rank until :meth:`stop`. :meth:`start` begins to distinguish units.

    Args:
        engine: Engine of the model.
        clock: The clock of the model's device.
    """

    def __init__(self, engine: Engine, clock: HostClock) -> None:
        self._observed = engine
        self._clock = clock
        self._replacements = Replacements()
        self._optimizer_hooks: list[Any] = []
        self._streams: list[Stream] = []
        self._work = _OTHER_WORK
        self._works = itertools.count(1)
        self._communicated: list[_Marked] = []
        self.track = ComputeTrack(clock)

    def start(self) -> None:
        """Replace methods."""
        for around in (
            self._before_forward,
            self._after_forward,
            self._before_backward,
            self._after_backward,
            self._finish_backward,
        ):
            self._replacements.replace(self._observed.schedule, around.__name__[1:], around)
        for name in _METHODS:
            self._replacements.replace(self._observed, name, self._engine)
        for name in _OF_SCHEDULE:
            self._replacements.replace(self._observed.schedule, name, self._engine)
        for unit in self._observed.units:
            self._watch_unit(unit)
        self._streams = self._observed.context.streams
        for stream in self._streams:
            self._replacements.replace(stream, "run", self._run)
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(lambda *_: self.track.enter(_OPTIMIZER)),
            register_optimizer_step_post_hook(lambda *_: self.track.leave(_OPTIMIZER)),
        ]

    def _watch_unit(self, unit: Unit) -> None:
        for group in unit.groups:
            gather = Activity(Row.GATHERS, Kind.GATHER, unit.label, size=group.unshard_bytes())
            reduce = Activity(Row.REDUCTIONS, Kind.REDUCTION, unit.label, size=group.reduce_bytes)
            for owner, name, work in (
                (group.weights, "unshard", gather),
                (group.gradients, "reduce", reduce),
                (group.gradients, "reduce_waiting", reduce),
            ):
                self._replacements.replace(owner, name, functools.partial(self._issue, work))
            # Communication in flight was issued before the methods were replaced, so wrap its handles here.
            weights, gradients = group.weights, group.gradients
            weights.unsharding = {self._numbered(handle, gather): each for handle, each in weights.unsharding.items()}
            for started in (gradients.handles, gradients.outer_handles):
                started[:] = [self._numbered(handle, reduce) for handle in started]

    def _numbered(self, handle: Handle, work: Activity) -> Handle:
        return _TracedHandle(handle, work._replace(work=next(self._works)), self.track)

    def stop(self) -> None:
        """Stop recording and restore all methods."""
        self.track.close()
        self._replacements.undo()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._optimizer_hooks.clear()

    def trace(self, rank: int) -> RankTrace:
        """The recording. Waits for communication in flight."""
        for stream in self._streams:
            stream.run(lambda: None).wait()
        self._clock.synchronize()
        dense = self._observed.index.dense
        time = self._clock.time
        marked = [*self.track.passed, *self._communicated]
        spans = [Span(*a[:4], time(start), time(end), a.size, a.work) for a, start, end in marked]
        return RankTrace(
            rank=rank,
            device=_device_name(self._observed.device),
            units=tuple(unit.label for unit in self._observed.units),
            start=time(self.track.start),
            end=time(self.track.end),
            spans=tuple(sorted(spans, key=lambda span: span.start)),
            clock_error=self._clock.error,
            all_meet=all(group.axes is dense and dense.outer is None for group in self._observed.groups),
        )

    # Communication ---------------------------------------------------------------------------------------------

    def _issue(self, work: Activity, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Label everything that ``method`` issues to a stream as ``work``."""
        before, self._work = self._work, work
        try:
            return method(*args, **kwargs)
        finally:
            self._work = before

    def _run(self, run: Callable[[Task], Handle], task: Task) -> Handle:
        """Replaces :meth:`megatron.fsdp.comm.streams.Stream.run`."""
        work = self._work._replace(backward=in_backward(), work=next(self._works))

        def timed() -> None:
            start, _TASK.runs = self._clock.mark(), True
            try:
                task()
            finally:
                _TASK.runs = False
                self._communicated.append(_Marked(work, start, self._clock.mark()))

        return _TracedHandle(run(timed), work, self.track)

    # Computation -----------------------------------------------------------------------------------------------

    def _engine(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.track.during(_ENGINE):
            return method(*args, **kwargs)

    def _before_forward(self, method: Callable[[Unit], bool], unit: Unit) -> bool:
        if unit.is_root and not in_backward():
            # Activities that an exception ended have not been left.
            self.track.leave_all((Kind.FORWARD, Kind.RECOMPUTATION, Kind.BACKWARD, Kind.ENGINE))
        with self.track.during(_engine_of(unit), then=_computing(_forward_kind(), unit)):
            return method(unit)

    def _after_forward(self, method: Callable[[Unit], bool], unit: Unit) -> bool:
        with self.track.instead_of(_computing(_forward_kind(), unit), _engine_of(unit)):
            return method(unit)

    def _before_backward(self, method: Callable[[Unit], None], unit: Unit) -> None:
        backward = _computing(Kind.BACKWARD, unit)
        inside = [a for a in self.track.stack if a.kind is Kind.BACKWARD and _is_inside(a.unit, unit)]
        then: Activity | None = backward
        if backward in self.track.stack:  # the unit has several outputs, and this is not the first gradient
            then = None
        elif inside:  # a unit inside returns the same output, and its hook ran first
            then = None
            self.track.enter(backward, below=inside[0])
        with self.track.during(_engine_of(unit), then=then):
            method(unit)

    def _after_backward(self, method: Callable[[Unit], None], unit: Unit) -> None:
        with self.track.instead_of(_computing(Kind.BACKWARD, unit), _engine_of(unit)):
            method(unit)

    def _finish_backward(self, method: Callable[[], None]) -> None:
        self.track.leave_all((Kind.BACKWARD, Kind.RECOMPUTATION))
        with self.track.during(_ENGINE._replace(backward=True)):
            method()


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
