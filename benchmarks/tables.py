"""Prints results, targets and progress on a terminal, with Python alone: a machine with a GPU may have no rich."""

import sys
from collections.abc import Sequence

from benchmarks.columns import cell, columns_of
from benchmarks.peers import PEERS
from benchmarks.results import Case
from benchmarks.targets import Verdict

COLOURS = {"met": "\x1b[32m", "missed": "\x1b[1;31m", "not measured": "\x1b[2m"}
ERASE_LINE = "\r\x1b[2K"


def show(benchmark: str, case: Case) -> None:
    """Print one case of a benchmark."""
    columns = columns_of(benchmark, case)
    peers = [name for name in PEERS if name in case.figures] + [p for p in case.figures if p not in PEERS]
    rows = [[peer, *(cell(column, case, peer) for column in columns)] for peer in peers]
    title = ", ".join(f"{tag} {value}" for tag, value in case.tags.items())
    _print(f"{benchmark}: {title}", [["peer", *(column.title for column in columns)], *rows])
    for note in case.notes:
        print(f"  {note}")


def show_targets(verdicts: Sequence[Verdict]) -> None:
    """Print the table of targets."""
    rows = [["benchmark", "target", "case", "measured", ""]]
    for verdict in verdicts:
        value = "-" if verdict.value is None else f"{verdict.value:.3g}"
        rows.append([verdict.benchmark, verdict.target, verdict.case, value, verdict.outcome])
    _print("targets", rows, numbers_from=3)


def show_progress(text: str) -> None:
    """Replace the last line by ``text``, if there is a terminal."""
    if sys.stdout.isatty():
        print(f"{ERASE_LINE}{text}", end="", flush=True)


def _print(title: str, rows: list[list[str]], numbers_from: int = 1) -> None:
    show_progress("")
    print(title)
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if number >= numbers_from else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  " + "  ".join(cells).rstrip()
        colour = COLOURS.get(row[-1], "") if sys.stdout.isatty() else ""
        print(f"{colour}{line}\x1b[0m" if colour else line)
    print()
