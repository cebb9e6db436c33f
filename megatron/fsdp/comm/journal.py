"""A log of the latest operations of this rank, and one report about all ranks when communication fails or hangs.

Every unshard and reduction is numbered when it is issued, and all ranks of a model issue them in the same order. If one
fails, because a rank has died or is late, the first rank that notices collects the logs of all ranks through the store
of the process group. Its report begins with the conclusion, such as the first operation in which ranks differ, and
groups ranks that are at the same position. torch's flight recorder is no alternative: it has no names of units, and
every rank writes a file.

A thread of every rank answers such requests at any time, and watches for long waits. One rank prints a report about a
long wait while it lasts. If ranks have issued different operations, the wait can never end, and the thread makes it
raise an error. With NCCL the host does not wait for collectives, so there is only the report.

Collectives of one size end even if ranks mean different units, and then weights are wrong. A rank that leaves the order
of the first iteration therefore lets all ranks compare their logs. If they differ, the next operation raises an error.
"""

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of, is_communication_error, moves_data, runs_ahead
from megatron.fsdp.comm.hang_report import REMEDY, add_to, describe, one_line
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.comm.rounds import SECONDS_FOR_ANSWERS, Round, reachable_at_end
from megatron.fsdp.comm.streams import (
    CollectiveMismatch,
    Handle,
    at_end,
    error_at_end,
    fail_all_waits,
    ignore_captures,
    raise_if_ranks_disagree,
    watch_end,
)

logger = logging.getLogger(__name__)

MAX_KEPT = 256
# The length of a wait after which the ranks compare their logs, to find out whether the wait can end.
SECONDS_TO_COMPARE = 5.0
SECONDS_TO_REPORT = 60.0
# Environment variable: seconds instead of SECONDS_TO_REPORT; 0 for no report.
REPORT_AFTER = "MEGATRON_FSDP_REPORT_AFTER"

FAILED = "Communication with other ranks has failed."
# Names of rounds: by number, one for the last answers of processes that have ended, and one for the hosts, which every
# rank publishes beforehand: a rank that does not answer is the one to look for.
_PREFIX, _ENDED, _HOSTS = "journal", "journal/ended", "journal/hosts"


class Log:
    """The operations that this process has issued with a set of ranks, in one order for all models of these ranks.

    Args:
        peers: The ranks, including this one.

    Attributes:
        count: Number of operations issued.
        last: Time of the latest operation, in seconds.
        models: Number of models that these ranks have had.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.count = 0
        self.last = time.monotonic()
        self.models = 0
        # With a checksum of all operations before each: it tells whether those that are no longer kept were the same.
        self._issued: deque[tuple[int, str, list[Callable[[], bool]], int]] = deque(maxlen=MAX_KEPT)
        self._checksum = 0

    def add(self, what: str, watchers: list[Callable[[], bool]]) -> None:
        """Record an operation, which has ended when all watchers return True."""
        self._issued.append((self.count, what, watchers, self._checksum))
        self._checksum = add_to(self._checksum, what)
        self.count += 1
        self.last = time.monotonic()

    @contextmanager
    def waiting(self, what: str, failed: str) -> Iterator[None]:
        """Record what the main thread waits for in this context, whose errors begin with the sentence ``failed``."""
        over = threading.Event()
        self.add(what, [over.is_set])
        try:
            with report_on_failure(failed):
                yield
        finally:
            over.set()

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the operations that have not ended. Watchers that have ended are not asked again."""
        found = []
        for number, _, watchers, _ in list(self._issued):
            watchers[:] = [ended for ended in watchers if not ended()]
            if watchers:
                found.append(number)
        return found

    def answer(self) -> dict[str, Any]:
        """The log in the form that is sent to other ranks, in which operations are one text: a rank reads all logs."""
        kept = list(self._issued)
        (first, _, _, before), whats = kept[0] if kept else (0, "", [], 0), [what for _, what, _, _ in kept]
        issued = {"first": first, "before": before, "issued": "\n".join(whats)}
        return {"peers": self.peers, **issued, "open": self.unfinished}


