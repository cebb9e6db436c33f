"""Draws a trace: four rows per rank, and below them the communication of each unit and its exposed share.

python -m megatron.fsdp.trace --out trace
python scripts/draw_trace.py trace.json trace.png
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.tools.trace.spans import MILLISECOND, Kind, RankTrace, Row, Span, mean_of  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    Kind.FORWARD: "#5b8ec9",
    Kind.RECOMPUTATION: "#a9c7e8",
    Kind.BACKWARD: "#2f5d96",
    Kind.ENGINE: "#b9b9b9",
    Kind.OPTIMIZER: "#7fb069",
    Kind.GATHER: "#e9a13b",
    Kind.REDUCTION: "#8d5fa8",
    Kind.OTHER: "#6b6b6b",
}
WAIT_COLORS = {Kind.GATHER: "#d62f2f", Kind.REDUCTION: "#f08a8a", Kind.OTHER: "#8a3030"}
LABELS = {Kind.ENGINE: "engine (issues, copies gradients)"}
WAIT_LABELS = {kind: f"computation waits for a {kind}" for kind in (Kind.GATHER, Kind.REDUCTION)}
LATE_LABEL = "hatched: another rank has not arrived yet"
ROWS_TITLE = "Activity of each rank{shown}; bars are labeled with units"
UNITS_TITLE = "Communication per unit and its exposed share, mean of ranks: {exposed:.1f} ms exposed in total"
# A picture's metadata have these words, so that a test finds a picture on a page with older ones.
WORDS = "; ".join((ROWS_TITLE, UNITS_TITLE, LATE_LABEL, *Row, *Kind, *LABELS.values(), *WAIT_LABELS.values()))
WAIT_LABELS[Kind.OTHER] = f"computation waits for {Kind.OTHER}"

LATE_STYLE: dict[str, Any] = {"hatch": "////", "edgecolor": "#ffffff", "linewidth": 0}
NARROW = 0.003  # as a fraction of the picture's width

WIDTH = 13.0  # inches
MOST_RANKS = 8
# Width of a character of a bar's label, as a fraction of the picture's width. Labels that do not fit are left out.
CHARACTER = 0.0062


def read(path: Path) -> list[RankTrace]:
    """The recordings in a file that ``Timeline.save`` has written."""
    found = json.loads(path.read_text())
    traces = []
    for rank, exposed in found["otherData"]["exposed_ms"].items():
        events = [event for event in found["traceEvents"] if (event["ph"], event["pid"]) == ("X", int(rank))]
        spans = tuple(_span(event) for event in events)
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        traces.append(RankTrace(int(rank), "", tuple(exposed), start, end, spans, 0, False))
    return traces


def _span(event: dict[str, Any]) -> Span:
    arguments, start = event["args"], round(event["ts"] * 1e3)
    late = round(arguments.get("ms until the last rank arrived", 0) * MILLISECOND)
    backward = arguments["pass"] == "backward"
    end = start + round(event["dur"] * 1e3)
    return Span(list(Row)[event["tid"]], Kind(event["cat"]), arguments["unit"], backward, start, end, late=late)


def draw(traces: list[RankTrace], path: str | Path) -> None:
    """Draw a timeline and write it to a file.

    Args:
        traces: The recordings of all ranks, at least one.
        path: The file. Its extension determines the format.
    """
    from matplotlib.figure import Figure

    shown = traces[:MOST_RANKS]
    height = 1.1 * len(shown) + 0.9
    figure = Figure(figsize=(WIDTH, height + 3.4), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[height, 2.4])
    _draw_rows(above, shown, of=len(traces))
    _draw_units(below, traces)
    _add_legend(figure, [span for trace in shown for span in trace.spans])
    figure.savefig(path, metadata={"Title": WORDS})


def _draw_rows(axes: "Axes", traces: list[RankTrace], of: int) -> None:
    first = min(trace.start for trace in traces)
    length = max(trace.end for trace in traces) - first
    names = short_names(traces[0].units)
    ticks, labels = [], []
    for i, trace in enumerate(traces):
        for j, row in enumerate(Row):
            y = i * (len(Row) + 0.8) + j
            ticks.append(y)
            labels.append(f"rank {trace.rank}   {row}" if j == 0 else str(row))
            spans = [span for span in trace.spans if span.row is row and span.kind is not Kind.OUTSIDE]
            _draw_row(axes, spans, y, first, length)
            for span in spans:
                _label(axes, span, y, first, length, names.get(span.unit, ""))
        if i:
            axes.axhline(i * (len(Row) + 0.8) - 0.9, color="#dddddd", linewidth=1)
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, length / MILLISECOND)
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = "" if of == len(traces) else f", {len(traces)} of {of} ranks"
    axes.set_title(ROWS_TITLE.format(shown=shown), loc="left", fontsize=11)


def _draw_row(axes: "Axes", spans: list[Span], y: float, first: int, length: int) -> None:
    bars: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    late = []
    for span in spans:
        color = (WAIT_COLORS if span.row is Row.WAITS else COLORS)[span.kind]
        left = (span.start - first) / MILLISECOND
        bars.setdefault((color, span.end - span.start > NARROW * length), []).append((left, span.milliseconds))
        if span.late > NARROW * length:
            late.append((left, span.late / MILLISECOND))
    for (color, wide), ranges in bars.items():
        # A thin white edge separates neighbours, but it would hide a bar that is only one pixel wide.
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4} if wide else {"linewidth": 0}
        axes.broken_barh(ranges, (y - 0.43, 0.86), facecolor=color, **edge)
    axes.broken_barh(late, (y - 0.43, 0.86), facecolor="none", **LATE_STYLE)


def _label(axes: "Axes", span: Span, y: float, first: int, length: int, name: str) -> None:
    """Write a unit's name on a bar, to the right of the hatched part, if it fits."""
    start = span.start + span.late
    if not name or span.kind is Kind.ENGINE or span.end - start < CHARACTER * (len(name) + 0.5) * length:
        return
    dark = span.kind is Kind.GATHER if span.row is Row.WAITS else span.kind in (Kind.BACKWARD, Kind.REDUCTION)
    x, color = ((start + span.end) / 2 - first) / MILLISECOND, "white" if dark else "black"
    axes.text(x, y, name, ha="center", va="center", fontsize=7.5, color=color)


