"""Measures the bytes of a rank: after building, between steps, and the peak of each part of a step.

Called through ``benchmarks.worker``.
"""

import gc
from typing import Any

import torch

from benchmarks import training
from benchmarks.job import Job
from benchmarks.model import Transformer, batch, build_model, loss_of
from benchmarks.peers import PEERS
from benchmarks.probes.heap import Heap

WARM_UP = 2


def start(job: dict[str, Any], rank: int, store: str) -> None:
    """Create the process group. The peer is built later, because building it is part of the measurement."""
    described = Job.from_json(job)
    training.join(described, rank, store)


def measure(job: dict[str, Any], rank: int, tokens: int) -> dict[str, float]:
    """Build the peer, train, and count bytes."""
    described = Job.from_json(job)
    activations = _activations(described, tokens)
    heap = Heap()
    trainable = PEERS[described.peer].build(described)
    gc.collect()
    found: dict[str, float] = {"built": heap.tensors, "activations": activations}
    mine = training.Running(described, rank, trainable)
    training._running = mine
    for _ in range(WARM_UP):
        training.train_step(tokens)
    gc.collect()
    found["resting"] = heap.tensors
    data = batch(described.shape.vocabulary, tokens, mine.steps, rank)
    heap.reset()
    loss = loss_of(trainable.model, data)
    found["peak_forward"] = heap.peak
    heap.reset()
    trainable.backward(loss)
    found["peak_backward"] = heap.peak
    del loss
    heap.reset()
    trainable.step()
    found["peak_optimizer"] = heap.peak
    found["peak"] = max(found[f"peak_{part}"] for part in training.PARTS)
    return {**found, **_bound(described, trainable.model, found), **floor(described, found["resting"])}


def floor(job: Job, resting: float) -> dict[str, float]:
    """The minimum per rank: main weights and two moments in fp32, divided by the ranks."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(job.shape).parameters())
    least = 12 * parameters / job.ranks
    return {"floor": least, "resting_over_floor": resting / least}


def _activations(job: Job, tokens: int) -> int:
    """Peak bytes of forward and backward of the plain model, without its weights and finished gradients."""
    model = build_model(job.shape, job.low_precision)
    if job.low_precision:
        model.bfloat16()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    data = batch(job.shape.vocabulary, tokens, 0, 0)
    loss_of(model, data).backward()  # kernels allocate scratch memory in their first call and keep it
    heap = Heap()
    loss_of(model, data).backward()
    return heap.peak


def _bound(job: Job, model: Any, found: dict[str, float]) -> dict[str, float]:
    """The bound on the peak from docs/memory.md, for our ZeRO-3."""
    if job.peer != "ours-3":
        return {}
    compute, gradient = (2, 4) if job.low_precision else (4, 4)
    numel = {name: 0 for name in model.engine.unit_names}
    shards = 0
    for group in model.engine.groups:
        unit = max((name for name in numel if group.params[0].name.startswith(name)), key=len)
        numel[unit] += group.layout.numel
        shards += group.layout.shard_numel
    root = numel.pop("")
    largest = max(numel.values())
    bound = found["resting"] + gradient * shards + (compute + gradient) * root
    return {"bound": bound + (2 * compute + gradient) * largest + found["activations"]}
