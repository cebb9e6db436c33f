"""What this rank communicated last, and one report about all ranks when they stop agreeing.

Every gather and reduction is numbered when it is issued; all ranks of a model issue the same ones in the same order.
When one of them fails, because a rank died or did not come in time, the rank that notices first asks the others for
theirs, through the store of the process group, and its error begins with where they are and where they differ.

A thread of every rank answers, wherever its rank is, and watches what its rank waits for. A wait that takes long is
reported while it goes on. If ranks have issued different things, it will never end: then it raises at once. With NCCL,
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
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of, is_communication_error, moves_data, runs_ahead
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.comm.streams import Disagreement, Handle, at_end, error_at_end, give_up, watch_end

MAX_KEPT = 256
# How long others have to answer. Their threads do it, unless their process is gone or does not let Python run.
SECONDS_FOR_ANSWERS = 5.0
# After how long a rank finds out whether it waits in vain.
SECONDS_TO_DOUBT = 5.0
SECONDS_TO_REPORT = 60.0
# Environment variable: seconds instead of SECONDS_TO_REPORT; 0 for no report.
REPORT_AFTER = "MEGATRON_FSDP_REPORT_AFTER"

_PREFIX = "journal"
_REMEDY = (
    "Every rank must run the same forwards, backwards and steps: also in evaluation, when it saves, after an exception "
    "that it catches, and when its data end."
)


class Channel:
    """What this process has issued together with some other ranks, newest last.

    Args:
        peers: The ranks that issue the same, this one among them.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.count = 0
        self.last = time.monotonic()
        self._issued: deque[tuple[int, str, list[Callable[[], bool]]]] = deque(maxlen=MAX_KEPT)

    def note(self, what: str, handles: Sequence[Handle]) -> None:
        """Remember what was issued.

        Args:
            what: Such as ``"gather blocks.0"``; the same on all peers.
            handles: The tasks that do it.
        """
        self._issued.append((self.count, what, [handle.watcher() for handle in handles]))
        self.count += 1
        self.last = time.monotonic()

    @property
    def unfinished(self) -> int:
        """How much of what was issued has not ended."""
        return sum(not all(ended() for ended in watchers) for _, _, watchers in list(self._issued))

    def answer(self) -> dict[str, Any]:
        """What was issued, and what of that has not ended."""
        kept = list(self._issued)
        unfinished = [number for number, _, watchers in kept if not all(ended() for ended in watchers)]
        return {"peers": self.peers, "issued": {n: what for n, what, _ in kept}, "open": unfinished, "at": self.last}


class Journal:
    """The communication of this process, by the ranks that take part in it."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._seen = (0, 0)
        self._since = 0.0

    def channel(self, peers: Sequence[int]) -> Channel:
        """That of these ranks."""
        return self._channels.setdefault(tuple(peers), Channel(peers))

    def clear(self) -> None:
        """Forget everything: numbers begin anew with the next process group."""
        self._channels.clear()

    @property
    def count(self) -> int:
        """How much was issued."""
        return sum(channel.count for channel in list(self._channels.values()))

    def is_stuck(self, seconds: float) -> bool:
        """Whether nothing has been issued for so long, or ended since that was noticed, though not all has ended."""
        channels = list(self._channels.values())
        last = max((channel.last for channel in channels), default=0.0)
        if time.monotonic() - last < seconds:
            return False
        unfinished = sum(channel.unfinished for channel in channels)
        if (seen := (self.count, unfinished)) != self._seen:
            self._since = last if seen[0] != self._seen[0] else time.monotonic()
            self._seen = seen
        return unfinished > 0 and time.monotonic() - self._since >= seconds

    def as_json(self, ended: str | None = None) -> str:
        """What was issued, what of that has not ended, and where the main thread is.

        Args:
            ended: How this process has ended, if it has.
        """
        channels = sorted((channel.answer() for channel in list(self._channels.values())), key=lambda c: c.pop("at"))
        return json.dumps({"channels": channels, "at": None if ended else whereabouts(), "ended": ended})


JOURNAL = Journal()


def whereabouts() -> str:
    """Where the main thread of this process is: the line of the user's code, and what it has called there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = None
    while frame is not None and _is_library(frame):
        inside, frame = frame, frame.f_back
    if frame is None:
        return "outside of the script"
    code = frame.f_code
    called = "" if inside is None else f", which has called {inside.f_code.co_name}"
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}{called}"


