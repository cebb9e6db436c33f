"""How the ranks of a save or a load agree with each other."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


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


def on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Whether each of some flags is set on any rank. A collective."""
    if rank_and_world_size()[1] == 1:
        return list(flags)
    # A group with several backends, such as the default one, takes tensors in host memory.
    on_host = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """Do something on every rank, although it may raise errors on some. A collective.

    Returns:
        This rank's result, None if it raised an error; and the error of the first rank that raised one, "" if none did.
    """
    result, text = _tried(work)
    return result, next(filter(None, gather_from_ranks(text)), "")


def agreed(work: Callable[[], T], what: str = "") -> T:
    """Do something on every rank, and return this rank's result. A collective.

    Raises:
        RuntimeError: Some rank raised an error. Every rank raises this one, which begins with ``what``.
    """
    result, problem = attempt(work)
    if problem:
        raise RuntimeError(f"{what}{problem}")
    return cast("T", result)


def from_rank_0(look: Callable[[], T]) -> T:
    """Return what rank 0 finds, as in a file system that may show machines different files. A collective.

    Raises:
        OSError: Rank 0 cannot look.
    """
    found = [(None, "") if rank_and_world_size()[0] else _tried(look)]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    value, problem = found[0]
    if problem:
        raise OSError(problem)
    return cast("T", value)


def _tried(work: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return work(), ""
    except Exception as error:  # noqa: BLE001 - other ranks wait for this one
        return None, str(error) or repr(error)
