"""Builds a peer in a rank process and times training steps. Called through ``benchmarks.worker``."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.job import Job
from benchmarks.model import batch, loss_of
from benchmarks.peers import PEERS, Trainable

PARTS = ("forward", "backward", "optimizer")


@dataclass
class Running:
    """The peer in this process, and its progress."""

    job: Job
    rank: int
    trainable: Trainable
    steps: int = 0


_running: Running | None = None


def running() -> Running:
    """The peer that :func:`start` has built in this process."""
    if _running is None:
        raise RuntimeError("nothing was started in this process")
    return _running


def start(job: dict[str, Any], rank: int, store: str) -> None:
    """Create the process group and build the peer."""
    global _running
    described = Job.from_json(job)
    join(described, rank, store)
    _running = Running(described, rank, PEERS[described.peer].build(described))


def join(job: Job, rank: int, store: str) -> None:
    """Create the process group of all ranks."""
    torch.set_num_threads(job.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(rank))
    if job.device == "cuda":
        torch.cuda.set_device(0)
    if job.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.ranks)
        return
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=job.ranks)


def losses(tokens: int, steps: int) -> list[float]:
    """Train ``steps`` steps. Returns the loss of each, averaged over all ranks."""
    of_rank = torch.tensor([train_step(tokens)["loss"] for _ in range(steps)], dtype=torch.float64)
    if not running().job.fake:
        dist.all_reduce(of_rank)
        of_rank /= running().job.ranks
    return of_rank.tolist()


def turn(tokens: int, steps: int, warm_up: int = 1) -> dict[str, Any]:
    """Train ``warm_up`` and then ``steps`` steps. Returns the seconds of each of the latter, by part and in total."""
    for _ in range(warm_up):
        train_step(tokens)
    if not running().job.fake:
        dist.barrier()
    timed = [train_step(tokens) for _ in range(steps)]
    return {part: [step[part] for step in timed] for part in (*PARTS, "step")}


def _clock(device: str) -> Callable[[], float]:
    """A clock that synchronizes with a GPU first."""
    if device != "cuda":
        return time.perf_counter

    def after_the_device() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return after_the_device


def train_step(tokens: int) -> dict[str, float]:
    """Train one step. Returns its loss and the wall time of its parts in seconds, including waits for other ranks."""
    mine = running()
    data = batch(mine.job.shape.vocabulary, tokens, mine.steps, mine.rank).to(mine.job.device)
    mine.steps += 1
    clock = _clock(mine.job.device)
    began = clock()
    loss = loss_of(mine.trainable.model, data)
    forwarded = clock()
    mine.trainable.backward(loss)
    backwarded = clock()
    mine.trainable.step()
    ended = clock()
    times = (forwarded - began, backwarded - forwarded, ended - backwarded)
    return {**dict(zip(PARTS, times, strict=True)), "step": ended - began, "loss": float(loss.detach())}