_LIBRARIES = ("<", *(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__)))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)


@contextmanager
def report_on_failure() -> Iterator[None]:
    """Context for waits: an error of the communication is raised with the report of all ranks before its own text."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_communication(error):
            raise
        own = _without_frames(error)
        text = f"Communication with other ranks has failed.\n{_desk.report()[0]}\nThe error was: {own}"
        raise RuntimeError(text) from None


@contextmanager
def explaining_absence(what: str) -> Iterator[None]:
    """Context for waits that end with a TimeoutError: raises a RuntimeError that says ``what``, and who is where."""
    try:
        yield
    except TimeoutError as error:
        raise RuntimeError(f"{what} {_desk.report()[0]}\nThe error was: {error}") from None


def _without_frames(error: RuntimeError) -> str:
    """What an error of torch's says, without the frames of its C++ code."""
    return str(error).partition("\nException raised from")[0]


def _is_of_communication(error: RuntimeError) -> bool:
    if isinstance(error, Disagreement):
        return False
    return is_communication_error(error)


class ReportDesk:
    """Rounds of questions and answers between ranks, through the store of the process group.

    A round begins when a rank that waits, or whose communication has failed, asks for a report. The first to ask
    collects the answers and writes the report; others get it from there.
    """

    def __init__(self) -> None:
        self._round = 0
        self._lock = threading.RLock()

    def clear(self) -> None:
        """A new process group begins."""
        self._round = 0

    def report(self) -> tuple[str, bool]:
        """What every rank has issued last, where it is, and where they first differ; whether they do."""
        if not dist.is_initialized():
            return "The process group is gone.", False
        with self._lock:
            try:
                return self._report(*_store())
            except RuntimeError as error:
                reason = _without_frames(error)
                return f"Other ranks cannot be asked where they are; maybe rank 0 has ended ({reason}).", False

    def _report(self, store: dist.Store, rank: int, size: int) -> tuple[str, bool]:
        here, self._round = f"{_PREFIX}/{self._round}", self._round + 1
        store.set(f"{here}/{rank}", JOURNAL.as_json())
        if store.add(f"{here}/asked", 1) > 1:
            return _written(store, here)
        answers = _answers(store, here, size)
        text, proven = "\n".join(describe(answers, size)), _difference(answers) is not None
        store.set(f"{here}/report", json.dumps([text, proven]))
        return text, proven

    def answer(self) -> tuple[str, bool] | None:
        """Answer if a rank has asked, and wait for the report; None if nobody has."""
        if not dist.is_initialized():
            return None
        with self._lock:
            store, rank, _ = _store()
            here = f"{_PREFIX}/{self._round}"
            if not store.check([f"{here}/asked"]):
                return None
            self._round += 1
            store.set(f"{here}/{rank}", JOURNAL.as_json())
        return _written(store, here)

    def say_goodbye(self) -> None:
        """Leave what is to be known about this process when it has ended."""
        store, rank, _ = _store()
        error = error_at_end()
        how = "it has ended" if error is None else f"it has ended with {type(error).__name__}: {str(error)[:200]}"
        # A store that another rank's process holds may be gone, and torch says so at length.
        if rank == 0 or error is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store.set(f"{_PREFIX}/ended/{rank}", JOURNAL.as_json(how))


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


def _store() -> tuple[dist.Store, int, int]:
    return open_store(), dist.get_rank(), dist.get_world_size()


def _written(store: dist.Store, here: str) -> tuple[str, bool]:
    """The report that another rank writes."""
    end = time.monotonic() + SECONDS_FOR_ANSWERS + 2.0
    while not store.check([f"{here}/report"]):
        if time.monotonic() > end:
            return "Another rank has been asked for a report, and has not given it.", False
        time.sleep(0.1)
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


def describe(answers: dict[int, dict], size: int) -> list[str]:
    """The report.

    Args:
        answers: What each rank that answered had issued and what of that was open, as :meth:`Journal.as_json` has it.
        size: Number of ranks.
    """
    lines = ["Where the ranks are:"]
    for rank in range(size):
        answer = answers.get(rank)
        if answer is None:
            lines.append(f"  rank {rank}: no answer; it has ended, or computes")
            continue
        place = answer["ended"] or f"at {answer['at']}"
        if not answer["channels"]:
            lines.append(f"  rank {rank}: {place}; issued nothing")
            continue
        channel = next((c for c in answer["channels"] if c["open"]), answer["channels"][-1])
        issued = {int(number): what for number, what in channel["issued"].items()}
        last = max(issued, default=None)
        text = "issued nothing" if last is None else f"last issued {issued[last]} (number {last})"
        waits = [issued[n] for n in channel["open"] if n in issued]
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        lines.append(
            f"  rank {rank}: {text}; {place}" + (f"; waits for: {'; '.join(waits[:4])}{more}" if waits else "")
        )
    return [*lines, _difference(answers) or _progress(answers)]


