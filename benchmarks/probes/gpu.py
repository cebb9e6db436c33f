"""Measures memory, kernels and idle time of a GPU during a step. Called through ``benchmarks.worker``."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import training


def measure(tokens: int, warm_up: int = 3) -> dict[str, float]:
    """Bytes between steps and at the peak of a step, the number of kernels, and the fraction of time without any.

    In a dry run on the CPU, all are 0.
    """
    mine = training.running()
    cuda: Any = torch.cuda
    if mine.job.device != "cuda":
        cuda = mock.Mock(memory_allocated=lambda: 0, max_memory_allocated=lambda: 0)
    for _ in range(warm_up):
        training.train_step(tokens)
    cuda.synchronize()
    resting = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    training.train_step(tokens)
    peak = cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        # Not training.train_step, whose synchronization between the parts of a step would cause gaps.
        data = training.batch(mine.job.shape.vocabulary, tokens, mine.steps, mine.rank).to(mine.job.device)
        loss = training.loss_of(mine.trainable.model, data)
        mine.trainable.backward(loss)
        mine.trainable.step()
        cuda.synchronize()
    kernels = [
        (float(event.time_range.start), float(event.time_range.end))
        for event in recorded.events() or []
        if event.device_type == DeviceType.CUDA
    ]
    return {
        "resting": float(resting),
        "peak": float(peak),
        "kernels": float(len(kernels)),
        "idle": idle_share(kernels),
    }


def idle_share(intervals: Sequence[tuple[float, float]]) -> float:
    """The fraction of the time from the first start to the last end that no interval covers."""
    if not intervals:
        return 0.0
    covered, end = 0.0, min(begin for begin, _ in intervals)
    first = end
    for begin, until in sorted(intervals):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return 1 - covered / (end - first) if end > first else 0.0
