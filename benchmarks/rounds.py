"""Interleaved rounds: in every round, each peer takes a turn while the others wait, in changing order.

A turn is repeated if other processes used the CPU, and a round is discarded if no repetition was quiet. If too many
rounds are discarded, all rounds are used and the result is marked as noisy. A peer that crashes is restarted up to
twice, and then reported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks import quiet
from benchmarks.workers import WorkerFailure

RETAKES = 2
RESTARTS = 2

Sample = dict[str, float]


class Contestant(Protocol):
    """A peer that takes turns."""

    def turn(self) -> Sample:
        """Measure once. Returns quantities by name."""

    def restart(self) -> None:
        """Restart after a failure."""


class Watch(Protocol):
    """Measures the CPU usage of other processes."""

    def begin(self) -> None:
        """Start the measurement."""

    def end(self) -> float:
        """Average number of cores that other processes have used since then."""


@dataclass
class Rounds:
    """The measurements of all rounds.

    Attributes:
        kept: The sample of each peer, for each round that counts.
        thrown_away: The sample of each peer, for each discarded round.
        retaken: Number of repeated turns.
        noisy: Whether all rounds count because too few were quiet.
        crashed: The error of each crashed peer.
        restarted: Number of restarts of each peer.
    """

    kept: list[dict[str, Sample]] = field(default_factory=list)
    thrown_away: list[dict[str, Sample]] = field(default_factory=list)
    retaken: int = 0
    noisy: bool = False
    crashed: dict[str, str] = field(default_factory=dict)
    restarted: dict[str, int] = field(default_factory=dict)

    def of(self, peer: str, quantity: str) -> list[float]:
        """One quantity of one peer, round by round."""
        return [measured[peer][quantity] for measured in self.kept if peer in measured]


def order(peers: Sequence[str], number: int) -> list[str]:
    """The order of turns in round ``number``: rotated, and reversed in every other round."""
    start = (number // 2) % len(peers) if peers else 0
    rotated = [*peers[start:], *peers[:start]]
    return rotated[::-1] if number % 2 else rotated


def measure(
    contestants: dict[str, Contestant],
    rounds: int,
    watch: Watch,
    report: Callable[[str], None] = lambda text: None,
    limit: float = quiet.LIMIT,
) -> Rounds:
    """Measure until ``rounds`` rounds were quiet, but at most ``2 * rounds + 2`` rounds."""
    result = Rounds()
    for number in range(2 * rounds + 2):
        if len(result.kept) == rounds or len(result.crashed) == len(contestants):
            break
        report(f"round {len(result.kept) + 1} of {rounds}, {len(result.thrown_away)} discarded")
        measured: dict[str, Sample] = {}
        loudest = 0.0
        for peer in order([name for name in contestants if name not in result.crashed], number):
            taken = _turn(peer, contestants[peer], watch, limit, result)
            if taken is not None:
                measured[peer] = taken
                loudest = max(loudest, taken["others"])
        (result.kept if loudest <= limit else result.thrown_away).append(measured)
    if len(result.kept) < rounds and result.thrown_away:
        result.noisy = True
        result.kept += result.thrown_away
        result.thrown_away = []
    # Ratios are computed per round, so drop rounds in which a peer that is still running has no sample.
    result.kept = [m for m in result.kept if all(name in m for name in contestants if name not in result.crashed)]
    return result


def _turn(peer: str, contestant: Contestant, watch: Watch, limit: float, result: Rounds) -> Sample | None:
    """Take a turn until one is quiet. Returns the quietest; None if the peer has crashed."""
    best: Sample | None = None
    attempts = 0
    while attempts <= RETAKES:
        watch.begin()
        try:
            sample = contestant.turn()
        except WorkerFailure as failure:
            if not _revive(peer, contestant, failure, result):
                return None
            continue
        sample["others"] = watch.end()
        if best is None or sample["others"] < best["others"]:
            best = sample
        if best["others"] <= limit:
            break
        attempts += 1
    result.retaken += min(attempts, RETAKES)
    return best


def _revive(peer: str, contestant: Contestant, failure: WorkerFailure, result: Rounds) -> bool:
    """Restart a peer unless it has reached the limit. Returns whether it runs."""
    while result.restarted.get(peer, 0) < RESTARTS:
        result.restarted[peer] = result.restarted.get(peer, 0) + 1
        try:
            contestant.restart()
        except WorkerFailure as again:
            failure = again
            continue
        return True
    result.crashed[peer] = str(failure)
    return False


def as_json(result: Rounds) -> dict[str, Any]:
    """All measurements, for the result file."""
    return {
        "rounds": result.kept,
        "rounds_thrown_away": result.thrown_away,
        "turns_retaken": result.retaken,
        "noisy": result.noisy,
        "crashed": result.crashed,
        "restarted": result.restarted,
    }
