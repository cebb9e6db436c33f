"""The commands of the tutorial about Megatron train, stop and resume as its page says."""

import re
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, printed, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]
PAGE = ROOT / "docs" / "tutorials" / "pretrain_megatron.md"


def run(command: str, folder: Path) -> str:
    """The output of a command of the page, in a folder with the repository's script."""
    return printed(start(["bash", "-c", f"exec 2>&1\n{command}"], folder=folder))


def losses(output: str) -> dict[int, float]:
    """The loss of each iteration in a log."""
    found = re.findall(r" iteration +(\d+)/ +40 \|.* lm loss: (\S+) ", output)
    return {int(iteration): float(loss) for iteration, loss in found}


def test_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash(?: title=\"([\w.]+)\")?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [code for title, code in blocks if not title and "..." not in code]
    (tmp_path / "tiny.sh").write_text(next(code for title, code in blocks if title == "tiny.sh"))
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    first, inspect, second = commands

    output = run(first, tmp_path)
    before = losses(output)
    assert 20 in before and max(before) == 20 and "[exiting program at iteration 20]" in output
    assert "decoder.layers.0" in run(inspect, tmp_path)
    output = run(second, tmp_path)
    after = losses(output)
    assert "successfully loaded checkpoint from checkpoints/tiny [ t 1/2," in output
    assert min(after) == 21 and max(after) == 40 and after[40] < before[20] < before[1]
