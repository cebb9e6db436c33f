"""How the processes of a save, a load or a conversion agree with each other and wait for each other."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

# Seconds to wait for another process that makes no progress.
PATIENCE = 600.0


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_from_ranks(value: T) -> list[T]:
    """Return every rank's value, in the order of the ranks. A collective."""
    _, count = rank_and_world_size()
    values = [value] * count
    if count > 1:
        dist.all_gather_object(values, value)
    return values


def wait_until(done: Callable[[], bool], progress: Callable[[], object], describe: Callable[[], str]) -> None:
    """Poll until a condition holds.

    Args:
        done: The condition.
        progress: Returns something that changes while the other processes work.
        describe: Says which processes are waited for, for the error message.

    Raises:
        RuntimeError: ``progress`` returned the same value for ``PATIENCE`` seconds.
    """
    seen, since = progress(), time.monotonic()
    while not done():
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            raise RuntimeError(f"{describe()} made no progress for {PATIENCE:.0f} s.")
        time.sleep(0.05)
