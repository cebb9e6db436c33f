"""The demo's parsing of Megatron's log lines, its history across runs, and its plot."""

from pathlib import Path

import pytest
from plot import plot, smooth
from train_log import LogReader, Point, failure_excerpt, read_history, write_history

TRAINING = (
    " [2026-01-01 10:00:00.000000] iteration       12/     300 | consumed samples:           96 |"
    " elapsed time per iteration (ms): 500.0 | learning rate: 2.000000E-03 | global batch size:     8 |"
    " lm loss: 6.743210E+00 | loss scale: 1.0 | grad norm: 0.779 | num zeros: 0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |Number of parameters: 1"
)
VALIDATION = (
    " validation loss at iteration 12 on validation set | lm loss value: 6.888522E+00 | lm loss PPL: 9.8E+02 | "
)
MEMORY = "[Rank 0] (after 12 iterations) memory (MB) | allocated: 900.00 | max allocated: 968.31 | reserved: 1000.00"


def test_reads_losses_speed_and_memory() -> None:
    reader = LogReader(sequence=256)
    assert reader.read(TRAINING) == Point("train", 12, 6.74321, tokens=96 * 256, tokens_per_second=8 * 256 / 0.5)
    assert reader.read(VALIDATION) == Point("validation", 12, 6.888522, tokens=96 * 256)
    assert reader.read(MEMORY) is None
    assert reader.max_allocated_mb == 968.31
    assert reader.read("Evaluating iter 1/4") is None


def test_history_drops_iterations_after_the_checkpoint(tmp_path: Path) -> None:
    points = [Point("train", iteration, 8.0 - iteration, 100 * iteration) for iteration in range(1, 6)]
    assert read_history(tmp_path / "history.jsonl", until=3) == []
    write_history(tmp_path / "history.jsonl", points)
    assert read_history(tmp_path / "history.jsonl", until=3) == points[:3]


def test_excerpt_ends_with_the_rank_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("an earlier run\n")
    offset = log.stat().st_size
    failed = "E0101 10:00:00 1 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 1"
    with log.open("a") as file:
        file.write(f"much\n[rank1]: ValueError: the reason\n{failed}\nTraceback (most recent call last):\n")
    assert failure_excerpt(log, offset, lines=2) == f"[rank1]: ValueError: the reason\n{failed}"
    assert "an earlier run" not in failure_excerpt(log, offset)


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert smooth([5.0] * 4) == pytest.approx([5.0] * 4)


def test_plot_is_written(tmp_path: Path) -> None:
    points = [Point("train", 1, 8.0, 100), Point("train", 2, 7.0, 200), Point("validation", 2, 7.5, 200)]
    plot(points, 6.9, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="training loss"):
        plot(points[2:], 6.9, tmp_path / "loss.png", "title")
