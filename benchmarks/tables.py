"""Prints results and targets on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.columns import cell, columns_of
from benchmarks.peers import PEERS
from benchmarks.results import Case
from benchmarks.targets import Verdict

STYLE = {"met": "green", "missed": "bold red", "not measured": "dim"}


def show(benchmark: str, case: Case, console: Console) -> None:
    """Print one case of a benchmark."""
    console.print(_table(benchmark, case))
    for note in case.notes:
        console.print(f"  {escape(note)}")


def _table(benchmark: str, case: Case) -> Table:
    title = ", ".join(f"{tag} {value}" for tag, value in case.tags.items())
    table = Table("peer", title=f"{benchmark}: {title}", title_justify="left")
    columns = columns_of(benchmark, case)
    for column in columns:
        table.add_column(column.title, justify="right")
    for peer in [name for name in PEERS if name in case.figures] + [p for p in case.figures if p not in PEERS]:
        table.add_row(peer, *(cell(column, case, peer) for column in columns))
    return table


def show_targets(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the table of targets."""
    table = Table("benchmark", "target", "case", "measured", "", title="targets", title_justify="left")
    for verdict in verdicts:
        value = "-" if verdict.value is None else f"{verdict.value:.3g}"
        outcome = f"[{STYLE[verdict.outcome]}]{verdict.outcome}[/]"
        table.add_row(verdict.benchmark, verdict.target, escape(verdict.case), value, outcome)
    console.print(table)
