"""What a GPU does in a step: memory, kernels, and how long it is idle between them. Called through
``benchmarks.worker``.
"""

from collections.abc import Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import training


def measure(tokens: int, warm_up: int = 3) -> dict[str, float]:
    """Bytes at rest and at the peak of a step; kernels of a step and the part of it in which none runs."""
    for _ in range(warm_up):
        training.train_step(tokens)
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.train_step(tokens)
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        # Without the synchronization between parts of a step, which would itself leave gaps.
        mine = training.running()
        data = training.batch(mine.job.shape.vocabulary, tokens, mine.steps, mine.rank).to("cuda")
        loss = training.loss_of(mine.trainable.model, data)
        mine.trainable.backward(loss)
        mine.trainable.step()
        torch.cuda.synchronize()
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
    """The part of the time from the first begin to the last end that no interval covers."""
    if not intervals:
        return 0.0
    covered, end = 0.0, min(begin for begin, _ in intervals)
    first = end
    for begin, until in sorted(intervals):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return 1 - covered / (end - first) if end > first else 0.0