def _add_legend(figure: "Figure", spans: list[Span]) -> None:
    """Explain the colors that occur."""
    from matplotlib.patches import Patch

    seen = {(span.row is Row.WAITS, span.kind) for span in spans}
    entries = [(COLORS[kind], LABELS.get(kind, str(kind))) for kind in COLORS if (False, kind) in seen]
    entries += [(WAIT_COLORS[kind], WAIT_LABELS[kind]) for kind in WAIT_COLORS if (True, kind) in seen]
    patches = [Patch(color=color, label=label) for color, label in entries]
    patches.append(Patch(facecolor="white", edgecolor="#cccccc", label="outside the model"))
    if any(span.late for span in spans):
        patches.append(Patch(facecolor="#888888", label=LATE_LABEL, **LATE_STYLE))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)


def _draw_units(axes: "Axes", traces: list[RankTrace]) -> None:
    """Draw the communication time of each unit, and how much of it the computation waited for."""
    mean = mean_of(traces)
    places = range(len(mean))
    columns = (
        (-0.3, "gather", COLORS[Kind.GATHER]),
        (-0.1, "exposed_gather", WAIT_COLORS[Kind.GATHER]),
        (0.1, "reduction", COLORS[Kind.REDUCTION]),
        (0.3, "exposed_reduction", WAIT_COLORS[Kind.REDUCTION]),
    )
    for shift, attribute, color in columns:
        values = [getattr(times, attribute) for times in mean.values()]
        axes.bar([place + shift for place in places], values, width=0.2, color=color)
    crowded = sum(len(name) + 2 for name in mean) > 150
    axes.set_xticks(list(places), list(mean), fontsize=8, rotation=60 if crowded else 0)
    axes.set_xlim(-0.6, len(mean) - 0.4)
    axes.set_ylabel("ms in this step")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    exposed, late = sum(times.exposed for times in mean.values()), sum(times.late for times in mean.values())
    title = UNITS_TITLE.format(exposed=exposed)
    if late:
        title += f", {late:.1f} ms of it waiting for another rank"
    axes.set_title(title, loc="left", fontsize=11)


def short_names(units: Iterable[str]) -> dict[str, str]:
    """The last component of each unit's name if it is unique, else the whole name."""
    names = list(units)
    ends = [name.rpartition(".")[2] for name in names]
    ends = ["root" if name == "<root>" else end for name, end in zip(names, ends, strict=True)]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what the command or Timeline.save has written")
    parser.add_argument("picture", type=Path, help="the file to write: .svg, .png or .pdf")
    options = parser.parse_args(argv)
    draw(read(options.json), options.picture)


if __name__ == "__main__":
    main()
