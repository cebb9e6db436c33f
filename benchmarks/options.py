"""The options of a run of the suite."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS

CORES = os.cpu_count() or 1


class Skipped(RuntimeError):
    """A benchmark cannot run here. The message contains the reason."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        quick: Whether to use small loads and few rounds, only to test the suite.
        rounds: Number of timed rounds; None: the benchmark's default.
        only_peers: Peers to measure; empty: all.
        report: Called with a line about the progress.
        where: Tags of the cases to measure, as text: ``{"ranks": "2"}``.
        full: Whether ``gpu`` measures all peers in all settings, one case per run.
        earlier: Tags of the cases that an earlier run has measured.
        folder: Folder for the results.
        add: Whether to keep what an earlier run has measured.
    """

    quick: bool = False
    rounds: int | None = None
    only_peers: tuple[str, ...] = ()
    report: Callable[[str], None] = lambda text: None
    where: dict[str, str] = field(default_factory=dict)
    full: bool = False
    earlier: tuple[dict[str, Any], ...] = ()
    folder: Path = Path()
    add: bool = False

    def wants(self, **tags: object) -> bool:
        """Whether to measure a case with these tags."""
        return all(str(tags[tag]) == value for tag, value in self.where.items() if tag in tags)

    def peers(self, names: Sequence[str]) -> list[str]:
        """The peers out of ``names`` that are to be measured."""
        unknown = set(self.only_peers) - set(PEERS)
        if unknown:
            raise ValueError(f"peers: expected some of {', '.join(PEERS)}; got {', '.join(sorted(unknown))}")
        return [name for name in names if not self.only_peers or name in self.only_peers]

    def number_of_rounds(self, usual: int) -> int:
        """Number of rounds to measure."""
        return self.rounds or (2 if self.quick else usual)


def threads_for(ranks: int) -> int:
    """CPU threads per rank if this many ranks compute at the same time."""
    return max(1, CORES // ranks)
