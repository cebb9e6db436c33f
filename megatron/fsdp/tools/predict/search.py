"""Searches the settings of a Megatron command line with most tokens per second on given GPUs.

A candidate is the user's own line with other values of some flags. The doctor examines each: it refuses what Megatron
or this engine refuses, and counts the memory of layouts. A step is predicted of those that may fit. From the user's
line, one setting after the other takes its best value, until none changes; then settings change in pairs. What needs
more memory than a candidate that does not fit is left out, and what would be too slow to be shown without any wait.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.fit import comparison, with_overhead
from megatron.fsdp.tools.predict.machine import Cluster
from megatron.fsdp.tools.script import (
    MEMORY,
    Change,
    CommandStep,
    edited,
    memory_columns,
    options_without,
    prepare_megatron,
    recomputation,
)

# Layouts alone that are this much above the device's size are too large, without a prediction: their sum is a bound.
MARGIN = 1.1
SHOWN = 10  # of the candidates
PROCESSES = min(os.cpu_count() or 1, 16)  # each takes about 1 GB
# glibc's malloc: large blocks are given back when they are freed. Without, heaps grow to several GB.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_MMAP_MAX_": "1000000"}


def _sizes(flag: str, sizes: Iterable[int], with_flag: str = "") -> list[Change]:
    """Values of a flag that Megatron takes as 1 without it, and a flag that goes with larger ones."""
    more = [with_flag] if with_flag else []
    return [{flag: str(n) if n > 1 else None, **dict.fromkeys(more, "" if n > 1 else None)} for n in sizes]


def _instances(outer: str) -> list[Change]:
    """Numbers of groups of ranks, in each of which weights are sharded."""
    names = "--num-distributed-optimizer-instances", "--outer-dp-sharding-strategy"
    return [dict(zip(names, (str(n), outer), strict=True)) for n in (2, 4, 8, 16, 32)]


# In the order in which they are tried: first, what communication depends on.
SETTINGS: dict[str, list[Change]] = {
    "recomputation": [
        recomputation(None),
        recomputation("selective", modules="core_attn"),
        recomputation("full", method="uniform", num_layers="1"),
    ],
    "micro-batch": [{"--micro-batch-size": str(n)} for n in (1, 2, 4, 8)],
    "expert parallelism": _sizes("--expert-model-parallel-size", (1, 2, 4, 8, 16, 32, 64)),
    "strategy": [
        {"--data-parallel-sharding-strategy": name} for name in ("optim", "optim_grads", "optim_grads_params")
    ],
    "hybrid FSDP": _instances("optim"),
    "HSDP": [dict.fromkeys(_instances("no_shard")[0]), *_instances("no_shard")],
    "tensor parallelism": _sizes("--tensor-model-parallel-size", (1, 2, 4, 8), "--sequence-parallel"),
    "pipeline": _sizes("--pipeline-model-parallel-size", (1, 2, 4, 8, 16)),
    "context parallelism": _sizes("--context-parallel-size", (1, 2, 4, 8)),
}


# Settings of which a later value needs more memory (1) or less (-1), if nothing else changes.
MEMORY_GROWS = {"micro-batch": 1, "recomputation": -1, "strategy": -1, "hybrid FSDP": 1, "HSDP": 1}


# Settings that change communication only, and memory.
SHARDING = "strategy", "hybrid FSDP", "HSDP"


def without(arguments: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The options of a command line without some settings, sorted."""
    return options_without(arguments, [flag for name in names for value in SETTINGS[name] for flag in value])


