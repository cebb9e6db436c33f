"""Interleaved rounds: every round gives each peer a turn while the others wait, in changing order.

A turn during which other processes computed is taken again, and a round with such a turn is thrown away. There is an
end to that: after so many rounds, all rounds are used and the result says that it is noisy. A peer that dies is
started again, twice, and is then reported as crashed.
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
    """Who takes turns."""

    def turn(self) -> Sample:
        """Measure once; quantities by name."""

    def restart(self) -> None:
        """Start again after a failure."""


class Watch(Protocol):
    """Measures what others compute."""

    def begin(self) -> None:
        """Start to watch."""

    def end(self) -> float:
        """Cores that others used since then."""


@dataclass
class Rounds:
    """What was measured.

    Attributes:
        kept: For each round that counts, the sample of each peer.
        thrown_away: For each round that does not count, the same.
        retaken: Turns that were taken again.
        noisy: Whether there were too few quiet rounds, so that all count.
        crashed: Why a peer is missing, by its name.
        restarted: How often a peer was started again.
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
    """The order of turns in round ``number``: rotated, and every other round backwards."""
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
    """Take ``rounds`` quiet rounds, or twice as many and two rounds in all."""
    result = Rounds()
    for number in range(2 * rounds + 2):
        if len(result.kept) == rounds or len(result.crashed) == len(contestants):
            break
        report(f"round {len(result.kept) + 1} of {rounds}, {len(result.thrown_away)} thrown away")
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
    # Ratios are taken round by round: a round in which one peer died has none of it.
    result.kept = [m for m in result.kept if all(name in m for name in contestants if name not in result.crashed)]
    return result


def _turn(peer: str, contestant: Contestant, watch: Watch, limit: float, result: Rounds) -> Sample | None:
    """A turn that was quiet, or the quietest of some; None if the peer has crashed."""
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
    """Start a peer again, if it has not been too often; returns whether it lives."""
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
    """All that was measured, for the record."""
    return {
        "rounds": result.kept,
        "rounds_thrown_away": result.thrown_away,
        "turns_retaken": result.retaken,
        "noisy": result.noisy,
        "crashed": result.crashed,
        "restarted": result.restarted,
    }
