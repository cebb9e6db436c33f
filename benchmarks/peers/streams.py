"""Streams as a GPU has them, emulated on a CPU over gloo's asynchronous collectives.

torch's streams and events for the CPU do nothing: a collective that FSDP2 or the original puts on a side stream
blocks the computation, which on a GPU it would not. Here a side stream keeps a list of what was started on it. The
host goes through that list only where the code makes another stream, or the host, wait. So these peers overlap as
much as their schedule allows, and what remains of a difference is not that gloo was called in a blocking way.

This module also stands for ``torch.cuda`` in the copy of the original that runs on a CPU. There, too, nothing is
asynchronous unless :data:`asynchronous` is set.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Action = Callable[[], object]

asynchronous = False


class Stream:
    """What was started on a side stream and not waited for, in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.started: list[Action] = []
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        """Wait for all of it."""
        started, self.started = self.started, []
        for action in started:
            action()

    def wait_stream(self, other: "Stream") -> None:
        """What follows on this stream comes after what is on the other: the host waits."""
        if other is not self:
            other.synchronize()

    def wait_event(self, event: "Event | None") -> None:
        """What follows on this stream comes after the event: the host waits."""
        if event is not None:
            event.synchronize()

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether nothing is under way."""
        return not self.started


class Event:
    """A point of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream: Stream | None = None
        self._before: list[Action] = []

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all that was started on ``stream`` until now."""
        self._stream = stream or current_stream()
        self._before = list(self._stream.started)

    def synchronize(self) -> None:
        """Wait for what was before this point."""
        before, self._before = self._before, []
        if self._stream is None:
            return
        for action in before:
            if action in self._stream.started:
                self._stream.started.remove(action)
                action()

    def wait(self, stream: Stream | None = None) -> None:
        """What follows on ``stream`` comes after this point: the host waits."""
        self.synchronize()

    def query(self) -> bool:
        """Whether nothing before this point is under way."""
        return not self._before

    def elapsed_time(self, other: "Event") -> float:
        """Not measured."""
        return 0.0


_DEFAULT = Stream()
_current = [_DEFAULT]


def current_stream(*_: Any) -> Stream:
    """The innermost stream that is entered."""
    return _current[-1]


def default_stream(*_: Any) -> Stream:
    """The stream that computes."""
    return _DEFAULT


@contextlib.contextmanager
def stream(entered: Stream | None) -> Iterator[None]:
    """Start what is in the block on this stream."""
    _current.append(entered or _current[-1])
    try:
        yield
    finally:
        _current.pop()


def install(namespace: Any) -> None:
    """Give a module such as ``torch.cpu`` these streams."""
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        setattr(namespace, name, globals()[name])


def make_collectives_asynchronous(namespace: Any) -> None:
    """On a side stream, collectives of this module return at once; on the default stream they stay as they are."""
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
        # A work that is done would keep its tensors alive until somebody waits for it.
        on.started = [action for action in on.started if not _is_done(action)]
        on.started.append(work.wait)
        return None

    return start


def _is_done(action: Action) -> bool:
    work = getattr(action, "__self__", None)
    return isinstance(work, dist.Work) and work.is_completed()


# What the copy of the original calls ------------------------------------------------------------------------------


@contextlib.contextmanager
def coalescing(group: dist.ProcessGroup) -> Iterator[None]:
    """Coalesce the collectives in the block; asynchronous on a side stream if that was asked for."""
    on = current_stream()
    aside = asynchronous and on is not _DEFAULT
    with dist._coalescing_manager(group, async_ops=aside) as collectives:
        yield
    if aside and collectives.works:
        on.started.append(collectives.wait)


def after_collectives(pairs: list[tuple[torch.Tensor, torch.Tensor]], copy: bool) -> list[Any]:
    """Accumulate reduced gradients once the collectives are done; returns what the caller should do now instead."""
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
    """Nothing computes beside the host."""


empty_cache = synchronize


def is_available() -> bool:
    """No figures of a CUDA device are to be had."""
    return False
