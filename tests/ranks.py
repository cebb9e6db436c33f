"""One pool of rank processes for all tests: starting Python with torch takes seconds, a process group does not."""

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# "cuda": the ranks compute on the CUDA device, one rank over NCCL and several over gloo, sharing it.
DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cpu")
TIMEOUT = 120.0
# What tests leave behind in a process, such as threads of process groups, goes with it.
RUNS_PER_PROCESS = 200


class RankFailure(AssertionError):
    """What the ranks raised, with their tracebacks."""


class RankPool:
    """Processes that run a function as the ranks of a process group."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._runs = 0

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
        while len(self._workers) < world_size:
            self._start()
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(workers):
                pipe.send((f"file://{folder}/store", rank, world_size, function, args))
            replies = [_receive(process, pipe) for process, pipe in workers]
        failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(replies) if error is not None]
        if failures:
            if any("was lost" in failure for failure in failures):
                self.close()
            raise RankFailure("\n".join(failures))
        return [result for result, _ in replies]

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _path_for_children():
            process.start()
        self._workers.append((process, ours))

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()


def _receive(process: BaseProcess, pipe: Connection) -> tuple[Any, str | None]:
    try:
        if pipe.poll(TIMEOUT):
            return pipe.recv()
    except EOFError:
        process.join(5)
        return None, f"the process was lost, exit code {process.exitcode}"
    return None, f"no reply within {TIMEOUT:.0f} s: it hangs; the process was lost"


@contextlib.contextmanager
def _path_for_children() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _work(pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    # A rank that is done before another has connected to it must not leave.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    while True:
        try:
            store, rank, world_size, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        result, error = None, None
        try:
            backend = "nccl" if DEVICE == "cuda" and world_size == 1 else "gloo"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
            torch.manual_seed(0)
            result = function(*args)
        except BaseException:  # noqa: BLE001 - reported to the test
            error = traceback.format_exc()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        try:
            pipe.send((result, error))
        except Exception:  # noqa: BLE001 - a result that cannot be pickled
            pipe.send((None, traceback.format_exc()))
