"""Runs pretrain_gpt.py with Megatron's training loop in rank processes and returns the numbers of every iteration.

Processes are forked from one that has already imported Megatron, so a short run costs little more than its steps.
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

# Another program may take the port after it was found free and before rank 0 listens on it.
ATTEMPTS = 3
# How long the other ranks may continue after one has failed.
SECONDS_FOR_OTHERS = 20.0
ROOT = Path(__file__).resolve().parents[1]


class RunFailure(RuntimeError):
    """A rank of a run ended with an error, or did not end in time."""


@dataclass(frozen=True)
class Iteration:
    """The numbers of one iteration, in full precision; 0 for numbers that were not computed.

    Attributes:
        loss: Loss, on the last pipeline stage.
        grad_norm: Norm of all gradients.
        params_norm: Norm of all weights.
        zeros: Number of zeros in the gradients.
    """

    loss: float
    grad_norm: float
    params_norm: float = 0.0
    zeros: float = 0.0


@dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        iterations: Training iterations, in order.
        validation: Validation losses, in order.
        log: Output of rank 0 and of the last rank.
    """

    iterations: list[Iteration]
    validation: list[float]
    log: str


def reason(log: str) -> str:
    """The first error in a log that is not about another rank's end."""
    errors = re.findall(r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception|Exit)\b|.*error: ).*)$", log, re.MULTILINE)
    own = [error for error in errors if not re.search("Connection|DistNetwork|DistStore|RunFailure", error)]
    return (own or errors or log.strip().splitlines())[0].strip()[:300]


def limits_in(error: str) -> list[Any]:
    """The rows of docs/limits.md that an error quotes."""
    from megatron.fsdp.mcore.limits import LIMITS

    return [limit for limit in LIMITS if limit.setting in error and limit.remedy[:40] in error]


def run(
    arguments: list[str], ranks: int, timeout: float = 300.0, environment: Mapping[str, str] = MappingProxyType({})
) -> Run:
    """Run pretrain_gpt.py on this machine.

    Raises:
        RunFailure: A rank failed or timed out. The message holds the end of the log.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return _run(arguments, ranks, timeout, environment)
        except RunFailure as failure:
            if not _is_by_chance(str(failure), arguments):
                raise
    return _run(arguments, ranks, timeout, environment)


def _is_by_chance(failure: str, arguments: list[str]) -> bool:
    """Whether a retry may help: the port was taken, or Megatron-Core's FSDP crashed, as it sometimes does on a CPU."""
    crashed = re.match(r"exit codes \[.*-(6|11)\b", failure) is not None
    return "EADDRINUSE" in failure or (crashed and "megatron-core" in arguments)


def _run(arguments: list[str], ranks: int, timeout: float, environment: Mapping[str, str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        with started(arguments, ranks, folder, environment) as processes:
            _wait(processes, timeout)
            late = [process for process in processes if process.is_alive()]
        logs = [Path(folder, f"{rank}.log").read_text() for rank in range(ranks)]
        if late or any(process.exitcode for process in processes):
            codes = [None if process in late else process.exitcode for process in processes]
            ended = f"exit codes {codes}" if any(codes) else f"no end within {timeout:.0f} s"
            ends = "\n".join(log[-3000:] for log in logs)
            raise RunFailure(f"{ended}\n{' '.join(arguments)}\n{ends}")
        numbers = json.loads(Path(folder, "numbers.json").read_text())
    shown = "\n".join(logs[rank] for rank in sorted({0, ranks - 1}))
    return Run([Iteration(*pair) for pair in numbers["iterations"]], numbers["validation"], shown)


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Wait until all have ended or, once one has failed, for a while: the others may wait for it forever."""
    end, failed = time.monotonic() + timeout, False
    while (alive := [process for process in processes if process.is_alive()]) and time.monotonic() < end:
        if not failed and any(process.exitcode for process in processes):
            end, failed = min(end, time.monotonic() + SECONDS_FOR_OTHERS), True
        multiprocessing.connection.wait([process.sentinel for process in alive], 0.5)


@contextmanager
def started(
    arguments: list[str], ranks: int, folder: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[BaseProcess]]:
    """Context in which pretrain_gpt.py runs; leaving it kills the ranks.

    Args:
        arguments: Of the command line.
        ranks: Number of processes.
        folder: Receives the logs.
        environment: Further environment variables.
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
    """Return a port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(arguments: list[str], rank: int, ranks: int, port: int, folder: str, environment: dict[str, str]) -> None:
    log = open(Path(folder, f"{rank}.log"), "w", buffering=1)  # noqa: SIM115 - open until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        # Ranks share a device, for which NCCL has to take them for separate hosts.
        environment |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **{"LOCAL_RANK": str(rank), **environment},
    )
    sys.path.insert(0, str(ROOT))
    # As in a script: Megatron gives the processes of its data loader a local function, which cannot be pickled.
    multiprocessing.set_start_method("fork", force=True)
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
    """Record the numbers that Megatron logs, before it rounds them."""
    from megatron.training import training

    numbers: dict[str, list[Any]] = {"iterations": [], "validation": []}
    log, evaluate = training.training_log, training.evaluate

    def recording_log(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # The arguments after the loss are total_loss_dict, learning_rate, iteration, loss_scale, report_memory,
        # skipped, and then grad_norm, params_norm and num_zeros. Only the last pipeline stage has a loss. Without
        # clipping there is no norm.
        found = (loss_dict.get("lm loss"), *args[6:9])
        numbers["iterations"].append([float(value or 0.0) for value in found])
        return log(loss_dict, *args, **kwargs)

    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        numbers["validation"].append(float(result[0].get("lm loss", 0.0)))
        return result

    training.training_log, training.evaluate = recording_log, recording_evaluate
    return numbers
