"""``python -m megatron.fsdp.trace`` with its built-in model, with a script, and with invalid command lines."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.launch import Ended, printed, python

SCRIPT = """
import sys
import torch
from torch import nn
from megatron_fsdp import fully_shard

torch.distributed.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
model, optimizer = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), fsdp_unit_modules=[nn.Linear])
for _ in range(int(sys.argv[1])):
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


def run(folder: Path, *arguments: str) -> Ended:
    """Starts the command in ``folder``."""
    with patch.dict(os.environ):
        os.environ.pop("RANK", None)
        return python("-m", "megatron.fsdp.trace", *arguments, folder=folder)


def spans(path: Path) -> set[tuple[int, str]]:
    """Ranks and names of the spans in a trace file."""
    return {(e["pid"], e["name"]) for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"}


@pytest.mark.slow
def test_the_built_in_model(tmp_path: Path) -> None:
    small = ["--layers", "2", "--width", "32", "--tokens", "128", "--strategy", "3"]
    output = printed(run(tmp_path, "--out", "timeline", *small))
    assert {(rank, f"backward layers.{i}") for rank in (0, 1) for i in (0, 1)} <= spans(tmp_path / "timeline.json")
    assert "layers.1" in output and "wrote timeline.json" in output


@pytest.mark.slow
def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    printed(run(tmp_path, "--script", "train.py", "--steps", "2", "--", "4"))
    assert {(rank, f"reduction {i}") for rank in (0, 1) for i in range(3)} <= spans(tmp_path / "trace.json")


@pytest.mark.slow
def test_a_script_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run(tmp_path, "--ranks", "1", "--script", "train.py", "--steps", "2", "--", "2")
    assert result.returncode != 0
    assert "train.py ended before a step could be traced: expected" in result.stderr
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "1"], "--steps: expected at least 2"),
        (["--script", "nowhere.py"], "no such script: nowhere.py"),
        (["--", "4"], "so --script is needed"),
    ],
)
def test_invalid_command_lines(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
