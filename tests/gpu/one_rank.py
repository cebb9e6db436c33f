"""One rank over NCCL: races that torch's sanitizer sees, memory while the device is late, and waits of the host."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.optim.hooks import ELEMENTS_AT_ONCE
from megatron_fsdp import MegatronFSDP, fully_shard
from tests.gpu.verdict import Setup, Skipped, Verdict, judge
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, adamw, batches, device, loss_of

Step = Callable[[], None]
# Cycles by which the device is late: about a second.
LATE = 2_000_000_000


@contextmanager
def _one_rank(setup: Setup) -> Iterator[None]:
    backend = "nccl" if setup.on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _prepared(width: int, strategy: str, depth: int = 3, **arguments: Any) -> tuple[MegatronFSDP, Step]:
    """A bf16 model, and a step of it with accumulation and clipping."""
    torch.manual_seed(3)
    model = TinyModel(width=width, depth=depth).to(device()).bfloat16()
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
        **arguments,
    )
    first, second = batches(1, 2)[0]

    def step() -> None:
        with sharded.no_sync():
            loss_of(sharded, first).backward()
        loss_of(sharded, second).backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return sharded, step


def _synchronize(setup: Setup) -> None:
    if setup.on_cuda:
        torch.cuda.synchronize()


def sanitizer(setup: Setup) -> Verdict:
    """TORCH_CUDA_SANITIZER=1 raises at memory that two streams use without an order."""
    if setup.on_cuda and not os.environ.get("TORCH_CUDA_SANITIZER"):
        raise Skipped("TORCH_CUDA_SANITIZER is not set: run this through python -m tests.gpu")
    problems = []
    for strategy in STRATEGIES:
        for options in ({}, {"fsdp_double_buffer": True}):
            with _one_rank(setup):
                try:
                    _, step = _prepared(64, strategy, **options)
                    for _ in range(3):
                        step()
                    _synchronize(setup)
                except Exception as error:  # noqa: BLE001 - the errors of the sanitizer have a class of their own
                    problems.append(f"{strategy}, {options}: {type(error).__name__}: {error}")
    return judge(problems, "no stream uses memory that another one may still use", {"strategies": STRATEGIES})


def memory(setup: Setup) -> Verdict:
    """The peak of a step is within docs/memory.md, also when the device is late and the host runs ahead."""
    width, depth = (64, 3) if setup.dry_run else (1024, 8)
    problems, figures = [], {}
    for name, late in (("in time", 0), ("late", LATE)):
        with _one_rank(setup):
            sharded, step = _prepared(width, "optim_grads_params", depth)
            for _ in range(2):
                step()
            sharded.synchronize_param_gather()
            found = _peak_of(setup, step, late)
            bound = found["resting"] + peak_of_zero3(sharded) + 128 * 10 * width * depth + 2**20
            del sharded, step
        figures[name] = found | {"bound": bound}
        if found["peak"] > bound:
            problems.append(f"device {name}: the peak is {found['peak']} bytes; expected at most {bound}")
    peaks = ", ".join(f"{name}: {found['peak'] / 2**20:.1f} MiB" for name, found in figures.items())
    return judge(problems, f"the peak is within the bound ({peaks})", figures)


def peak_of_zero3(model: MegatronFSDP) -> int:
    """Bytes that a step adds to what is there between steps, without activations: bf16 weights, fp32 gradients."""
    root, *units = [sum(group.layout.numel for group in unit.groups) for unit in model.engine.units]
    backward = (2 + 4) * root + 2 * 2 * max(units) + 4 * max(units)
    update = 4 * min(root + sum(units), ELEMENTS_AT_ONCE + max(units))  # of an optimizer with foreach
    return 4 * (root + sum(units)) + max(backward, update)


def _peak_of(setup: Setup, step: Step, late: int) -> dict[str, int]:
    if not setup.on_cuda:
        step()
        return {"resting": 0, "peak": 0}
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if late:
        torch.cuda._sleep(late)
    step()
    torch.cuda.synchronize()
    return {"resting": resting, "peak": torch.cuda.max_memory_allocated()}


def host_waits(setup: Setup) -> Verdict:
    """Nothing in a step makes the host wait for the device: torch raises at what would."""
    problems = []
    for strategy in STRATEGIES:
        with _one_rank(setup):
            _, step = _prepared(64, strategy)
            for _ in range(3):
                step()
            _synchronize(setup)
            try:
                if setup.on_cuda:
                    torch.cuda.set_sync_debug_mode("error")
                step()
            except RuntimeError as error:
                problems.append(f"{strategy}: {error}: {_where(error)}")
            finally:
                if setup.on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
            _synchronize(setup)
    return judge(problems, "a step does not wait for the device", {"strategies": STRATEGIES})


def _where(error: BaseException) -> str:
    """The innermost frame of this repository."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "site-packages" not in code.co_filename:
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place
