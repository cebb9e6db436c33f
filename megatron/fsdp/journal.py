"""What this rank communicated last, and one report about all ranks when they stop agreeing.

Every gather and reduction is numbered when it is issued; all ranks of a model issue the same ones in the same order.
When one of them fails, because a rank died or did not come in time, the rank that notices first asks the others for
theirs, through the store of the process group, and adds to its error where they differ.

With NCCL nothing fails on the host, which issues work for the device and goes on until it needs a result: there, a
:class:`Watchdog` reports before NCCL ends the process.
"""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.fsdp.device import Handle

KEPT = 256
# How long others have to answer. They notice a lost rank at the same time, or are in the middle of their compute.
SECONDS_FOR_ANSWERS = 10.0

_PREFIX = "megatron_fsdp/journal"


@dataclass
class Journal:
    """The communication of this process, newest last.

    Attributes:
        peers: Ranks that issue the same. Those of other pipeline stages issue other things.
    """

    _kept: deque[tuple[int, str, list[Callable[[], Handle | None]]]] = field(default_factory=lambda: deque(maxlen=KEPT))
    _count: int = 0
    _last: float = field(default_factory=time.monotonic)
    peers: list[int] = field(default_factory=list)

    def note(self, what: str, handles: list[Handle]) -> None:
        """Remember what was issued.

        Args:
            what: Such as ``"gather blocks.0"``; the same on all ranks.
            handles: The tasks that do it.
        """
        self._kept.append((self._count, what, [handle.reference() for handle in handles]))
        self._count += 1
        self._last = time.monotonic()

    @property
    def count(self) -> int:
        """How much was issued."""
        return self._count

    def is_stuck(self, seconds: float) -> bool:
        """Whether nothing has been issued for so long, though something that was has not ended."""
        if time.monotonic() - self._last < seconds or not self._kept:
            return False
        return not all(_has_ended(handle) for handle in self._kept[-1][2])

    def as_json(self) -> str:
        """What was issued, and what of that has not ended."""
        kept = list(self._kept)
        issued = {number: what for number, what, _ in kept}
        unfinished = [number for number, _, handles in kept if not all(_has_ended(handle) for handle in handles)]
        return json.dumps({"issued": issued, "open": unfinished, "peers": self.peers})


def _has_ended(reference: Callable[[], Handle | None]) -> bool:
    handle = reference()
    return handle is None or handle.ended


JOURNAL = Journal()


@contextmanager
def explaining() -> Iterator[None]:
    """Context for waits: an error of the communication is raised with the report of all ranks."""
    try:
        yield
    except RuntimeError as error:
        if _is_of_communication(error) and not getattr(error, "__notes__", None):
            error.add_note(report())
        raise


def _is_of_communication(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Watchdog(threading.Thread):
    """Prints the report when this rank's communication is stuck, which NCCL would only end with its own message.

    It asks the device nothing as long as something is issued now and then.

    Args:
        journal: Of this process.
        seconds: How long nothing must have been issued.
        tell: Is given the report.
        look_every: Seconds.
    """

    def __init__(
        self, journal: Journal, seconds: float, tell: Callable[[str], object] | None = None, look_every: float = 5.0
    ) -> None:
        super().__init__(name="megatron-fsdp-watchdog", daemon=True)
        self._journal = journal
        self._seconds = seconds
        self._tell = tell or _print
        self._look_every = look_every
        self._ended = threading.Event()

    def run(self) -> None:
        """Look, until there is something to report or the thread is told to stop; once for every time it is stuck."""
        told = -1
        while not self._ended.wait(self._look_every):
            if self._journal.count != told and self._journal.is_stuck(self._seconds):
                told = self._journal.count
                self._tell(f"Megatron-FSDP: nothing has ended for {self._seconds:.0f} s.\n{report()}")

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()


_watchdogs: list[Watchdog] = []


def watch(group: dist.ProcessGroup) -> None:
    """Start the watchdog of this process, if the group's collectives end without the host noticing."""
    if _watchdogs or "nccl" not in dist.get_backend(group):
        return
    options = getattr(group._get_backend(torch.device("cuda")), "options", None)
    timeout = getattr(options, "_timeout", None)
    seconds = timeout.total_seconds() if timeout is not None else 600.0
    # Early enough for all ranks to answer before NCCL ends the first.
    _watchdogs.append(Watchdog(JOURNAL, max(seconds - 3 * SECONDS_FOR_ANSWERS, 0.8 * seconds)))
    _watchdogs[0].start()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the process is about to be ended


def report() -> str:
    """What every rank has issued last, and where they first differ; for the first rank that asks."""
    if not dist.is_initialized():
        return "The process group is gone."
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_PREFIX}/{rank}", JOURNAL.as_json())
        if store.add(f"{_PREFIX}/reports", 1) > 1:
            return "Another rank reports what each of them was doing."
        answers = _answers(store, size)
    except RuntimeError as error:
        return f"Ranks cannot be asked what they were doing: {error}"
    return "\n".join(describe(answers, size))


def _answers(store: dist.Store, size: int) -> dict[int, dict]:
    found: dict[int, dict] = {}
    end = time.monotonic() + SECONDS_FOR_ANSWERS
    while len(found) < size and time.monotonic() < end:
        for rank in set(range(size)) - set(found):
            key = f"{_PREFIX}/{rank}"
            if store.check([key]):
                found[rank] = json.loads(store.get(key))
        time.sleep(0.05)
    return found


def describe(answers: dict[int, dict], size: int) -> list[str]:
    """The report.

    Args:
        answers: What each rank that answered had issued and what of that was open, as :meth:`Journal.as_json` has it.
        size: Number of ranks.
    """
    issued = {rank: {int(n): what for n, what in answer["issued"].items()} for rank, answer in answers.items()}
    lines = ["What the ranks had communicated:"]
    for rank in range(size):
        if rank not in issued:
            lines.append(f"  rank {rank}: no answer; it has ended, or computes")
            continue
        last = max(issued[rank], default=None)
        text = "nothing" if last is None else f"{issued[rank][last]} (number {last})"
        waits = [issued[rank][n] for n in answers[rank]["open"] if n in issued[rank]]
        lines.append(f"  rank {rank}: last issued {text}" + (f"; not ended: {', '.join(waits[:4])}" if waits else ""))
    return [*lines, _first_difference(answers, issued)]


def _first_difference(answers: dict[int, dict], issued: dict[int, dict[int, str]]) -> str:
    """Where ranks that should issue the same did not."""
    for peers in {tuple(answer["peers"]) for answer in answers.values()}:
        present = [rank for rank in peers if rank in issued]
        for number in sorted(set.intersection(*(set(issued[rank]) for rank in present))) if present else []:
            whats = {rank: issued[rank][number] for rank in present}
            if len(set(whats.values())) > 1:
                different = ", ".join(f"rank {rank}: {what}" for rank, what in whats.items())
                return f"They first differ at number {number}: {different}"
    return "As far as they went, they issued the same."
