"""Starts rank processes, calls functions in them, and detects crashes."""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import original_package, quiet
from benchmarks.job import Job
from benchmarks.peers import PEERS

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 240.0


class WorkerFailure(RuntimeError):
    """A rank raised an error, crashed or did not answer in time."""


class Worker:
    """One rank process.

    Args:
        environment: Environment variables in addition to those of this process.
        prefix: Prefix of the command, such as ``ip netns exec``.
    """

    def __init__(self, environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - stays open while the process runs
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", "benchmarks.worker", str(write)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            pass_fds=(write,),
        )
        os.close(write)
        self._answers = os.fdopen(read, "r")

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that the process has used."""
        return quiet.cpu_seconds(self._process.pid)

    def send(self, function: str, arguments: dict[str, Any]) -> None:
        """Make the process call ``module:function``.

        Raises:
            WorkerFailure: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerFailure(self._how_it_ended()) from error

    def receive(self, until: float) -> Any:
        """Wait for the result of the call, until ``time.monotonic()`` reaches ``until``.

        Raises:
            WorkerFailure: The process raised an error, crashed or took too long.
        """
        ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise WorkerFailure("no answer in time: it hangs")
        line = self._answers.readline()
        if not line:
            raise WorkerFailure(self._how_it_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailure(f"{answer['error']}\n{answer['traceback']}")
        return answer["result"]

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.seek(0)
        return f"the process ended with code {self._process.returncode}: {self._log.read()[-600:].strip()}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._log.close()


class Ranks:
    """The rank processes of one peer.

    Args:
        job: The training job. With ``fake``, one process represents all ranks.
        environment: Environment variables for all processes.
        prefix: Returns the command prefix of a rank.
        start: The ``module:function`` that is called first, with the job, the rank and the address of the store.
    """

    def __init__(
        self,
        job: Job,
        environment: dict[str, str] | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        start: str = "benchmarks.training:start",
    ) -> None:
        self.job = job
        self._environment = environment or {}
        self._prefix = prefix
        self._start = start
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._workers: list[Worker] = []
        self._launches = 0

    def launch(self) -> list[Any]:
        """Start or restart the processes and build the peer in them. Returns the results of ``start``."""
        self._end()
        self._launches += 1
        store = Path(self._folder.name, f"store{self._launches}")
        variables = {**rank_environment(self.job), **self._environment}
        for rank in range(1 if self.job.fake else self.job.ranks):
            self._workers.append(Worker(variables, self._prefix(rank)))
        job = self.job.as_json()
        return self.call_each(
            self._start,
            [{"job": job, "rank": rank, "store": f"file://{store}"} for rank in range(len(self._workers))],
        )

    @property
    def launches(self) -> int:
        """Number of times that the processes have been started."""
        return self._launches

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that these processes have used."""
        return sum(worker.cpu_seconds for worker in self._workers)

    def call(self, function: str, timeout: float = TIMEOUT, **arguments: Any) -> list[Any]:
        """Call a function on all ranks. Returns the results in rank order."""
        return self.call_each(function, [arguments] * len(self._workers), timeout)

    def call_each(self, function: str, arguments: list[dict[str, Any]], timeout: float = TIMEOUT) -> list[Any]:
        """Call a function on all ranks, with different arguments for each rank.

        Raises:
            WorkerFailure: A rank failed.
        """
        if not self._workers:
            raise WorkerFailure("its processes have ended")
        until = time.monotonic() + timeout
        for worker, own in zip(self._workers, arguments, strict=True):
            worker.send(function, own)
        answers, failures = [], []
        for rank, worker in enumerate(self._workers):
            try:
                answers.append(worker.receive(until))
            except WorkerFailure as failure:
                failures.append(f"rank {rank}: {failure}")
                until = min(until, time.monotonic() + 10.0)  # the others probably wait for the failed rank
        if failures:
            # A rank usually hangs because another one failed, so report errors and crashes first.
            failures.sort(key=lambda text: "it hangs" in text)
            raise WorkerFailure(failures[0])
        return answers

    def _end(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._folder.cleanup()


def rank_environment(job: Job) -> dict[str, str]:
    """Environment variables of a rank: import path, number of threads, and warnings.

    Raises:
        NotInstalled: The package of the peer is not available.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    peer = PEERS.get(job.peer)
    if peer is not None and peer.needs_original:
        path.insert(0, str(original_package.on_path(job.device)))
    if peer is not None and peer.module == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise original_package.NotInstalled("deepspeed is not installed")
    threads = str(job.threads)
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Without this barrier, a rank could finish and end before another one has connected to it.
        "TORCH_DIST_INIT_BARRIER": "0" if job.fake else "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
