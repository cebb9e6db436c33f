"""A record of what this rank communicated last, and one report about all ranks when they stop agreeing.

Every unshard and reduction is numbered when it is issued, and all ranks of a model issue the same ones in the same
order. When one of them fails, because a rank died or did not come in time, the first rank that notices collects the
records of the others through the store of the process group. Its error begins with where they are and where they
first differ. torch's flight recorder does not do this: it has no names of units, and every rank writes a file.

A thread of every rank answers such a request, whatever its rank does, and watches for waits. A long wait is reported
while it goes on. If ranks have issued different things, it can never end, so it raises an error at once. With NCCL,
where the host goes on until it needs a result, there is only the report.
"""

import json
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of, is_communication_error, moves_data, runs_ahead
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.comm.streams import Disagreement, Handle, at_end, error_at_end, give_up, watch_end

MAX_KEPT = 256
# How long ranks have to answer. Their threads do it, unless their process has ended or runs no Python.
SECONDS_FOR_ANSWERS = 5.0
# How long a rank waits before it finds out whether the wait can end.
SECONDS_TO_DOUBT = 5.0
SECONDS_TO_REPORT = 60.0
# Environment variable: seconds instead of SECONDS_TO_REPORT; 0 for no report.
REPORT_AFTER = "MEGATRON_FSDP_REPORT_AFTER"

_PREFIX = "journal"
_REMEDY = (
    "Every rank must run the same forwards, backwards and steps: also in evaluation, when it saves, after an exception "
    "that it catches, and when its data end."
)


class Log:
    """The operations that this process has issued together with certain ranks, in one order for all their models.

    Args:
        peers: The ranks, this one among them.

    Attributes:
        count: How much was issued.
        last: When something was issued last, in seconds.
        models: How many models these ranks have had.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.count = 0
        self.last = time.monotonic()
        self.models = 0
        self._issued: deque[tuple[int, str, list[Callable[[], bool]]]] = deque(maxlen=MAX_KEPT)

    def add(self, what: str, handles: Sequence[Handle]) -> None:
        """Record what was issued."""
        self._issued.append((self.count, what, [handle.watcher() for handle in handles]))
        self.count += 1
        self.last = time.monotonic()

    @property
    def unfinished(self) -> list[int]:
        """Numbers of what has not ended."""
        return [number for number, _, watchers in list(self._issued) if not all(ended() for ended in watchers)]

    def answer(self) -> dict[str, Any]:
        """The log as other ranks read it."""
        issued = [(number, what) for number, what, _ in list(self._issued)]
        return {"peers": self.peers, "issued": issued, "open": self.unfinished}


@dataclass
class Channel:
    """Records what one model issues.

    Attributes:
        log: The record, which other models of the same ranks share.
        model: Prefix that distinguishes models of the same ranks; empty for the first.
    """

    log: Log
    model: str = ""

    def note(self, what: str, handles: Sequence[Handle]) -> None:
        """Record what was issued.

        Args:
            what: Such as ``"unshard blocks.0"``; the same on all ranks of the model.
            handles: The tasks that do it.
        """
        self.log.add(self.model + what, handles)


class Journal:
    """The logs of this process, by the ranks that it communicates with."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, ...], Log] = {}
        self._count, self._unfinished, self._since = 0, 0, 0.0

    def channel(self, peers: Sequence[int]) -> Channel:
        """The channel of a new model. All ranks make their models in the same order, and so number them alike."""
        log = self._logs.setdefault(tuple(peers), Log(peers))
        log.models += 1
        return Channel(log, f"model {log.models}: " if log.models > 1 else "")

    def clear(self) -> None:
        """Forget everything: numbers begin anew with the next process group."""
        self._logs.clear()

    @property
    def count(self) -> int:
        """How much was issued."""
        return sum(log.count for log in list(self._logs.values()))

    def stuck_for(self) -> float:
        """Seconds for which nothing was issued and nothing was seen to end; 0 if everything has ended."""
        logs, now = list(self._logs.values()), time.monotonic()
        if (count := self.count) != self._count:
            # The device is asked only when nothing is issued: the compute may be captured in a CUDA graph.
            self._count, self._unfinished, self._since = count, -1, max((log.last for log in logs), default=now)
            return 0.0
        unfinished = sum(len(log.unfinished) for log in logs)
        if self._unfinished not in (-1, unfinished):
            self._since = now
        self._unfinished = unfinished
        return now - self._since if unfinished else 0.0

    def as_json(self, ended: str | None = None) -> str:
        """The logs, and where the main thread is, for other ranks.

        Args:
            ended: How this process has ended, if it has.
        """
        logs = [log.answer() for log in sorted(self._logs.values(), key=lambda log: log.last)]
        return json.dumps({"logs": logs, "at": None if ended else whereabouts(), "ended": ended})


JOURNAL = Journal()


