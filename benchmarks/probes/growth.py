"""Measures memory and step time of a rank over many steps. Called through ``benchmarks.worker``."""

import gc
import sys

import psutil

from benchmarks import training
from benchmarks.probes.heap import Heap


def run(tokens: int, steps: int) -> dict[str, float]:
    """Train some steps. Returns the median step time in seconds, and memory after the steps."""
    times = sorted(training.train_step(tokens)["step"] for _ in range(steps))
    gc.collect()
    heap = Heap()
    return {
        "step": times[len(times) // 2],
        "heap": float(heap.whole),
        "objects": float(sys.getallocatedblocks()),
        "resident": float(psutil.Process().memory_info().rss),
    }