def _by_peers(answers: dict[int, dict]) -> dict[tuple[int, ...], dict[int, dict[int, str]]]:
    """For ranks that issue the same: what each of them has issued, by its number."""
    found: dict[tuple[int, ...], dict[int, dict[int, str]]] = {}
    for rank, answer in sorted(answers.items()):
        for channel in answer["channels"]:
            issued = {int(number): what for number, what in channel["issued"].items()}
            found.setdefault(tuple(channel["peers"]), {})[rank] = issued
    return found


def _difference(answers: dict[int, dict]) -> str | None:
    """Where ranks that should issue the same did not; None if they did as far as they went."""
    for issued in _by_peers(answers).values():
        for number in sorted(set.intersection(*(set(numbers) for numbers in issued.values()))):
            whats: dict[str, list[int]] = {}
            for rank, numbers in issued.items():
                whats.setdefault(numbers[number], []).append(rank)
            if len(whats) > 1:
                different = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in whats.items())
                return f"They first differ at number {number}: {different}. {_REMEDY}"
    return None


def _progress(answers: dict[int, dict]) -> str:
    for issued in _by_peers(answers).values():
        reached = {rank: max(numbers, default=-1) for rank, numbers in issued.items()}
        behind = [rank for rank in reached if reached[rank] < max(reached.values())]
        if behind:
            return f"As far as they went, they issued the same; {name_ranks(behind)} went less far. {_REMEDY}"
    return "As far as they went, they issued the same."


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as ``"rank 3"`` or ``"ranks 0-2, 7"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Watchdog(threading.Thread):
    """Answers other ranks, and says when this rank's communication is stuck.

    It asks the device nothing as long as something is issued now and then.

    Args:
        journal: Of this process.
        seconds: How long nothing must have been issued; infinite for no report.
        tell: Is given the report, on the rank that writes it.
        look_every: Seconds.
        doubt_after: Seconds after which it is found out whether the wait can end.
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
        self._doubted = self._told = -1
        self._ended = threading.Event()

    def run(self) -> None:
        """Look, until the thread is told to stop or there is no store any more."""
        while not self._ended.wait(self._look_every):
            try:
                self._look()
            except RuntimeError:
                return

    def _look(self) -> None:
        count = self._journal.count
        if (written := _desk.answer()) is not None:
            self._judge(*written)
        elif self._told != count and self._journal.is_stuck(self._seconds):
            self._told = count
            text, proven = _desk.report()
            self._tell(f"Megatron-FSDP: nothing has ended for {self._seconds:.0f} s.\n{text}")
            self._judge(text, proven)
        elif self._doubted != count and self._journal.is_stuck(self._doubt_after):
            self._doubted = count
            self._judge(*_desk.report())

    def _judge(self, text: str, proven: bool) -> None:
        """End the wait of this rank if it is in vain."""
        if proven and self._journal.is_stuck(0.5 * self._doubt_after):
            give_up(f"The ranks do different things, and would wait for each other for ever.\n{text}")

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join(SECONDS_FOR_ANSWERS)


_watchdogs: list[Watchdog] = []


def watch(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """Start the watchdog of this process, unless there is one or nobody to wait for.

    Args:
        group: Ranks that share a model.
        device: Where it computes.

    Returns:
        What is issued together with the ranks of the group.
    """
    if not _watchdogs and moves_data(group) and dist.get_world_size() > 1:
        seconds = float(os.environ.get(REPORT_AFTER, SECONDS_TO_REPORT)) or float("inf")
        timeout = timeout_of(group) or timedelta(seconds=600)
        if backend_of(group, device).ends_process:
            # Early enough for all ranks to answer before NCCL ends the first.
            limit = timeout.total_seconds()
            seconds = min(seconds, max(limit - 6 * SECONDS_FOR_ANSWERS, 0.8 * limit))
        # The host does not wait for a CUDA device, and cannot be told to stop.
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
