"""The running peers of a comparison: all are started first, then their losses are compared, then they are timed."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import agreement, original_package, quiet
from benchmarks.job import Job
from benchmarks.options import CORES, Options
from benchmarks.peers import PEERS
from benchmarks.quiet import Quiet
from benchmarks.rounds import RESTARTS, Contestant, Rounds, Sample, measure
from benchmarks.training import PARTS
from benchmarks.workers import Ranks, WorkerFailure

PARITY_STEPS = 4


class Training:
    """Turns of a peer that consist of training steps, timed by the slowest rank.

    Args:
        ranks: The peer's processes.
        tokens: Tokens per rank and step.
        steps: Steps per turn.
    """

    def __init__(self, ranks: Ranks, tokens: int, steps: int) -> None:
        self._ranks = ranks
        self._tokens = tokens
        self._steps = steps

    def turn(self) -> Sample:
        """Milliseconds per step and for each of its parts."""
        answers = self._ranks.call("benchmarks.training:turn", tokens=self._tokens, steps=self._steps)
        return slowest(answers)

    def restart(self) -> None:
        """Start the processes again."""
        self._ranks.launch()


def slowest(answers: Sequence[dict[str, list[float]]]) -> Sample:
    """Milliseconds per step: the mean over the steps of the slowest rank's time.

    ``compute`` is forward plus backward, during which a schedule can hide communication.
    """
    sample = {}
    for quantity in (*PARTS, "step"):
        steps = [max(times) for times in zip(*(answer[quantity] for answer in answers), strict=True)]
        sample[quantity] = 1e3 * sum(steps) / len(steps)
    both = [[f + b for f, b in zip(answer["forward"], answer["backward"], strict=True)] for answer in answers]
    together = [max(times) for times in zip(*both, strict=True)]
    sample["compute"] = 1e3 * sum(together) / len(together)
    return sample


class Field:
    """The peers of one comparison.

    Args:
        jobs: One job per peer.
        options: Options of the run.
        make: Creates the rank processes of a job.
    """

    def __init__(self, jobs: Sequence[Job], options: Options, make: Callable[[Job], Ranks] = Ranks) -> None:
        self._options = options
        self.ranks: dict[str, Ranks] = {job.peer: make(job) for job in jobs}
        self.missing: dict[str, str] = {}

    def launch(self) -> None:
        """Start all processes. Peers that fail to start are recorded in ``missing``."""
        processes = max((1 if r.job.fake else r.job.ranks for r in self.ranks.values()), default=1)
        with ThreadPoolExecutor(max(1, CORES // processes)) as pool:
            for peer, reason in zip(self.ranks, pool.map(self._launch, self.ranks.values()), strict=True):
                if reason is not None:
                    self.missing[peer] = reason

    def _launch(self, ranks: Ranks) -> str | None:
        """Start the processes of one peer. Returns the reason of a failure."""
        self._options.report(f"starting {ranks.job.peer}")
        reason = None
        for _ in range(1 + RESTARTS):
            try:
                ranks.launch()
                return None
            except original_package.NotInstalled as failure:
                return str(failure)
            except WorkerFailure as failure:
                reason = str(failure)
        return reason

    @property
    def running(self) -> dict[str, Ranks]:
        """The peers that could be started."""
        return {peer: ranks for peer, ranks in self.ranks.items() if peer not in self.missing}

    def check_losses(self, *loads: int) -> float:
        """Train some steps of every load with all peers and compare. Call it once, before any other training.

        Args:
            loads: Tokens per rank and step.

        Returns:
            The largest relative difference.

        Raises:
            LossesDisagree: The losses of a peer differ from those of the others.
        """
        worst = 0.0
        dtype = next(iter(self.ranks.values())).job.dtype
        apart = [peer for peer in self.running if peer in PEERS and not PEERS[peer].trains_together]
        for number, tokens in enumerate(loads):
            self._options.report(f"comparing losses at {tokens} tokens")
            # Ranks that train separately have different weights after their first step.
            names = [peer for peer in self.running if peer in PEERS and (not number or peer not in apart)]
            losses = {peer: found for peer in names if (found := self._losses(peer, tokens, retry=not number))}
            worst = max(worst, agreement.check(losses, dtype, apart))
        return worst

    def _losses(self, peer: str, tokens: int, retry: bool) -> list[float] | None:
        """A peer's losses. A peer that crashes is restarted, and tried again if its training has not begun."""
        ranks = self.ranks[peer]
        for attempt in range(1 + RESTARTS):
            try:
                return list(ranks.call("benchmarks.training:losses", tokens=tokens, steps=PARITY_STEPS)[0])
            except WorkerFailure as failure:
                again = self._start_again(peer, ranks)
                if not again or attempt == RESTARTS:
                    self.missing[peer] = str(failure)
                if not again or not retry:
                    break
        return None

    def _start_again(self, peer: str, ranks: Ranks) -> bool:
        try:
            ranks.launch()
        except WorkerFailure:
            return False
        return True

    def measure(self, contestant: Callable[[Ranks], Contestant], rounds: int) -> Rounds:
        """Take rounds of all running peers."""
        running = self.running
        watch = Quiet(lambda: sum(ranks.cpu_seconds for ranks in running.values()))
        contestants = {peer: contestant(ranks) for peer, ranks in running.items()}
        # A quick run only tests the suite, so it may take place on a busy machine.
        limit = math.inf if self._options.quick else quiet.LIMIT
        result = measure(contestants, rounds, watch, self._options.report, limit)
        result.crashed = {**self.missing, **result.crashed}
        self.missing |= result.crashed
        return result

    def close(self) -> None:
        """End all processes."""
        for ranks in self.ranks.values():
            ranks.close()


@contextlib.contextmanager
def field_of(jobs: Sequence[Job], options: Options, **arguments: Any) -> Iterator[Field]:
    """A field whose processes run inside the block."""
    field = Field(jobs, options, **arguments)
    try:
        field.launch()
        yield field
    finally:
        field.close()
