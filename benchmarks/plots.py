"""Draws one picture per case: a bar per peer with its quartiles, and this project's peers in another color."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import PEERS
from benchmarks.results import Case, Result


@dataclass(frozen=True)
class Plot:
    """The plot of a benchmark.

    Attributes:
        quantity: Quantity that the bars show.
        label: Label of the axis.
        scale: Divisor of the values.
    """

    quantity: str
    label: str
    scale: float = 1.0


PLOTS = {
    "step": Plot("step", "milliseconds per step"),
    "network": Plot("hidden", "fraction of the communication that is hidden"),
    "memory": Plot("peak", "MiB per rank, peak of a step", 1 << 20),
    "optimizer": Plot("optimizer", "milliseconds per optimizer step"),
    "host": Plot("host", "microseconds per unit and step"),
    "loop": Plot("tokens_per_second", "tokens per second"),
    "gpu": Plot("step", "milliseconds per step"),
}
OURS, OTHERS = "#1b7f4d", "#9aa5b1"


def is_plotted(result: Result, case: Case) -> bool:
    """Whether the case has a plot."""
    plot = PLOTS.get(result.benchmark)
    return plot is not None and sum(plot.quantity in own for own in case.figures.values()) > 1


def file_name(result: Result, number: int) -> str:
    """The file name of a plot."""
    return f"{result.benchmark}-{number}.png"


def draw(result: Result, case: Case, path: Path) -> None:
    """Draw one case."""
    from matplotlib.figure import Figure

    plot = PLOTS[result.benchmark]
    names = [name for name in PEERS if plot.quantity in case.figures.get(name, {})]
    figures = [case.figures[name][plot.quantity] for name in names]
    values = [figure.median / plot.scale for figure in figures]
    below = [(figure.median - figure.low) / plot.scale for figure in figures]
    above = [(figure.high - figure.median) / plot.scale for figure in figures]
    drawing = Figure(figsize=(8, 0.32 * len(names) + 1.1), layout="constrained")
    axes = drawing.subplots()
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    axes.barh([PEERS[name].title for name in names], values, xerr=[below, above], color=colours, ecolor="#333333")
    axes.invert_yaxis()
    axes.set_xlabel(plot.label)
    axes.set_title(", ".join(f"{tag} {value}" for tag, value in case.tags.items()), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(path, dpi=110)
