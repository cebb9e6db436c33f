"""Measures how fast operators and messages are where this process runs."""

import dataclasses
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from megatron.fsdp.comm import gloo
from megatron.fsdp.tools.predict.ghosts import Cost, Ghosts
from megatron.fsdp.tools.predict.machine import Calibration, Device, Link

aten = torch.ops.aten
# Elements of the operands of operators that are not matmuls, from launch-bound to larger than caches.
_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
# Rows, columns and inner dimension of matmuls. There are more tokens than channels.
_MATMULS = ((16, 16, 16), (64, 64, 64), (512, 128, 64), (1024, 512, 128), (2048, 1024, 256), (2048, 2048, 512))
# Operators on more bytes than this find their operands in a slower cache of a CPU than the fastest, as within a model:
# so much else is read before.
_CACHED, _READ = 1 << 19, 1 << 22
_TURNS = 3
# Rows and width of the layers of a step.
_LAYERS = 768, 192
_MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)


def calibrate(*, seconds: float = 20.0, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Calibration:
    """Measure operators, and messages if ``torch.distributed`` is initialized, where this process runs.

    No model is run: matrices, copies and messages of several sizes are timed. With process groups, all ranks must call
    it. Each result is the median of several rounds, in the fastest of several turns: a processor that others share is
    slower for seconds.

    Args:
        seconds: Time to spend, about.
        dtypes: Names of the dtypes to measure.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    cases = [case for name in dtypes for case in _cases(getattr(torch, name), device)]
    times: dict[str, dict[float, list[float]]] = {}
    costs = [(call, cost) for call in cases if (cost := _cost(call)) is not None]
    turns = [
        [_time(call, device, 0.6 * seconds / _TURNS / len(costs), cost.bytes > _CACHED) for call, cost in costs]
        for _ in range(_TURNS)
    ]
    for (_, cost), *each in zip(costs, *turns, strict=True):
        work, taken = float(cost.bytes if cost.kind == "memory" else cost.flops), min(each)
        # The table of a kind has its fastest operators: copies, matmuls, and attention's forward, whose name differs.
        fastest = cost.name in ("copy_", "mm") or (cost.kind == "attention" and "backward" not in cost.name)
        for name in (cost.name, cost.kind) if fastest else (cost.name,):
            times.setdefault(f"{name} {cost.dtype}", {}).setdefault(work, []).append(taken)
    measured = {
        name: [[work, statistics.mean(taken)] for work, taken in sorted(table.items())] for name, table in times.items()
    }
    link, send, message = _network(device, 0.4 * seconds) if dist.is_initialized() else (None, 0.0, 0.0)
    on_host = device.type == "cpu"
    copies = measured[f"copy_ {dtypes[0]}"][-1]
    peak = {name: max(work / taken for work, taken in measured[f"mm {name}"]) for name in dtypes}
    found = Device(
        "cpu" if on_host else torch.cuda.get_device_name(device),
        None if on_host else torch.cuda.get_device_properties(device).total_memory,
        peak,
        copies[0] / copies[1],
        runs_ahead=not on_host,
        cores=float(len(os.sched_getaffinity(0))) if on_host else None,
        send_seconds=send,
        message_seconds=message,
        measured=measured,
    )
    return Calibration(_overhead(found, device), link)


def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], Any]]:
    """Calls of one operator each. Their operands exist, so that only the operator is timed."""

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for rows, columns, inner in _MATMULS:
        a, b, c = make(rows, inner), make(inner, columns), make(columns)
        # A linear layer's forward, and the gradients of its input and of its weight.
        for x, y in ((a, make(columns, inner).t()), (a, b), (make(inner, rows).t(), b)):
            yield lambda x=x, y=y: aten.mm(x, y)  # type: ignore[misc]
        yield lambda a=a, b=b, c=c: aten.addmm(c, a, b)  # type: ignore[misc]
        x, y = make(4, rows, inner), make(4, inner, columns)
        yield lambda x=x, y=y: aten.bmm(x, y)  # type: ignore[misc]
    for size in _SIZES:
        yield from _elementwise(make, size)
    on_cpu, on_gpu = ((1, 4), (64, 256, 1024, 2048), 32), ((2, 8), (128, 512, 4096), 64)
    heads, lengths, channels = on_cpu if device.type == "cpu" else on_gpu
    for length in lengths:
        q = make(*heads, length, channels)
        yield lambda q=q: functional.scaled_dot_product_attention(q, q, q, is_causal=True)  # type: ignore[misc]
        if device.type != "cpu":
            continue  # predictions name the CPU's backward
        out, *rest = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
        yield lambda q=q, o=out, r=rest[0]: (  # type: ignore[misc]
            aten._scaled_dot_product_flash_attention_for_cpu_backward(o, q, q, q, o, r, 0.0, True)
        )


def _elementwise(make: Callable[..., torch.Tensor], size: int) -> Iterator[Callable[[], Any]]:
    width = 256 if size >= 1 << 14 else 32
    a, b, w = make(size // width, width), make(size // width, width), make(width)
    unary = [aten.gelu, aten.relu, aten.silu, aten.tanh, aten.exp, aten.sqrt, aten.mul, aten.add, aten.pow, aten.rsqrt]
    for op in unary:
        given = (a, b) if op in (aten.mul, aten.add) else (a, 2) if op is aten.pow else (a,)
        yield lambda op=op, given=given: op(*given)  # type: ignore[misc]
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (aten.add_, (a, b)),
        (aten.mul_, (a, 1.0)),
        (aten.copy_, (a, b)),
        (aten.zero_, (torch.empty_like(a),)),
        (aten.lerp_, (a, b, 0.5)),
        (aten.addcmul_, (a, b, b)),
        (aten.addcdiv_, (a, b, torch.ones_like(b))),
        (aten.div, (a, b)),
        (aten.clone, (a,)),
        (aten.gelu_backward, (a, b)),
        (aten.silu_backward, (a, b)),
        (aten.threshold_backward, (a, b, 0)),
        (aten.sum, (a, [0])),
        (aten.mean, (a, [1])),
        (aten._softmax, (a, 1, False)),
        (aten._log_softmax, (a, 1, False)),
        (aten._softmax_backward_data, (a, b, 1, a.dtype)),
        (aten._log_softmax_backward_data, (a, b, 1, a.dtype)),
    )
    for op, given in calls:
        yield lambda op=op, given=given: op(*given)  # type: ignore[misc]
    yield lambda: aten._to_copy(a, dtype=torch.float32 if a.dtype != torch.float32 else torch.bfloat16)
    out, mean, rstd = aten.native_layer_norm(a, [width], w, w, 1e-5)
    yield lambda: aten.native_layer_norm(a, [width], w, w, 1e-5)
    yield lambda: aten.native_layer_norm_backward(b, a, [width], mean, rstd, w, w, [True, True, True])
    yield lambda: aten._foreach_copy_([a], [b])
    rows = torch.arange(size // width) % max(size // width // 2, 1)
    rows = rows.to(a.device)
    yield lambda: functional.embedding(rows, a)
    yield lambda: aten.embedding_dense_backward(b, rows, size // width, -1, False)


def _cost(call: Callable[[], Any]) -> Cost | None:
    """The cost of the one operator that is called, as a recording would have it. None if it is several."""
    costs: list[Cost] = []
    with Ghosts(costs.append, lambda *_: None, lambda *_: None):
        call()
    return costs[0] if len(costs) == 1 else None


def _time(call: Callable[[], Any], device: torch.device, seconds: float, alone: bool = False) -> float:
    """Median seconds of a call, on a CPU after something else was read if it is timed ``alone``."""
    other = torch.zeros(_READ // 4) if alone and device.type == "cpu" else None

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def per_call(number: int) -> float:
        if other is not None:
            other.add_(1.0)
        start = time.perf_counter()
        for _ in range(number):
            call()
        wait()
        return (time.perf_counter() - start) / number

    per_call(1)  # the first call may load a kernel
    number = 1 if other is not None else math.ceil(2e-4 / max(per_call(1), 1e-6))
    rounds: list[float] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 3 or (time.perf_counter() < end and len(rounds) < 200):
        rounds.append(per_call(number))
    return statistics.median(rounds)


def _overhead(found: Device, device: torch.device) -> Device:
    """A CPU with what autograd and modules add to an operator, and how much longer operators take within a step.

    There, memory is new and caches have other contents. A GPU with the seconds of its smallest operator.
    """
    if device.type != "cpu":
        start = torch.ones(1, device=device)
        return dataclasses.replace(found, launch=_time(lambda: aten.mul(start, 1.0), device, 0.1))
    taken, expected, number = _step(found, 8, 8, torch.float32)
    found = dataclasses.replace(found, launch=max(taken - expected, 0.0) / number)
    steps = [_step(found, *_LAYERS, getattr(torch, name)) for name in found.flops]
    return dataclasses.replace(found, slowdown=max(statistics.mean(t / alone for t, alone, _ in steps), 1.0))


def _step(found: Device, rows: int, width: int, dtype: torch.dtype) -> tuple[float, float, int]:
    """Seconds of forward and backward of some layers, those of their operators alone, and how many these are."""
    blocks = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
        for _ in range(4)
    )
    layers, x = nn.Sequential(*blocks).to(dtype), torch.ones(rows, width, dtype=dtype, requires_grad=True)
    costs: list[Cost] = []

    def step() -> None:
        layers(x).sum().backward()

    taken = min(_time(step, x.device, 0.3) for _ in range(_TURNS))
    with Ghosts(costs.append, lambda *_: None, lambda *_: None):
        step()
    return taken, sum(map(found.seconds, costs)), len(costs)


def _network(device: torch.device, seconds: float) -> tuple[Link | None, float, float]:
    """The link between all ranks, and the core's seconds per byte and per message."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    if ranks == 1:
        return None, 0.0, 0.0
    points = []
    for size in _MESSAGES:
        flat = torch.zeros(size // 4 * ranks, device=device)
        own = flat[size // 4 * group.rank() : size // 4 * (group.rank() + 1)]
        found = []
        number = min(max((1 << 20) // size, 1), 32)
        for _ in range(5):
            dist.barrier()
            if device.type == "cpu":
                found.append(_while_computing(partial(gloo.all_gather, flat, own, group), number))
            else:
                start = time.perf_counter()
                for _ in range(number):
                    dist.all_gather_into_tensor(flat, own)
                torch.cuda.synchronize(device)
                found.append(((time.perf_counter() - start) / number, 0.0))
        walls, cores = zip(*found, strict=True)
        points.append((size * (ranks - 1), statistics.median(walls), statistics.median(cores)))
    rates = torch.tensor(_fitted(points), dtype=torch.float64, device=device)
    dist.all_reduce(rates)
    per_byte, latency, core_per_byte, core = (rates / ranks).tolist()
    link = Link("measured", 1 / max(per_byte, 1e-15), max(latency, 0.0))
    return link, core_per_byte / 2, core / (2 * (ranks - 1))


def _while_computing(communicate: Callable[[], None], number: int) -> tuple[float, float]:
    """Seconds of a message in another thread, and how many of them this thread cannot compute meanwhile.

    The kernel's work for packets counts as well. It is in no process's CPU time.
    """
    a = torch.ones(128, 128)
    alone = _time(lambda: aten.mm(a, a), a.device, 0.02)

    def repeat() -> None:
        for _ in range(number):
            communicate()

    thread = threading.Thread(target=repeat)
    start, computed = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        aten.mm(a, a)
        computed += 1
    wall = time.perf_counter() - start
    return wall / number, max(wall - computed * alone, 0.0) / number


def _fitted(points: list[tuple[int, float, float]]) -> list[float]:
    """Seconds per byte and at no bytes, of wall clock and core, from the smallest and the largest message."""
    (small, wall, core), (large, longer, more) = points[0], points[-1]
    per_byte, core_per_byte = (longer - wall) / (large - small), (more - core) / (large - small)
    return [per_byte, wall - per_byte * small, max(core_per_byte, 0.0), max(core - core_per_byte * small, 0.0)]