def whereabouts() -> str:
    """Where the main thread of this process is: a line of the user's code, and the function that it has called."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = None
    while frame is not None and _is_library(frame):
        inside, frame = frame, frame.f_back
    if frame is None:
        return "outside of the script"
    code = frame.f_code
    called = "" if inside is None else f", which has called {inside.f_code.co_name}"
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}{called}"


# Frames of generated code, of this engine and of torch.
_LIBRARIES = ("<", *(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)


@contextmanager
def report_on_failure(what: str = "Communication with other ranks has failed.") -> Iterator[None]:
    """Context for waits: an error of the communication, or that time is over, is raised with the report of all ranks.

    Args:
        what: The first sentence of that error.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        expected = isinstance(error, TimeoutError) or is_communication_error(error)
        if isinstance(error, Disagreement) or not expected:
            raise
        text = f"{what}\n{_desk.report()[0]}\nThe error was: {_without_frames(error)}"
        raise RuntimeError(text) from None


def _without_frames(error: BaseException) -> str:
    """The text of an error of torch's, without the frames of its C++ code."""
    return str(error).partition("\nException raised from")[0]


class ReportDesk:
    """Rounds of requests and answers between ranks, through the store of the process group.

    A round begins when a rank that waits, or whose communication has failed, requests a report. The first of these
    ranks collects the answers and writes the report; the others read it.
    """

    def __init__(self) -> None:
        self._round = 0
        self._lock = threading.RLock()

    def clear(self) -> None:
        """A new process group begins."""
        self._round = 0

    def report(self) -> tuple[str, bool]:
        """The text of a report about all ranks, and whether they are proven to have issued different things."""
        if not dist.is_initialized():
            return "The process group is gone.", False
        with self._lock:
            try:
                store = open_store()
                here = self._join(store)
                if store.add(f"{here}/asked", 1) > 1:
                    return _written(store, here)
                answers = _answers(store, here, dist.get_world_size())
                text, proven = describe(answers, dist.get_world_size())
                store.set(f"{here}/report", json.dumps([text, proven]))
                return text, proven
            except RuntimeError as error:
                reason = _without_frames(error)
                return f"Other ranks cannot be asked where they are; maybe rank 0 has ended ({reason}).", False

    def answer(self) -> tuple[str, bool] | None:
        """Answer if a rank has requested a report, and wait for the report; None if none has."""
        if not dist.is_initialized():
            return None
        with self._lock:
            store = open_store()
            if not store.check([f"{_PREFIX}/{self._round}/asked"]):
                return None
            here = self._join(store)
        return _written(store, here)

    def _join(self, store: dist.Store) -> str:
        """Answer in this round, and go on to the next; returns where the round's keys are."""
        here = f"{_PREFIX}/{self._round}"
        self._round += 1
        store.set(f"{here}/{dist.get_rank()}", JOURNAL.as_json())
        return here

    def say_goodbye(self) -> None:
        """Leave an answer for the time after this process has ended."""
        rank, error = dist.get_rank(), error_at_end()
        how = "it has ended" if error is None else f"it has ended with {type(error).__name__}: {str(error)[:200]}"
        # A store that another rank's process holds may be gone, and torch says so at length.
        if rank == 0 or error is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            open_store().set(f"{_PREFIX}/ended/{rank}", JOURNAL.as_json(how))


_desk = ReportDesk()


# The store of the process group that there is now.
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()


