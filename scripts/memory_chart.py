"""Draws what ``megatron-fsdp-plan --json`` prints: stacked bars by strategy, a panel for each number of ranks.

megatron-fsdp-plan --model config.json --ranks 8 64 --json > memory.json
python scripts/memory_chart.py memory.json memory.svg --title "8 billion parameters in bf16" --gpu h100

With --curves, step time, waits for communication and memory over the number of ranks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.tools.devices import GIB, add_device  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bar = dict[str, Any]

# Okabe and Ito's palette, whose colors people with any color vision tell apart.
PARTS = (
    ("shards", "weights at rest", "#0072B2"),
    ("optimizer", "optimizer state", "#009E73"),
    ("gradients", "gradients", "#E69F00"),
    ("unsharded units", "unsharded units", "#56B4E9"),
    ("communication buffers", "communication", "#CC79A7"),
    ("activations", "activations", "#D55E00"),
    ("logits", "logits", "#F0E442"),
    ("temporary", "temporary", "#999999"),
)


def draw(found: Sequence[Bar], title: str, path: Path, capacity: int | None = None) -> None:
    """Draw the chart and write it to a file, whose extension determines the format.

    Args:
        found: The bars.
        title: What is drawn.
        path: The file.
        capacity: Bytes of a device, which are drawn as a line.
    """
    from matplotlib.figure import Figure

    panels = [[bar for bar in found if bar["ranks"] == ranks] for ranks in dict.fromkeys(bar["ranks"] for bar in found)]
    height = 1.5 + sum(0.62 + 0.36 * len(panel) for panel in panels)
    figure = Figure(figsize=(5.6, height), dpi=140, layout="constrained")
    drawn = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[len(panel) + 0.6 for panel in panels]
    )
    axes: list[Axes] = [row[0] for row in drawn]
    most = max([sum(bar["peak"].values()) for bar in found] + [capacity or 0]) / GIB
    for panel, on in zip(panels, axes, strict=True):
        _draw_panel(on, panel, most)
        if capacity is not None:
            on.axvline(capacity / GIB, color="#333333", linestyle="--", linewidth=1.2)
    if capacity is not None:
        label = f"device: {capacity / GIB:.1f} GiB"
        axes[0].annotate(
            label,
            (capacity / GIB, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=9,
            ha="center",
            color="#333333",
        )
    axes[-1].set_xlabel("GiB of tensors per rank at the peak of a step")
    _save(figure, axes[0], title, path, "memory")


def _save(figure: "Figure", first: "Axes", title: str, path: Path, salt: str) -> None:
    """Add the title and the legend, whose entries are those of the first panel, and write the file."""
    from matplotlib import rc_context

    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    # A picture that is drawn again is the same file.
    with rc_context({"svg.hashsalt": salt}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})


def _draw_panel(on: "Axes", panel: Sequence[Bar], most: float) -> None:
    names = [bar["strategy"] for bar in panel]
    left = [0.0] * len(panel)
    for attribute, label, color in PARTS:
        sizes = [bar["peak"].get(attribute, 0) / GIB for bar in panel]
        on.barh(names, sizes, left=left, color=color, label=label, height=0.72, edgecolor="white", linewidth=0.5)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, total in enumerate(left):
        text = f"{total:.1f}" if total >= 1 else f"{total:.2f}"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        on.text(total + most * 0.008, place, text, va="center", fontsize=9, bbox=behind)
    on.set_xlim(0, most * 1.08)
    on.invert_yaxis()
    on.set_title(f"{panel[0]['ranks']} ranks", loc="left", fontsize=10, fontweight="bold")
    on.grid(axis="x", color="#dddddd", linewidth=0.6)
    on.set_axisbelow(True)
    on.tick_params(labelsize=9, length=0)
    for side in ("top", "right", "left"):
        on.spines[side].set_visible(False)


def draw_curves(found: Sequence[Bar], title: str, path: Path) -> None:
    """Draw step time, waits and memory over the number of ranks: a line per strategy, and the fastest split of HSDP.

    Args:
        found: The predictions.
        title: What is drawn.
        path: The file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 7.2), dpi=140, layout="constrained")
    panels: list[Axes] = list(figure.subplots(3, 1, sharex=True))
    kinds = list(dict.fromkeys(_kind(bar) for bar in found))
    for kind, color, marker in zip(kinds, (color for *_, color in PARTS), "osD^vPX*", strict=False):
        fastest: dict[int, Bar] = {}
        for bar in sorted(found, key=lambda bar: (bar["ranks"], bar["step_seconds"])):
            if _kind(bar) == kind:
                fastest.setdefault(bar["ranks"], bar)
        for on, values in zip(panels, zip(*(_curves(bar) for bar in fastest.values()), strict=True), strict=True):
            on.plot(list(fastest), values, color=color, marker=marker, markersize=4, label=kind, linewidth=1.4)
    for on, label in zip(panels, ("step, s", "waits for communication, s", "peak memory, GiB"), strict=True):
        on.set_xscale("log", base=2)
        on.set_ylim(bottom=0)
        on.set_title(label, loc="left", fontsize=10, fontweight="bold")
        on.grid(color="#dddddd", linewidth=0.6)
        on.tick_params(labelsize=9, length=0)
        for side in ("top", "right"):
            on.spines[side].set_visible(False)
    ranks = sorted({bar["ranks"] for bar in found})
    panels[-1].set_xticks(ranks, [f"{each:,}" for each in ranks], rotation=30)
    panels[-1].set_xlabel("ranks")
    _save(figure, panels[0], title, path, "curves")


def _kind(bar: Bar) -> str:
    """The strategy, without the split of HSDP."""
    name: str = bar["strategy"]
    return name if bar["axes"]["outer"] == 1 else name.rsplit(" ", 3)[0]


def _curves(bar: Bar) -> tuple[float, float, float]:
    waits = sum(parts["unshard"] + parts["reduce"] for parts in bar["units"].values())
    return bar["step_seconds"], waits, bar["memory"] / GIB


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what the command has printed")
    parser.add_argument("picture", type=Path, help="the file to write: .svg, .png or .pdf")
    parser.add_argument("--title", default="Memory by strategy", help="(default: %(default)s)")
    parser.add_argument("--curves", action="store_true", help="step time, waits and memory over the number of ranks")
    add_device(parser)
    options = parser.parse_args(argv)
    found = json.loads(options.json.read_text())
    if options.curves:
        draw_curves(found, options.title, options.picture)
    else:
        draw(found, options.title, options.picture, options.device_memory)


if __name__ == "__main__":
    main()
