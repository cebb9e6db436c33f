"""Times several strategies that take turns in one set of rank processes. Called through ``benchmarks.worker``."""

import time
from typing import Any

import torch.distributed as dist

from benchmarks import training
from benchmarks.job import Job
from benchmarks.peers import PEERS

# The first step records the order of units, and the next ones allocate what is kept.
WARM_UP = 3

_built: dict[str, training.Running] = {}


def start(job: dict[str, Any], rank: int, store: str) -> None:
    """Create the process group."""
    training.join(Job.from_json(job), rank, store)


def build(job: dict[str, Any], rank: int, tokens: int) -> float:
    """Build a peer and warm it up. Returns the seconds of its last step."""
    described = Job.from_json(job)
    _built[described.peer] = training._running = training.Running(
        described, rank, PEERS[described.peer].build(described)
    )
    return [training.train_step(tokens)["step"] for _ in range(WARM_UP)][-1]


def turn(peer: str, tokens: int, steps: int) -> dict[str, Any]:
    """Train a peer for some steps: see ``benchmarks.training.turn``; and the CPU seconds of this process per step."""
    training._running = _built[peer]
    before = time.process_time()
    times = training.turn(tokens, steps, warm_up=0)
    return {**times, "cpu": (time.process_time() - before) / steps}


def calibrate(path: str) -> None:
    """Measure this machine for the planner, on all ranks; the first one writes the file."""
    from megatron.fsdp.tools.predict import calibrate as measure

    found = measure()
    if dist.get_rank() == 0:
        found.save(path)
