"""What a run of the suite was asked for, as benchmarks see it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers import PEERS

CORES = os.cpu_count() or 1


class Skipped(RuntimeError):
    """A benchmark cannot run here; the message says why."""


@dataclass(frozen=True)
class Options:
    """Settings of a run.

    Attributes:
        quick: Small loads and few rounds, which show that the suite works and nothing else.
        rounds: Rounds of what is timed; None: as many as the benchmark wants.
        only_peers: Measure these only; empty: all.
        where: Tags that a case must have to be measured, as text: ``{"ranks": "2"}``.
        report: Called with a line about what is going on.
    """

    quick: bool = False
    rounds: int | None = None
    only_peers: tuple[str, ...] = ()
    report: Callable[[str], None] = lambda text: None
    where: dict[str, str] = field(default_factory=dict)

    def wants(self, **tags: object) -> bool:
        """Whether a case with these tags was asked for."""
        return all(str(tags[tag]) == value for tag, value in self.where.items() if tag in tags)

    def peers(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that were asked for."""
        unknown = set(self.only_peers) - set(PEERS)
        if unknown:
            raise ValueError(f"peers: expected some of {', '.join(PEERS)}; got {', '.join(sorted(unknown))}")
        return [name for name in names if not self.only_peers or name in self.only_peers]

    def number_of_rounds(self, usual: int) -> int:
        """Rounds to take."""
        return self.rounds or (2 if self.quick else usual)


def threads_for(ranks: int) -> int:
    """Threads of each of so many ranks that compute at once on this machine."""
    return max(1, CORES // ranks)
