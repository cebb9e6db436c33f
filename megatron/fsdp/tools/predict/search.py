"""Searches the settings of a Megatron command line with most tokens per second on given GPUs.

A candidate is the user's own line with other values of some flags. The doctor examines each: it refuses what Megatron
or this engine refuses. A step is predicted of the others. From these, all combinations of settings are estimated, and
the best is the next candidate, until none is estimated to be among the ten best. This is done from two lines at the
same time: the user's, and one that is good by several settings together.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.fit import comparison
from megatron.fsdp.tools.predict.machine import Cluster
from megatron.fsdp.tools.predict.space import Place, Space, uneven, with_changes
from megatron.fsdp.tools.script import MEMORY, Change, CommandStep, memory_columns, prepare_megatron

SHOWN = 10  # of the candidates
# Combinations that are estimated to be worse than the last of these, or so much worse than the best, are left out.
TOLERANCE = 0.02
# The second line that the search begins from.
START: Change = {"--pipeline-model-parallel-size": "8", "--data-parallel-sharding-strategy": "optim"}
PROCESSES = min(os.cpu_count() or 1, 16)  # each takes about 1 GB
# glibc's malloc: large blocks are given back when they are freed. Without, heaps grow to several GB.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_MMAP_MAX_": "1000000"}


@dataclass(frozen=True)
class Candidate:
    """A command line, and what was predicted for it.

    Attributes:
        arguments: The script's.
        changes: Values that differ from the user's.
        step: The predicted step; None if none was predicted.
        memory: Bytes of the device that it takes, with assumed overhead; 0 if there is no step.
        capacity: Bytes of the device.
        refusal: The reason why it would not start; empty if it would.
    """

    arguments: tuple[str, ...]
    changes: Change
    step: CommandStep | None = None
    memory: int = 0
    capacity: int = 0
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, and a step was predicted."""
        return self.step is not None and self.memory <= self.capacity

    @property
    def text(self) -> str:
        """The flags that differ."""
        words = (
            f"{flag} {value}".strip() if value is not None else f"without {flag}"
            for flag, value in self.changes.items()
        )
        return " ".join(words) or "your command line"


def evaluate(script: Path, world_size: int, cluster: Cluster, candidate: Candidate, slowest: float = 0.0) -> Candidate:
    """Examine and predict a candidate, in a process that ran :func:`_start`.

    Fewer tokens per second than ``slowest`` do not need to be exact.
    """
    from megatron.fsdp.tools.examine import described, examine
    from megatron.fsdp.tools.predict.command import predict_stages

    arguments, capacity = list(candidate.arguments), int(cluster.device.memory or 0)
    known = dataclasses.replace(candidate, capacity=capacity)
    report = examine(script, arguments, world_size, None, cluster.device.memory, ends=True)
    if not report.accepted:
        refusal = "; ".join([limit.setting for limit in report.limits]) or report.refusal or "no model was wrapped"
        return dataclasses.replace(known, refusal=refusal)
    try:
        found = predict_stages(script, arguments, report, cluster, slowest)
    except Exception as error:  # noqa: BLE001 - the other candidates stand
        return dataclasses.replace(known, refusal=f"not predicted: {described(error, script)}")
    assert isinstance(found.step, CommandStep) and found.situation is not None, "a step was predicted"
    return dataclasses.replace(known, step=found.step, memory=found.situation.total)


def _worker() -> concurrent.futures.Executor:
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)


def _note(space: Space, place: Place, each: Candidate) -> None:
    space.note(place, None if each.refusal else each.step, each.memory, each.capacity)


