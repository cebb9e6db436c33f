"""GPU streams, emulated on a CPU with gloo's asynchronous collectives.

torch's CPU streams and events do nothing, so a collective that FSDP2 or NVIDIA's engine issues on a side stream blocks
the computation, unlike on a GPU. Here, a side stream keeps a list of the collectives that were started on it. The host
waits for them only when the code makes another stream or the host wait. So these peers overlap as much as their
schedule allows, and blocking calls of gloo do not distort the comparison.

This module also replaces ``torch.cuda`` in the copy of NVIDIA's engine for the CPU. Nothing is asynchronous there
unless :data:`asynchronous` is set.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Action = Callable[[], object]

asynchronous = False


class Stream:
    """The actions that were started on a side stream and not waited for, in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.started: list[Action] = []
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """Wait for all actions."""
        started, self.started = self.started, []
        for action in started:
            action()

    def wait_stream(self, other: "Stream") -> None:
        """Make later work on this stream wait for the other stream. The host waits instead."""
        if other is not self:
            other.synchronize()

    def wait_event(self, event: "Event | None") -> None:
        """Make later work on this stream wait for the event. The host waits instead."""
        if event is not None:
            event.synchronize()

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all actions are finished."""
        return not self.started


class Event:
    """A point in a stream's work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream: Stream | None = None
        self._before: list[Action] = []

    def record(self, stream: Stream | None = None) -> None:
        """Capture all actions that were started on ``stream`` so far."""
        self._stream = stream or current_stream()
        self._before = list(self._stream.started)

    def synchronize(self) -> None:
        """Wait for all actions before this point."""
        before, self._before = self._before, []
        if self._stream is None:
            return
        for action in before:
            if action in self._stream.started:
                self._stream.started.remove(action)
                action()

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on ``stream`` wait for this point. The host waits instead."""
        self.synchronize()

    def query(self) -> bool:
        """Whether all actions before this point are finished."""
        return not self._before

    def elapsed_time(self, other: "Event") -> float:
        """Not measured."""
        return 0.0


_DEFAULT = Stream()
_current = [_DEFAULT]


def current_stream(*_: Any) -> Stream:
    """The stream of the innermost context."""
    return _current[-1]


def default_stream(*_: Any) -> Stream:
    """The compute stream."""
    return _DEFAULT


@contextlib.contextmanager
def stream(entered: Stream | None) -> Iterator[None]:
    """Make a stream current in the context."""
    _current.append(entered or _current[-1])
    try:
        yield
    finally:
        _current.pop()


def install(namespace: Any) -> None:
    """Replace the streams of a module such as ``torch.cpu``."""
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        setattr(namespace, name, globals()[name])


def make_collectives_asynchronous(namespace: Any) -> None:
    """Make collectives of a module return immediately on side streams. They still block on the default stream."""
    global asynchronous
    asynchronous = True
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(namespace, name, _asynchronous(getattr(namespace, name)))


def _asynchronous(collective: Callable[..., Any]) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        on = current_stream()
        if on is _DEFAULT or kwargs.get("async_op"):
            return collective(*args, **kwargs)
        work = collective(*args, **{**kwargs, "async_op": True})
        # Drop finished work, which would otherwise keep its tensors alive until the stream is waited for.
        on.started = [action for action in on.started if not _is_done(action)]
        on.started.append(work.wait)
        return None

    return start


def _is_done(action: Action) -> bool:
    work = getattr(action, "__self__", None)
    return isinstance(work, dist.Work) and work.is_completed()


# Functions that the patched copy of NVIDIA's engine calls -------------------------------------------------------------


@contextlib.contextmanager
def coalescing(group: dist.ProcessGroup) -> Iterator[None]:
    """Coalesce the collectives in the context; asynchronous on a side stream if :data:`asynchronous` is set."""
    on = current_stream()
    aside = asynchronous and on is not _DEFAULT
    with dist._coalescing_manager(group, async_ops=aside) as collectives:
        yield
    if aside and collectives.works:
        on.started.append(collectives.wait)


def after_collectives(pairs: list[tuple[torch.Tensor, torch.Tensor]], copy: bool) -> list[Any]:
    """Accumulate reduced gradients after the collectives. Returns the pairs that the caller has to accumulate now."""
    on = current_stream()
    if not asynchronous or on is _DEFAULT:
        return pairs
    for target, source in pairs:
        on.started.append(lambda t=target, s=source: t.copy_(s) if copy else t.add_(s))  # type: ignore[misc]
    return []


def current_device() -> torch.device:
    """The CPU."""
    return torch.device("cpu")


def synchronize(*_: Any) -> None:
    """Do nothing, because the CPU computes synchronously."""


empty_cache = synchronize


def is_available() -> bool:
    """False: there is no CUDA device."""
    return False
