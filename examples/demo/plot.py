"""Plots the training and validation loss over the tokens seen, with the unigram entropy for comparison."""

import argparse
from pathlib import Path

import matplotlib
from files import read_meta
from train_log import Point, read_history

matplotlib.use("Agg")  # there may be no display

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

COLORS = {"train": "#3b6fb6", "validation": "#d1495b", "unigram": "#555555"}
EVERYTHING = 10**12


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """An exponential moving average without a bias towards the first value."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(average / total)
    return result


def draw_losses(axes: Axes, points: list[Point]) -> None:
    """Draws single batches faintly, their moving average on top, and a dot per validation, the last with its value."""
    train = [point for point in points if point.kind == "train"]
    validation = [point for point in points if point.kind == "validation"]
    thousands = [point.tokens / 1e3 for point in train]
    losses = [point.loss for point in train]
    axes.plot(thousands, losses, color=COLORS["train"], alpha=0.25, linewidth=0.8)
    axes.plot(thousands, smooth(losses), color=COLORS["train"], linewidth=2, label="training")
    if not validation:
        return
    places, values = [point.tokens / 1e3 for point in validation], [point.loss for point in validation]
    axes.plot(places, values, "o-", color=COLORS["validation"], linewidth=1.5, markersize=5, label="validation")
    axes.annotate(
        f"{values[-1]:.2f}",
        (places[-1], values[-1]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        color=COLORS["validation"],
        fontweight="bold",
    )


def plot(points: list[Point], unigram_entropy: float, path: Path, title: str) -> None:
    """Writes the picture to ``path``.

    Raises:
        ValueError: there is no training point.
    """
    if not any(point.kind == "train" for point in points):
        raise ValueError("expected at least one training loss to plot, got none")
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    draw_losses(axes, points)
    axes.axhline(
        unigram_entropy, color=COLORS["unigram"], linestyle="--", linewidth=1.2, label=f"unigrams {unigram_entropy:.2f}"
    )
    axes.set(title=title, xlabel="tokens seen (thousands)", ylabel="loss (nats per token)")
    axes.margins(x=0.03)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Command line: draws the history of a demo folder again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="the demo's folder")
    output = parser.parse_args().output
    entropy = read_meta(output / "data").unigram_entropy
    plot(
        read_history(output / "history.jsonl", EVERYTHING), entropy, output / "loss.png", "GPT on Python's own library"
    )
    print(output / "loss.png")


if __name__ == "__main__":
    main()
