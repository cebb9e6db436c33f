"""Runs pretrain_gpt.py, Megatron's real training loop, in rank processes and returns every iteration's numbers.

Processes are forked from one that has imported Megatron already: many short runs cost little more than their steps.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

# Another program may take the port between the moment when it is found free and that when rank 0 listens there.
ATTEMPTS = 3
# How long ranks may go on after one has failed.
SECONDS_FOR_OTHERS = 20.0
ROOT = Path(__file__).resolve().parents[1]


class RunFailure(RuntimeError):
    """A rank of a run ended with an error, or did not end in time."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration computed, in full precision; 0 for what it was not asked for.

    Attributes:
        loss: On the last pipeline stage.
        grad_norm: Of all gradients.
        params_norm: Of all weights.
        zeros: How many there are in the gradients.
    """

    loss: float
    grad_norm: float
    params_norm: float = 0.0
    zeros: float = 0.0


@dataclass(frozen=True)
class Run:
    """What one run computed.

    Attributes:
        iterations: Training, in order.
        validation: Validation losses, in order.
        log: What rank 0 and the last rank printed.
    """

    iterations: list[Iteration]
    validation: list[float]
    log: str


def run(
    arguments: list[str], ranks: int, timeout: float = 300.0, environment: Mapping[str, str] = MappingProxyType({})
) -> Run:
    """Run pretrain_gpt.py with these arguments on this many ranks of this machine.

    Raises:
        RunFailure: With the end of the log.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return _run(arguments, ranks, timeout, environment)
        except RunFailure as failure:
            if not _is_by_chance(str(failure), arguments):
                raise
    return _run(arguments, ranks, timeout, environment)


def _is_by_chance(failure: str, arguments: list[str]) -> bool:
    """Whether the port was taken, or Megatron-Core's own FSDP crashed, as it does now and then on a CPU."""
    crashed = re.match(r"exit codes \[.*-(6|11)\b", failure) is not None
    return "EADDRINUSE" in failure or (crashed and "megatron-core" in arguments)


def _run(arguments: list[str], ranks: int, timeout: float, environment: Mapping[str, str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        with started(arguments, ranks, folder, environment) as processes:
            _wait(processes, timeout)
            late = [process for process in processes if process.is_alive()]
        logs = [Path(folder, f"{rank}.log").read_text() for rank in sorted({0, ranks - 1})]
        if late or any(process.exitcode for process in processes):
            codes = [None if process in late else process.exitcode for process in processes]
            reason = f"exit codes {codes}" if any(codes) else f"no end within {timeout:.0f} s"
            ends = "\n".join(log[-3000:] for log in logs)
            raise RunFailure(f"{reason}\n{' '.join(arguments)}\n{ends}")
        numbers = json.loads(Path(folder, "numbers.json").read_text())
    return Run([Iteration(*pair) for pair in numbers["iterations"]], numbers["validation"], "\n".join(logs))


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Until all have ended; or a while after one has failed, as others may then wait for it for ever."""
    end, failed = time.monotonic() + timeout, False
    while (alive := [process for process in processes if process.is_alive()]) and time.monotonic() < end:
        if not failed and any(process.exitcode for process in processes):
            end, failed = min(end, time.monotonic() + SECONDS_FOR_OTHERS), True
        multiprocessing.connection.wait([process.sentinel for process in alive], 0.5)


@contextmanager
def started(
    arguments: list[str], ranks: int, folder: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[BaseProcess]]:
    """pretrain_gpt.py, running with these arguments on this many ranks; SIGKILL ends them with the context.

    Args:
        folder: Where logs are kept.
    """
    context, port = _context(), free_port()
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(arguments, rank, ranks, port, folder, dict(environment)), daemon=False)  # type: ignore[attr-defined]
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _context() -> BaseContext:
    if torch.cuda.is_available():  # a process that has seen CUDA cannot be forked
        return multiprocessing.get_context("spawn")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain_gpt"])
    return context


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(arguments: list[str], rank: int, ranks: int, port: int, folder: str, environment: dict[str, str]) -> None:
    log = open(Path(folder, f"{rank}.log"), "w", buffering=1)  # noqa: SIM115 - open until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **environment,
    )
    sys.path.insert(0, str(ROOT))
    sys.argv = ["pretrain_gpt.py", *arguments]
    torch.set_num_threads(1)
    import pretrain_gpt

    numbers = _record()
    try:
        pretrain_gpt.main()
    finally:
        if rank == ranks - 1:
            Path(folder, "numbers.json").write_text(json.dumps(numbers))


def _record() -> dict[str, list[Any]]:
    """Note what Megatron is about to round and print."""
    from megatron.training import training

    numbers: dict[str, list[Any]] = {"iterations": [], "validation": []}
    log, evaluate = training.training_log, training.evaluate

    def recording_log(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # Arguments after the loss: total_loss_dict, learning_rate, iteration, loss_scale, report_memory, skipped, and
        # then norm of gradients, norm of weights, number of zeros. Pipeline stages before the last have no loss;
        # without clipping there is no norm.
        found = (loss_dict.get("lm loss"), *args[6:9])
        numbers["iterations"].append([float(value or 0.0) for value in found])
        return log(loss_dict, *args, **kwargs)

    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        numbers["validation"].append(float(result[0].get("lm loss", 0.0)))
        return result

    training.training_log, training.evaluate = recording_log, recording_evaluate
    return numbers