def _start() -> None:
    """Prepare a process for candidates: silent, one thread, not ended by Ctrl-C, but with the process that began it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the pool has begun it"
    # A candidate replaces os._exit.
    threading.Thread(target=_end_after, args=(parent, os._exit), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    gc.set_threshold(20_000)  # recorded steps are many objects that live
    prepare_megatron()


def _end_after(parent: Any, end: Callable[[int], Any]) -> None:
    parent.join()
    end(1)


class Search:
    """A search from a command line.

    Args:
        script: A training script for Megatron.
        arguments: Its command line.
        world_size: Number of ranks.
        cluster: Their GPUs.
        goal: ``tokens_per_second``, or ``memory`` for the fewest bytes.
        seconds: No more candidates are begun after this time.
        on_found: Called with each candidate when it is known.
        keep: Flags that are not changed.

    Attributes:
        combinations: Number of combinations that are estimated.
        found: All candidates, the user's own line first if it is known.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        world_size: int,
        cluster: Cluster,
        goal: str,
        seconds: float,
        on_found: Callable[[Candidate], None],
        keep: Sequence[str] = (),
    ) -> None:
        self._evaluate = functools.partial(evaluate, script, world_size, cluster)
        self._own, self._end, self._on_found = tuple(arguments), time.monotonic() + seconds, on_found
        self._by_memory = goal == "memory"
        starts: list[Change] = [{}, uneven(arguments, {k: v for k, v in START.items() if k not in keep})]
        self._spaces = [Space(arguments, start, self._by_memory, keep) for start in starts]
        self.combinations = sum(map(len, self._spaces))
        self.found: list[Candidate] = []
        self._begun: set[tuple[str, ...]] = set()

    def run(self) -> None:
        """Search until nothing improves or the time is up."""
        # A process has a line that the search begins from: it knows the layers of similar lines.
        workers = [_worker() for _ in range(max(PROCESSES, len(self._spaces)))]
        try:
            with mock.patch.dict(os.environ, MALLOC):
                self._search(workers)
        finally:
            for worker in workers:
                for process in list((getattr(worker, "_processes", None) or {}).values()):
                    process.kill()
                worker.shutdown(wait=False, cancel_futures=True)

    def _search(self, workers: list[concurrent.futures.Executor]) -> None:
        pending: dict[concurrent.futures.Future[Candidate], tuple[int, Space, Place]] = {}
        while True:
            for number in sorted({*range(len(workers))} - {busy for busy, _, _ in pending.values()}):
                first = number % len(self._spaces)
                if chosen := self._choose([*self._spaces[first:], *self._spaces[:first]]):
                    slowest = 0.0 if self._by_memory else math.exp(self._least(chosen[0]))
                    future = workers[number].submit(self._evaluate, self._candidate(*chosen), slowest)
                    pending[future] = number, *chosen
            if not pending or (self.own and self.own.refusal):
                return
            seconds = max(self._end - time.monotonic(), 0) if self.own else None
            done, _ = concurrent.futures.wait(pending, seconds, concurrent.futures.FIRST_COMPLETED)
            if not done:
                return
            for future in done:
                number, space, place = pending.pop(future)
                try:
                    each = future.result()
                except concurrent.futures.BrokenExecutor as error:
                    workers[number] = _worker()
                    each = dataclasses.replace(self._candidate(space, place), refusal=f"not predicted: {error}")
                self.found.insert(len(self.found) if each.changes else 0, each)
                _note(space, place, each)
                self._on_found(each)

    def _choose(self, spaces: Sequence[Space]) -> tuple[Space, Place] | None:
        """The next combination that has to be evaluated, and its space: the first that has one."""
        for space in spaces:
            while (place := space.best(self._least(space))) is not None:
                space.begin(place)
                arguments = self._candidate(space, place).arguments
                same = [each for each in self.found if each.arguments == arguments]
                if same:
                    _note(space, place, same[0])
                elif arguments not in self._begun:  # else a worker predicts it for the other space
                    self._begun.add(arguments)
                    return space, place
        return None

    def _candidate(self, space: Space, place: Place) -> Candidate:
        return Candidate(*with_changes(self._own, space.change(place)))

    def _least(self, space: Space) -> float:
        """The least score of a combination that is worth a prediction."""
        scores = sorted((space.score(each.step, each.memory) for each in self.found if each.step), reverse=True)
        return max(scores[SHOWN - 1], scores[0] - TOLERANCE) if len(scores) >= SHOWN else -math.inf

    @property
    def own(self) -> Candidate | None:
        """The user's own line; None if it is not known yet."""
        return next((each for each in self.found[:1] if not each.changes), None)

    def ordered(self) -> list[Candidate]:
        """The candidates that would start, the best first."""
        return sorted((each for each in self.found if not each.refusal), key=self._rank)

    def _rank(self, each: Candidate) -> tuple[bool, float]:
        if each.step is None or not each.fits or self._by_memory:
            return not each.fits, each.memory
        return False, -each.step.tokens_per_second


def table(found: Sequence[Candidate], ranks: int) -> str:
    """Candidates on so many ranks as text. Columns of memory are GiB of tensors at the peak."""
    rows: list[Sequence[str]] = [
        ("step, s", "tokens/s", "per GPU", "MFU", "GiB", *MEMORY, "bound by", "changes"),
    ]
    for each in found:
        step = each.step
        assert step is not None, "only refused ones have none"
        speed, memory = step.tokens_per_second, memory_columns(step.peak)
        seen = [f"{step.seconds:.3f}", f"{speed:,.0f}", f"{speed / ranks:,.0f}", f"{step.mfu:.1%}"]
        bound = step.bound if each.fits else f"memory: {(each.memory - each.capacity) / GIB:.1f} GiB too much"
        rows.append((*seen, f"{each.memory / GIB:.1f}", *memory, bound, each.text))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def explained(own: Candidate, best: Candidate) -> str:
    """Where the seconds of the user's own line go, next to those of the best one, and by unit."""
    if own.refusal:
        return f"Your command line: {own.refusal}"
    too_large = "" if own.fits else f"Your command line {comparison(own.memory, own.capacity)}. "
    if own.step is None or best.step is None:
        return too_large
    parts = (f"{name} {own.step.parts[name]:.3f} -> {best.step.parts[name]:.3f}" for name in own.step.parts)
    seconds = f"{too_large}Seconds of your command line -> of the best: {', '.join(parts)}"
    return "\n".join([seconds, *own.step.unit_lines])