@dataclass
class Channel:
    """Records the operations of one model.

    Attributes:
        log: The log, which all models of the same ranks share.
        model: Prefix that distinguishes models of the same ranks; empty for the first.
        watches: Whether to watch for the end of operations. The watchdog must not query the events of a CUDA graph, nor
            any event while one is captured.
    """

    log: Log
    model: str = ""
    watches: bool = True

    def note(self, what: str, handles: Sequence[Handle]) -> None:
        """Record an operation.

        Args:
            what: Its name, such as ``"unshard blocks.0"``, which must be the same on all ranks of the model.
            handles: Its tasks.

        Raises:
            CollectiveMismatch: The ranks have compared their logs, and they differ.
        """
        raise_if_ranks_disagree()
        self.log.add(self.model + what, [handle.watcher() for handle in handles] if self.watches else [])


class Journal:
    """The logs of this process, by the ranks that it communicates with.

    Attributes:
        query_after: Seconds without a new operation before :meth:`stuck_for` asks whether operations have ended. On a
            GPU this queries events, of which compute under capture in a CUDA graph should see few.
        doubted: Whether the ranks should compare their logs: this one has issued something out of order.
        has_settled: Whether :meth:`settle` has waited for a comparison.
    """

    def __init__(self) -> None:
        self.query_after = 0.0
        self.doubted = self.has_settled = False
        self._logs: dict[tuple[int, ...], Log] = {}
        self._count, self._unfinished, self._since = 0, 0, 0.0

    def channel(self, peers: Sequence[int], watches: bool = True) -> Channel:
        """Create the channel of a new model. All ranks shard their models in the same order, so the numbers agree."""
        log = self._logs.setdefault(tuple(peers), Log(peers))
        log.models += 1
        return Channel(log, f"model {log.models}: " if log.models > 1 else "", watches)

    @contextmanager
    def recorded(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Record a collective that the main thread waits for in this context, if models of these ranks exist.

        Ranks do not issue the collectives of other threads, such as one that saves, in the same order as the others.
        """
        log, is_main = self._logs.get(tuple(peers)), threading.current_thread() is threading.main_thread()
        with log.waiting(what, FAILED) if log is not None and is_main else report_on_failure():
            yield

    def settle(self) -> None:
        """Wait for the first comparison, if this rank has doubts; a thread makes later ones.

        Raises:
            CollectiveMismatch: The logs of the ranks differ.
        """
        if self.doubted and not self.has_settled and _watchdogs:
            self.has_settled = True
            _act_on(_rounds.report())
            raise_if_ranks_disagree()

    def clear(self) -> None:
        """Drop all logs. Numbers start at 0 in the next process group."""
        self._logs.clear()
        self.doubted = self.has_settled = False

    @property
    def count(self) -> int:
        """Number of operations issued."""
        return sum(log.count for log in list(self._logs.values()))

    def stuck_for(self) -> float:
        """Seconds without an operation that was issued or that ended; 0 if all operations have ended."""
        logs, now = list(self._logs.values()), time.monotonic()
        if (count := self.count) != self._count:
            # Query the device only while nothing is issued: compute may be under capture in a CUDA graph.
            self._count, self._unfinished, self._since = count, -1, max((log.last for log in logs), default=now)
            return 0.0
        if now - max((log.last for log in logs), default=now) < self.query_after:
            return 0.0
        unfinished = sum(len(log.unfinished) for log in logs)
        if self._unfinished not in (-1, unfinished):
            self._since = now
        self._unfinished = unfinished
        return now - self._since if unfinished else 0.0

    def as_json(self, ended: str | None = None) -> str:
        """The logs and the position of the main thread, for other ranks.

        Args:
            ended: How this process ends. None: it is running.
        """
        logs = [log.answer() for log in sorted(self._logs.values(), key=lambda log: log.last)]
        return json.dumps({"logs": logs, "at": None if ended else whereabouts(), "ended": ended})


JOURNAL = Journal()


def whereabouts() -> str:
    """The position of the main thread: a line of the user's code, and the function that it has called."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = None
    while frame is not None and _is_library(frame):
        inside, frame = frame, frame.f_back
    if frame is None:
        return "outside the script"
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
def report_on_failure(what: str = FAILED) -> Iterator[None]:
    """Context for waits: communication errors and timeouts are raised with the report about all ranks.

    Args:
        what: The first sentence of the error.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        expected = isinstance(error, TimeoutError) or is_communication_error(error)
        if isinstance(error, CollectiveMismatch) or not expected:
            raise
        report = _rounds.report(lambda text: _print(f"{what}\n{text}"))
        text = f"{what}\n{report.text}\nThe error was: {_without_frames(error)}"
        raise RuntimeError(text) from None


def _without_frames(error: BaseException) -> str:
    """The text of one of torch's errors, without its C++ stack."""
    return str(error).partition("\nException raised from")[0]


class Report(NamedTuple):
    """A report about all ranks.

    Attributes:
        text: The report; or its conclusion, and the rank that has printed it.
        proven: Whether it proves that ranks have issued different operations.
        long_wait: Whether it has been printed because of a long wait.
    """

    text: str
    proven: bool
    long_wait: bool = False


class ReportRounds:
    """Rounds of requests and answers between ranks, through the store of the process group.

    A round begins when a rank requests a report, because it waits or its communication has failed. That rank judges:
    it collects the answers and writes the report, and the others read it.
    """

    def __init__(self) -> None:
        self._number = 0
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Start again with a new process group."""
        self._number = 0

    def report(self, tell: Callable[[str], object] | None = None, long_wait: bool = False) -> Report:
        """Return a report about all ranks.

        Args:
            tell: Prints it if this rank is the one that writes it.
            long_wait: Whether it is about a long wait.
        """
        if not dist.is_initialized():
            return Report("The process group is gone.", False)
        with self._lock:
            try:
                return _read_report(self._join(), tell, long_wait)
            except RuntimeError as error:
                reason = _without_frames(error)
                text = f"Rank 0 holds their positions and cannot be reached ({reason}): it has ended. {REMEDY}"
                if tell is not None and long_wait:
                    tell(text)
                return Report(text, False, long_wait)

    def answer(self) -> Report | None:
        """Answer if a rank has requested a report, and return that report; None if no rank has."""
        if not dist.is_initialized():
            return None
        with self._lock:
            if not Round(f"{_PREFIX}/{self._number}").is_judged:
                return None
            joined = self._join()
        return _read_report(joined)

    def _join(self) -> Round:
        """Answer in this round, and advance to the next one."""
        this, rank = Round(f"{_PREFIX}/{self._number}"), dist.get_rank()
        self._number += 1
        this.publish(rank, JOURNAL.as_json())
        # The store keeps everything in memory. The judge of the round before this one may still read.
        Round(f"{_PREFIX}/{self._number - 3}").withdraw(rank)
        return this

    def leave_last_answer(self) -> None:
        """Store an answer for requests after this process has ended."""
        error = error_at_end()
        with_error = "" if error is None else f" with {type(error).__name__}: {one_line(str(error))[:200]}"
        # Of a store that is gone, torch would log at length.
        if reachable_at_end() or error is not None:
            Round(_ENDED).publish(dist.get_rank(), JOURNAL.as_json(f"it has ended{with_error}"))


_rounds = ReportRounds()


def _read_report(joined: Round, tell: Callable[[str], object] | None = None, long_wait: bool = False) -> Report:
    """The report of a round, which the first rank that requests it writes, and prints before others can read it."""

    def write(end: float) -> str:
        size = dist.get_world_size()
        answers = joined.collect(range(size), end, otherwise=Round(_ENDED))
        hosts = {int(rank): host for rank, host in Round(_HOSTS).collect(range(size), 0.0).items()}
        text, proven = describe({int(rank): json.loads(answer) for rank, answer in answers.items()}, size, hosts)
        printer = -1
        if proven or tell is not None:
            with suppress(OSError, ValueError):  # a closed stderr: all ranks have the text
                (tell or _print)(text)
                printer = dist.get_rank()
        return json.dumps([text, proven, long_wait, printer])

    written = joined.verdict(write)
    if written is None:
        return Report("Another rank was to write the report, but has not done so in time.", False)
    text, proven, long_wait, printer = json.loads(written)
    # Rank 0 has all of it, too: its output may be the only one that is kept.
    if printer >= 0 and dist.get_rank() not in (0, printer):
        text = f"{text.splitlines()[0]}\nThe output of rank {printer} has the positions of all ranks."
    return Report(text, proven, long_wait)


class Watchdog(threading.Thread):
    """A thread that answers requests of other ranks, and reports if this rank's communication is stuck.

    Args:
        journal: The journal of this process.
        seconds: Length of a wait after which it is reported. Infinite: no report.
        on_report: Called with the report, on the rank that writes it. None: print it.
        interval: Seconds between two checks.
        compare_after: Length of a wait after which the ranks compare their logs.
    """

    def __init__(
        self,
        journal: Journal,
        seconds: float,
        on_report: Callable[[str], object] | None = None,
        interval: float = 1.0,
        compare_after: float = SECONDS_TO_COMPARE,
    ) -> None:
        super().__init__(name="megatron-fsdp-watchdog", daemon=True)
        self._journal = journal
        self._seconds = seconds
        self._on_report = on_report or _print
        self._interval = interval
        self._compare_after = compare_after
        # Number of operations issued at the last comparison and at the last report: neither is repeated for one wait.
        self._compared = self._reported = -1
        self._next_doubt = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        """Check at every interval, until the thread is stopped or the store is gone. Log each other error once."""
        logged = set()
        ignore_captures()
        while not self._ended.wait(self._interval):
            try:
                self._check()
            except dist.DistNetworkError:
                return  # rank 0 has ended, and the store with it: no rank can ask or answer any more
            except Exception as error:  # noqa: BLE001 - without this thread, no report and no wait that raises
                text = f"{type(error).__name__}: {_without_frames(error)}"
                # The process group may be destroyed during a check.
                if dist.is_initialized() and text not in logged:
                    logged.add(text)
                    logger.warning("FSDP: the watchdog could not check whether communication is stuck: %s", text)

    def _check(self) -> None:
        count, stuck = self._journal.count, self._journal.stuck_for()
        doubted = self._journal.doubted and time.monotonic() >= self._next_doubt
        if doubted:
            # Other ranks may not have come to what differs: the main thread's first doubt waits for :meth:`settle`.
            self._journal.doubted = not self._journal.has_settled
            self._next_doubt = time.monotonic() + SECONDS_TO_REPORT
        if (report := _rounds.answer()) is None:
            prints = stuck >= self._seconds and self._reported != count
            if not (prints or doubted or (stuck >= self._compare_after and self._compared != count)):
                return
            report, self._compared = _rounds.report(self._tell if prints else None, prints), count
        if report.long_wait:
            self._reported = count  # ranks that wait as well do not print a second report
        _act_on(report)

    def _tell(self, text: str) -> None:
        self._on_report(f"Megatron-FSDP: no communication has ended for {self._seconds:.0f} s.\n{text}")

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self.join(SECONDS_FOR_ANSWERS)


def _act_on(report: Report) -> None:
    if report.proven:
        reason = "The ranks have issued different operations. They would wait forever, or exchange wrong data."
        fail_all_waits(f"{reason}\n{report.text}")


_watchdogs: list[Watchdog] = []


def seconds_to_report() -> float:
    """The length of a wait after which ranks report it; infinite if they never do."""
    given = os.environ.get(REPORT_AFTER) or SECONDS_TO_REPORT
    try:
        return float(given) or float("inf")
    except ValueError:
        raise ValueError(f"{REPORT_AFTER}: expected seconds, or 0 for no report; got {given!r}.") from None


def watch(group: dist.ProcessGroup, device: torch.device, watches: bool = True) -> Channel:
    """Start the watchdog of this process, unless it is running or there are no other ranks to wait for.

    Args:
        group: The ranks that shard a model.
        device: Device of the model's computation.
        watches: See :class:`Channel`.

    Returns:
        The channel that records the model's operations.
    """
    if not _watchdogs and moves_data(group) and dist.get_world_size() > 1:
        seconds = seconds_to_report()
        if backend_of(group, device).ends_process:
            # Early enough for all ranks to answer before the backend ends the first process.
            limit = (timeout_of(group) or timedelta(seconds=600)).total_seconds()
            seconds = min(seconds, max(limit - 6 * SECONDS_FOR_ANSWERS, 0.8 * limit))
        # The host does not wait for a CUDA device, so there is no wait that could raise an error.
        compare_after = float("inf") if runs_ahead(device) else SECONDS_TO_COMPARE
        JOURNAL.query_after = 0.5 * seconds if runs_ahead(device) else 0.0
        _watchdogs.append(Watchdog(JOURNAL, seconds, compare_after=compare_after))
        Round(_HOSTS).publish(dist.get_rank(), socket.gethostname())
        _watchdogs[0].start()
        at_end(stop_watchdog)
        watch_end()
    return JOURNAL.channel(dist.get_process_group_ranks(group), watches)


def stop_watchdog() -> None:
    """Stop the watchdog. Called before the process groups or the process end."""
    if not _watchdogs:
        return
    if dist.is_initialized():
        _rounds.leave_last_answer()
    _watchdogs.pop().stop()
    JOURNAL.clear()
    _rounds.clear()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the process waits, and may be ended
