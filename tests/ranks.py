"""One pool of rank processes for all tests: starting Python with torch takes seconds, a process group milliseconds."""

import contextlib
import faulthandler
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.evidence.recorder import recorded

ROOT = Path(__file__).resolve().parents[1]

# "cuda": the ranks share the CUDA device, over NCCL.
DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cpu")
TIMEOUT = 120.0
# The threads of process groups and other remains of tests end with their process.
RUNS_PER_PROCESS = 200
LINES_OF_OUTPUT = 30
# Imported once, by the server that rank processes are forked from. Importing starts no threads.
PRELOADED = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "megatron_fsdp")
# What takes long of importing Megatron: for a suite of tests, not for one test.
LIBRARIES = ("torch._inductor.compile_fx", "torch.utils.tensorboard", "wandb", "transformers")


class RankFailure(AssertionError):
    """The errors of the ranks, the first one first, with tracebacks and the end of their output."""


class Error(NamedTuple):
    """Why a rank has no result."""

    time: float
    text: str
    lost: bool = False


class Rank:
    """A process that runs one function at a time, and the file that takes what it prints."""

    def __init__(self, output: Path) -> None:
        self.output = output
        context = get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, *(LIBRARIES if "PYTEST_XDIST_WORKER" in os.environ else ())])
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, str(output)), daemon=True)
        with path_for_children():
            self.process.start()
        # Otherwise the pipe would not end when the process does.
        theirs.close()

    def reply(self, timeout: float) -> tuple[Any, Error | None]:
        """Wait for the result of a run."""
        try:
            if self.pipe.poll(timeout):
                return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return None, Error(time.time(), f"the process ended with exit code {self.process.exitcode}", lost=True)
        return None, Error(time.time(), f"no reply within {timeout:.0f} s", lost=True)

    def lines(self) -> list[str]:
        """The output of the rank in its latest run."""
        return self.output.read_text(errors="replace").splitlines() if self.output.exists() else []

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RankPool:
    """Processes that run a function as the ranks of a process group.

    Attributes:
        timeout: Seconds that a run may take.
        backend: Of groups of several ranks. NCCL takes each rank for a host of its own, so ranks may share a device.
        collectives_of_nccl: Exchange flat buffers over gloo by the collectives that NCCL runs, not by sends and
            receives. Tests set it by ``tests.exchanges``.
    """

    def __init__(self) -> None:
        self.timeout = TIMEOUT
        self.backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
        self.collectives_of_nccl = False
        self._ranks: list[Rank] = []
        self._runs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(*args)`` on ranks 0 to ``world_size - 1`` of a fresh process group.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailure: A rank raised, died or took too long.
        """
        self._runs += 1
        if self._runs % RUNS_PER_PROCESS == 0:
            self.close()
        if DEVICE == "cuda" and not torch.cuda.is_available():
            pytest.skip("FSDP_TEST_DEVICE=cuda, but there is no CUDA device")
        while len(self._ranks) < world_size:
            self._ranks.append(Rank(Path(self._folder.name) / f"{len(self._ranks)}.log"))
        ranks = self._ranks[:world_size]
        # A file, not a TCPStore: with many short messages that one waits for delayed acknowledgements.
        store = Path(self._folder.name) / f"store {self._runs}"
        for number, rank in enumerate(ranks):
            group = (self.backend, f"file://{store}", number, world_size)
            rank.pipe.send((self.timeout, *group, self.collectives_of_nccl, recorded(function), args))
        replies = [rank.reply(self.timeout) for rank in ranks]
        store.unlink(missing_ok=True)
        output = [rank.lines() for rank in ranks]
        for number, lines in enumerate(output):
            # pytest shows it if the test fails.
            print("".join(f"[rank {number}] {line}\n" for line in lines[-LINES_OF_OUTPUT:]), end="")
        errors = [(error, number) for number, (_, error) in enumerate(replies) if error is not None]
        if errors:
            # Processes are lost, or keep what the function changed: later tests get new ones.
            self.close()
            errors.sort(key=lambda found: (found[0].lost, found[0].time))
            raise RankFailure("\n".join(_report(number, error, output[number]) for error, number in errors))
        return [result for result, _ in replies]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()


def on_ranks(count: int | str) -> Callable[..., Any]:
    """Decorate a test: its body runs on ranks, with the values of its parameters and fixtures.

    Args:
        count: Number of ranks, or the name of the parameter that is it.
    """
    return lambda test: pytest.mark.on_ranks(count)(pytest.mark.usefixtures("ranks")(test))


def _report(rank: int, error: Error, output: list[str]) -> str:
    said = "".join(f"\n    {line}" for line in output[-LINES_OF_OUTPUT:]) or " none"
    return f"rank {rank}: {error.text.rstrip()}\nrank {rank}'s last output:{said}"


@contextlib.contextmanager
def path_for_children() -> Iterator[None]:
    """Processes that start here find this project."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"PYTHONPATH": path}):
        yield


def _serve(pipe: Connection, output: str) -> None:
    _redirect(output)
    gc.freeze()  # what is imported by now; collections are a hundred times as fast without it
    sys.path.insert(0, str(ROOT))
    # A rank that is done before another has connected to it must not leave.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        except Exception:  # noqa: BLE001 - a function whose module cannot be imported; reported to the test
            pipe.send((None, Error(time.time(), traceback.format_exc())))
            continue
        os.ftruncate(1, 0)
        # A rank that hangs prints where, shortly before the pool stops waiting.
        timeout, *run = task
        faulthandler.dump_traceback_later(0.9 * timeout)
        reply = _run(*run)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send(reply)
        except Exception:  # noqa: BLE001 - a result that cannot be pickled
            pipe.send((None, Error(time.time(), traceback.format_exc())))


def _redirect(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Open files of the process itself, whatever pytest had put in their place.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()


def _run(
    backend: str,
    store: str,
    rank: int,
    world_size: int,
    collectives_of_nccl: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> tuple[Any, Error | None]:
    # All ranks share the first CUDA device.
    local = 0 if DEVICE == "cuda" else rank
    names = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local), "NCCL_HOSTID": f"rank{rank}"}
    result, error = None, None
    try:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        torch.set_num_threads(1)  # accelerate may have set it for an earlier test
        # Later tests must not depend on variables that this one, or what it imports, has set.
        without = _without_exchange_of_gloo() if collectives_of_nccl else contextlib.nullcontext()
        with patch.dict(os.environ, names), without:
            result = function(*args)
        _check_patches()
    except BaseException:  # noqa: BLE001 - reported to the test
        error = Error(time.time(), traceback.format_exc())
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # Process groups in cycles keep gloo's threads, which poll: hundreds of them took half of the machine's time.
    gc.collect()
    return result, error


def _check_patches() -> None:
    """Raise if a test has put back functions of torch that later models in this process count on."""
    from megatron.fsdp.dtensor.torch_patches import TORCH
    from megatron.fsdp.helpers.patches import Kind

    functions = [row for row in TORCH.rows if TORCH.is_installed and row.applies and row.kind is Kind.AROUND]
    lost = [row.target for row in functions if not hasattr(getattr(row.owner, row.attribute), "__wrapped__")]
    assert not lost, f"this test has undone patches that count as installed: {lost}"


def _without_exchange_of_gloo() -> contextlib.AbstractContextManager[Any]:
    from megatron.fsdp.comm.backends import Backend

    return patch.object(Backend, "prefers_sends", False)