def memory_order(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The rest of a command line without the settings of ``MEMORY_GROWS``, and where it lies in the order of each."""
    own: list[str] = []
    places: list[int] = []
    for name, sign in MEMORY_GROWS.items():
        values = SETTINGS[name]
        same = [sign * place for place, value in enumerate(values) if not with_changes(arguments, value)[1]]
        places += same[:1] or [0]
        own += [] if same else [name]  # a value that is not listed has no place, and is compared with itself only
    return without(arguments, [name for name in MEMORY_GROWS if name not in own]), places


@dataclass(frozen=True)
class Candidate:
    """A command line, and what was predicted for it.

    Attributes:
        arguments: The script's.
        changes: Values that differ from the user's.
        step: The predicted step; None if none was predicted.
        memory: Bytes of the device that it takes, with assumed overhead; predicted if there is a step, else estimated.
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


def with_changes(arguments: Sequence[str], changes: Change) -> tuple[tuple[str, ...], Change]:
    """A command line with other values of some flags, and those of them that differ from before."""
    found, before = edited(arguments, changes)
    ones = {flag for flag, value in before.items() if value == "1" and flag.endswith(("-parallel-size", "-instances"))}
    differ = {flag: value for flag, value in changes.items() if value != (None if flag in ones else before[flag])}
    return (tuple(found), differ) if differ else (tuple(arguments), {})


def evaluate(script: Path, world_size: int, cluster: Cluster, candidate: Candidate) -> Candidate:
    """Examine and predict a candidate, in a process that ran :func:`_start`."""
    from megatron.fsdp.tools.examine import described, examine
    from megatron.fsdp.tools.predict.command import predict_stages

    arguments, capacity = list(candidate.arguments), int(cluster.device.memory or 0)
    known = dataclasses.replace(candidate, capacity=capacity)
    report = examine(script, arguments, world_size, None, cluster.device.memory, ends=True)
    if not report.accepted:
        refusal = "; ".join([limit.setting for limit in report.limits]) or report.refusal or "no model was wrapped"
        return dataclasses.replace(known, refusal=refusal)
    if report.config is not None and report.config.offload_optimizer:
        return dataclasses.replace(known, refusal="not predicted: offloading")
    if (least := with_overhead(report.peak)) > MARGIN * capacity:
        return dataclasses.replace(known, memory=least)
    try:
        found = predict_stages(script, arguments, report, cluster, capacity)
    except Exception as error:  # noqa: BLE001 - the other candidates stand
        return dataclasses.replace(known, refusal=f"not predicted: {described(error, script)}")
    assert isinstance(found.step, CommandStep) and found.situation is not None, "a step was predicted"
    return dataclasses.replace(known, step=found.step, memory=found.situation.total)


def uneven(arguments: Sequence[str], change: Change) -> Change:
    """A number of pipeline stages, with fewer layers in the last one if the layers cannot be divided evenly."""
    _, given = edited(arguments, {"--num-layers": None, "--pipeline-model-parallel-layout": None})
    layers, stages = int(given["--num-layers"] or 0), int(change["--pipeline-model-parallel-size"] or 1)
    last = None
    if layers % stages and given["--pipeline-model-parallel-layout"] is None:
        last = next((str(n) for n in range(layers // stages, 0, -1) if (layers - n) % (stages - 1) == 0), None)
    return change | {"--decoder-last-pipeline-num-layers": last}


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

    Attributes:
        found: All candidates, the user's own line first.
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
    ) -> None:
        self._evaluate = functools.partial(evaluate, script, world_size, cluster)
        self._own, self._end, self._on_found = tuple(arguments), time.monotonic() + seconds, on_found
        self._by_memory = goal == "memory"
        self._seen: set[frozenset[tuple[str, str | None]]] = set()
        self._too_large: list[tuple[tuple[str, ...], list[int]]] = []
        self._most: dict[tuple[str, ...], float] = {}  # tokens/s without waits, by all but SHARDING
        self.found: list[Candidate] = []

    def run(self) -> None:
        """Search until nothing improves or the time is up."""
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(PROCESSES, context, _start)
        try:
            with mock.patch.dict(os.environ, MALLOC):
                self._search(pool)
        finally:
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)

    def _search(self, pool: concurrent.futures.Executor) -> None:
        best: Change = {}
        self._try(pool, [best])
        for changes in self._neighbours():
            self._try(pool, [best | change for change in changes])
            if time.monotonic() > self._end:
                return
            best = self.ordered()[0].changes

    def _neighbours(self) -> Iterator[list[Change]]:
        """Changes to try together: of one setting after the other as long as that helps, and then of two at once.

        First of all, micro-batches are as large as recomputation allows.
        """
        experts = any(word.partition("=")[0] == "--num-experts" for word in self._own)
        settings = {name: values for name, values in SETTINGS.items() if experts or name != "expert parallelism"}
        settings["pipeline"] = [uneven(self._own, change) for change in settings["pipeline"]]
        # An own line that does not start has no neighbours that are known to.
        if self.ordered():
            less = [*settings["recomputation"][::-1], Change()]
            yield [a | b for a, b in itertools.product(settings["micro-batch"][::-1], less)]
        before = None
        while (best := self.ordered()) and before != (before := best[0]):
            yield from settings.values()
        for one, other in itertools.combinations(settings.values(), 2) if best else ():
            yield [a | b for a, b in itertools.product(one, other)]

    def _try(self, pool: concurrent.futures.Executor, changes: list[Change]) -> None:
        left = [with_changes(self._own, change) for change in changes]
        pending: set[concurrent.futures.Future[Candidate]] = set()
        while left or pending:
            while left and len(pending) < PROCESSES:
                arguments, differ = left.pop(0)
                key = frozenset(differ.items())
                if not (key in self._seen or self._is_larger(arguments) or self._is_slower(arguments)):
                    self._seen.add(key)
                    pending.add(pool.submit(self._evaluate, Candidate(arguments, differ)))
            seconds = max(self._end - time.monotonic(), 0) if self.found else None
            done, pending = concurrent.futures.wait(pending, seconds, concurrent.futures.FIRST_COMPLETED)
            if pending and not done:
                return
            for future in done:
                self._note(future.result())

    def _note(self, each: Candidate) -> None:
        """Keep a candidate, and what it says of others."""
        self.found.append(each)
        if not each.refusal and not each.fits:
            self._too_large.append(memory_order(each.arguments))
        if each.step is not None:
            key, step = without(each.arguments, SHARDING), each.step
            alone = step.tokens_per_second * step.seconds / (step.seconds - sum(step.waits.values()))
            self._most[key] = max(alone, self._most.get(key, 0.0))
        self._on_found(each)

    def _is_larger(self, arguments: Sequence[str]) -> bool:
        """Whether a command line needs at least as much memory as one that does not fit."""
        rest, places = memory_order(arguments)
        return any(
            rest == other and all(mine >= its for mine, its in zip(places, of_other, strict=True))
            for other, of_other in self._too_large
        )

    def _is_slower(self, arguments: Sequence[str]) -> bool:
        """Whether a command line is too slow to be shown even if it waits for nothing."""
        most = self._most.get(without(arguments, SHARDING), math.inf)
        last = [] if self._by_memory else self.ordered()[SHOWN - 1 : SHOWN]
        return any(each.fits and each.step is not None and each.step.tokens_per_second > most for each in last)

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
        seen, memory = ["-"] * 4, ["-"] * len(MEMORY)
        if step is not None:
            speed = step.tokens_per_second
            seen = [f"{step.seconds:.3f}", f"{speed:,.0f}", f"{speed / ranks:,.0f}", f"{step.mfu:.1%}"]
            memory = memory_columns(step.peak)
        bound = step.bound if each.fits and step else f"memory: {(each.memory - each.capacity) / GIB:.1f} GiB too much"
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