def open_store() -> dist.Store:
    """The store of the default process group, for this engine's own keys, which begin anew with each such group."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("The process group is gone.")
    if world not in _stores:
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"megatron_fsdp/groups/{dist.get_rank()}", 1)
        _stores[world] = dist.PrefixStore(f"megatron_fsdp/{number}", store)
    return _stores[world]


def wait_for_key(store: dist.Store, key: str, end: float) -> bool:
    """Wait until a key is in the store, or until ``end``; whether it is. Does not block other users of the store."""
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _written(store: dist.Store, here: str) -> tuple[str, bool]:
    """The report that another rank writes."""
    if not wait_for_key(store, f"{here}/report", time.monotonic() + SECONDS_FOR_ANSWERS + 2.0):
        return "Another rank has been asked for a report, and has not given it.", False
    text, proven = json.loads(store.get(f"{here}/report"))
    return text, proven


def _answers(store: dist.Store, here: str, size: int) -> dict[int, dict]:
    found: dict[int, dict] = {}
    end = time.monotonic() + SECONDS_FOR_ANSWERS
    while len(found) < size and time.monotonic() < end:
        for rank in set(range(size)) - set(found):
            for key in (f"{here}/{rank}", f"{_PREFIX}/ended/{rank}"):
                if rank not in found and store.check([key]):
                    found[rank] = json.loads(store.get(key))
        time.sleep(0.05)
    return found


def describe(answers: dict[int, dict], size: int) -> tuple[str, bool]:
    """The report, and whether the ranks are proven to have issued different things.

    Args:
        answers: By rank, the answers as :meth:`Journal.as_json` returns them. Some may be missing.
        size: Number of ranks.
    """
    lines = ["Where the ranks are:"]
    for rank in range(size):
        text = _describe_rank(answers[rank]) if rank in answers else "no answer; it has ended, or computes"
        lines.append(f"  rank {rank}: {text}")
    conclusion, proven = _compare(answers)
    return "\n".join([*lines, conclusion]), proven


def _describe_rank(answer: dict) -> str:
    place = answer["ended"] or f"at {answer['at']}"
    log = next((log for log in answer["logs"] if log["open"]), answer["logs"][-1] if answer["logs"] else None)
    if log is None or not log["issued"]:
        return f"{place}; issued nothing"
    issued = dict(log["issued"])
    waits = [issued[number] for number in log["open"] if number in issued]
    more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
    waiting = f"; waits for: {'; '.join(waits[:4])}{more}" if waits else ""
    last = max(issued)
    return f"last issued {issued[last]} (number {last}); {place}{waiting}"


def _compare(answers: dict[int, dict]) -> tuple[str, bool]:
    """Where ranks that should issue the same first differ, or which of them are behind; whether they differ."""
    logs: dict[tuple[int, ...], dict[int, dict[int, str]]] = {}
    for rank, answer in sorted(answers.items()):
        for log in answer["logs"]:
            logs.setdefault(tuple(log["peers"]), {})[rank] = dict(log["issued"])
    for of_rank in logs.values():
        for number in sorted(set.intersection(*map(set, of_rank.values()))):
            whats: dict[str, list[int]] = {}
            for rank, issued in of_rank.items():
                whats.setdefault(issued[number], []).append(rank)
            if len(whats) > 1:
                different = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in whats.items())
                return f"They first differ at number {number}: {different}. {_REMEDY}", True
    for of_rank in logs.values():
        reached = {rank: max(issued, default=-1) for rank, issued in of_rank.items()}
        if behind := [rank for rank, number in reached.items() if number < max(reached.values())]:
            return f"As far as they went, they issued the same; {name_ranks(behind)} went less far. {_REMEDY}", False
    return "As far as they went, they issued the same.", False


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as ``"rank 3"`` or ``"ranks 0-2, 7"``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Watchdog(threading.Thread):
    """Answers requests of other ranks, and reports when this rank's communication is stuck.

    Args:
        journal: Of this process.
        seconds: How long it must be stuck; infinite for no report.
        tell: Is given the report, on the rank that writes it.
        look_every: Seconds.
        doubt_after: Seconds after which the ranks find out whether the wait can end.
    """

    def __init__(
        self,
        journal: Journal,
        seconds: float,
        tell: Callable[[str], object] | None = None,
        look_every: float = 2.0,
        doubt_after: float = SECONDS_TO_DOUBT,
    ) -> None:
        super().__init__(name="megatron-fsdp-watchdog", daemon=True)
        self._journal = journal
        self._seconds = seconds
        self._tell = tell or _print
        self._look_every = look_every
        self._doubt_after = doubt_after
        # How much had been issued when the ranks were last asked, and when a report was last given.
        self._doubted = self._told = -1
        self._ended = threading.Event()

    def run(self) -> None:
        """Look, until the thread is stopped or the store is gone."""
        while not self._ended.wait(self._look_every):
            try:
                self._look()
            except RuntimeError:
                return

    def _look(self) -> None:
        count, stuck = self._journal.count, self._journal.stuck_for()
        if (written := _desk.answer()) is None:
            tells = stuck >= self._seconds and self._told != count
            if not tells and not (stuck >= self._doubt_after and self._doubted != count):
                return
            written, self._doubted = _desk.report(), count
            if tells:
                self._told = count
                self._tell(f"Megatron-FSDP: nothing has ended for {self._seconds:.0f} s.\n{written[0]}")
        text, proven = written
        if proven and self._journal.stuck_for() >= 0.5 * self._doubt_after:
            give_up(f"The ranks do different things, and would wait for each other without end.\n{text}")

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join(SECONDS_FOR_ANSWERS)


_watchdogs: list[Watchdog] = []


def watch(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """Start the watchdog of this process, unless there is one or nothing to wait for.

    Args:
        group: Ranks that shard a model.
        device: Where it computes.

    Returns:
        Where to record what the model issues.
    """
    if not _watchdogs and moves_data(group) and dist.get_world_size() > 1:
        seconds = float(os.environ.get(REPORT_AFTER, SECONDS_TO_REPORT)) or float("inf")
        if backend_of(group, device).ends_process:
            # Early enough for all ranks to answer before the backend ends the first.
            limit = (timeout_of(group) or timedelta(seconds=600)).total_seconds()
            seconds = min(seconds, max(limit - 6 * SECONDS_FOR_ANSWERS, 0.8 * limit))
        # The host does not wait for a CUDA device, so there is no wait that could be ended.
        doubt_after = float("inf") if runs_ahead(device) else SECONDS_TO_DOUBT
        _watchdogs.append(Watchdog(JOURNAL, seconds, doubt_after=doubt_after))
        _watchdogs[0].start()
        at_end(end)
        watch_end()
    return JOURNAL.channel(dist.get_process_group_ranks(group))


def end() -> None:
    """The process groups, or the process, are about to end."""
    if not _watchdogs:
        return
    if dist.is_initialized():
        _desk.say_goodbye()
    _watchdogs.pop().stop()
    JOURNAL.clear()
    _desk.clear()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the process waits, and may be ended
