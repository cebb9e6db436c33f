"""The benchmark suite runs the smallest load with this project and with FSDP2."""

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.results import load_all

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo, timed on the CPU")


def test_a_dry_run_of_the_benchmark_for_a_gpu(tmp_path: Path) -> None:
    """All that ``make gpu-bench`` runs, with a tiny model on the CPU."""
    assert main(["--only", "gpu", "--quick", "--add", "--rounds", "1", "--results", str(tmp_path)]) == 0
    (case,) = load_all(tmp_path)["gpu"].cases
    assert case.tags["model"] == "tiny" and {"ours-3", "fsdp2"} <= set(case.figures)
    assert all(own["step"].median > 0 and own["kernels"].median == 0 for own in case.figures.values())


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "step", "--quick", "--rounds", "1", "--peers", "ours-3,fsdp2", "--results", str(tmp_path)]
    assert main(arguments) == 0
    result = load_all(tmp_path)["step"]
    (case,) = result.cases
    assert set(case.figures) == {"ours-3", "fsdp2"}
    assert all(own["step"].median > 0 for own in case.figures.values())
    assert any("losses agree" in note for note in case.notes)
    assert {verdict["outcome"] for verdict in result.targets} >= {"not measured"}
    assert "targets" in capsys.readouterr().out
