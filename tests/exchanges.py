"""The two ways to exchange flat buffers: gloo's sends and receives, and the collectives that NCCL runs."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from megatron.fsdp.comm import collectives
from megatron.fsdp.comm.streams import CpuStream, Handle, Task

SENDS, COLLECTIVES = "sends", "collectives"


def both_exchanges(name: str, strategies: Iterable[Any]) -> Callable[..., Any]:
    """Decorate a test that takes a strategy: it runs with both exchanges where anything is sharded, else with one.

    Args:
        name: The test's argument that takes the strategy, or several names as pytest writes them.
        strategies: Values of the argument. ``no_shard`` only reduces full buffers, with one collective in any case.
    """
    pairs = [(s, e) for s in strategies for e in (SENDS, COLLECTIVES) if e == SENDS or not _shards_nothing(s)]
    flat = [((*s, e) if isinstance(s, tuple) else (s, e)) for s, e in pairs]
    parametrize = pytest.mark.parametrize(f"{name}, exchange", flat, indirect=["exchange"])
    return lambda test: parametrize(pytest.mark.usefixtures("exchange")(test))


@contextmanager
def wrapped(**wrappers: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace operations of all models' collectives by what the wrappers make of them: ``wrapped(all_gather=...)``."""
    with ExitStack() as stack:
        for each in (collectives.BACKEND, collectives.SENDS):
            for name, wrapper in wrappers.items():
                stack.enter_context(patch.object(each, name, wrapper(getattr(each, name))))
        yield


@contextmanager
def seen(name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Context that lists the arguments of every call of an operation of collectives."""
    calls: list[tuple[Any, ...]] = []

    def recording(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            calls.append(args)
            operation(*args)

        return call

    with wrapped(**{name: recording}):
        yield calls


@contextmanager
def delayed(pause: Callable[[], float]) -> Iterator[None]:
    """Context in which tasks of streams on the CPU begin and end late, by the seconds that ``pause`` returns."""
    run = CpuStream.run

    def run_late(self: CpuStream, task: Task) -> Handle:
        seconds = pause()

        def late() -> None:
            time.sleep(seconds)
            task()
            time.sleep(seconds / 2)

        return run(self, late)

    with patch.object(CpuStream, "run", run_late):
        yield


def _shards_nothing(strategy: Any) -> bool:
    return set(strategy if isinstance(strategy, tuple) else (strategy,)) == {"no_shard"}
