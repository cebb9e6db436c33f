"""Arithmetic of the benchmark suite: medians, ratios, slopes, hidden communication, idle gaps."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import original_package
from benchmarks.figures import Slope, Summary, ratio
from benchmarks.job import Job
from benchmarks.options import Options
from benchmarks.probes.gpu import idle_share
from benchmarks.rounds import Rounds
from benchmarks.suite import gpu, growth, host_time, slow_network
from benchmarks.suite.real_loop import times


def test_summary() -> None:
    summary = Summary.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.median, summary.low, summary.high) == (3.0, 2.0, 4.0)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0, (7.0,))
    assert Summary.from_json(summary.as_json()) == summary
    with pytest.raises(ValueError, match="no round"):
        Summary.of([])


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was three times slower in the second round: that changes no ratio.
    assert ratio(Summary.of([1.0, 3.0, 1.0]), Summary.of([2.0, 6.0, 2.0])).median == 0.5
    assert ratio(Summary.of([1.0, 3.0]), Summary.of([2.0])).rounds == (0.5, 1.5)


def test_slope() -> None:
    line = Slope.of([0, 10, 20, 30], [100.0, 110.0, 120.0, 130.0])
    assert line.per_step == pytest.approx(1.0)
    assert line.error == pytest.approx(0.0, abs=1e-9)
    assert line.growth == pytest.approx(30 / 115)
    assert not line.is_flat(tolerance=0.2)
    assert line.is_flat(tolerance=0.3)
    assert Slope.of([0, 10, 20, 30], [100.0, 103.0, 99.0, 101.0]).is_flat(tolerance=0.0)
    assert Slope.of([0, 10, 20], [3.0, 2.0, 1.0]).is_flat(tolerance=0.0)  # decreasing figures are flat
    with pytest.raises(ValueError, match="three points"):
        Slope.of([0, 1], [1.0, 1.0])


def _points(heap_per_point: float) -> list[dict[str, float]]:
    return [
        {"step": 0.01 + 1e-5 * (i % 3), "heap": 1e6 + heap_per_point * i, "objects": 1000.0 + i % 2, "resident": 1e8}
        for i in range(20)
    ]


def test_growth_is_detected() -> None:
    assert growth.judged(_points(0.0), 50)["memory_grows"] == 0.0
    leaking = growth.judged(_points(5000.0), 50)
    assert leaking["memory_grows"] == 1.0
    assert leaking["heap_slope"] == pytest.approx(100.0)
    assert leaking["time_grows"] == 0.0


def test_hidden_communication() -> None:
    sample = {
        "alone": {"compute": 100.0},
        "collectives": {"all-reduce": 50.0, "gather once": 100.0, "gather twice, pairwise": 200.0},
        "ddp": {"compute": 110.0},
        "ours-3": {"compute": 140.0},
    }
    slow_network.hide(Rounds(kept=[sample]))
    assert sample["ddp"]["hidden"] == pytest.approx(0.8)
    assert sample["ours-3"]["exposed"] == 40.0
    assert sample["ours-3"]["hidden"] == pytest.approx(0.8)
    assert sample["ours-3"]["could_hide"] == 0.5
    assert "hidden" not in sample["alone"]


def test_host_time_excludes_that_of_the_plain_model() -> None:
    parts = {"forward": 100.0, "backward": 200.0, "optimizer": 50.0}
    rounds = Rounds(kept=[{"alone": dict(parts), "ours-3": {name: 2 * value for name, value in parts.items()}}])
    host_time.per_unit(rounds, units=10)
    assert rounds.kept == [{"ours-3": {"forward": 10.0, "backward": 20.0, "optimizer": 5.0, "host": 30.0}}]


def test_idle_share() -> None:
    assert idle_share([]) == 0.0
    assert idle_share([(0.0, 4.0), (2.0, 3.0), (6.0, 10.0)]) == pytest.approx(0.2)
    assert idle_share([(6.0, 10.0), (0.0, 6.0)]) == 0.0


def test_times_of_the_loop() -> None:
    line = "[2026] iteration {:8d}/ 20 | consumed samples: 2 | elapsed time per iteration (ms): {:.1f} | lr: 1 |\n"
    assert times("".join(line.format(number, 10.0 * number) for number in range(1, 7))) == [50.0, 60.0]


class _NoRanks:
    """Ranks that take a minute for a turn, by a clock that only they advance."""

    now = 0.0

    def __init__(self, job: Job) -> None:
        self.job = job

    def launch(self) -> None:
        pass

    def call(self, name: str, **unused: Any) -> list[dict[str, float]]:
        type(self).now += 30.0
        turn = dict.fromkeys(("forward", "backward", "optimizer", "step"), [1.0])
        return [turn if name.endswith("turn") else {"idle": 0.5}]

    def close(self) -> None:
        pass


def test_a_run_on_a_gpu_takes_eight_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "Ranks", _NoRanks)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: _NoRanks.now)
    cases = list(gpu.run(Options()))
    assert [(case.tags["model"], case.tags["ranks"]) for case in cases] == [("1 B", 1), ("8 B, 4 layers", 8)]
    assert all(case.figures.keys() == {"fsdp2", "original-3", "ours-3"} for case in cases)
    assert 0 < _NoRanks.now <= gpu.SECONDS
    done: list[dict[str, Any]] = []
    for _ in range(6):
        (case,) = gpu.run(Options(full=True, earlier=tuple(done)))
        assert case.tags not in done
        done.append(case.tags)
    assert list(gpu.run(Options(full=True, earlier=tuple(done)))) == []


def test_pip_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries = []

    def fails(command: list[str], **unused: Any) -> subprocess.CompletedProcess:
        tries.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no registry")

    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr(original_package, "_failure", [])
    for _ in range(3):
        with pytest.raises(original_package.NotInstalled, match="no registry"):
            original_package._install(tmp_path)
    assert len(tries) == 1
