"""The examples for Hugging Face's libraries: sharded on two ranks they train as they do unsharded in one process."""

import contextlib
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.huggingface_training import fresh_process, history
from tests.launch import ROOT, printed, torchrun
from tests.ranks import RankPool

pytest.importorskip("trl")
FOLDER = ROOT / "examples" / "frameworks"
NAMES = ("trainer", "accelerate_loop", "sft")


def run(name: str, folder: Path, *options: str) -> list[float]:
    """Run an example in this process; return the losses that it prints."""
    fresh_process()
    if dist.get_world_size() == 1:  # as without a launcher
        dist.destroy_process_group()
        os.environ.pop("LOCAL_RANK", None)
    output = io.StringIO()
    with patch.object(sys, "argv", [name, str(folder), *options]), contextlib.redirect_stdout(output):
        names = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    if "trainer" in names:
        return history(names["trainer"])["loss"]
    return [float(loss) for loss in re.findall(r"loss (\S+)", output.getvalue())]


@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_unsharded(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (expected,) = ranks.run(1, run, name, tmp_path / "1")
    assert len(expected) >= 3 and expected[-1] < expected[0] - 0.1
    assert ranks.run(2, run, name, tmp_path / "2")[0] == pytest.approx(expected, rel=1e-3)
    files = [sorted(path.name for path in (tmp_path / count / "final").iterdir()) for count in "12"]
    assert files[0] == files[1] and "model.safetensors" in files[0]


def test_adapters(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, run, "sft", tmp_path / "1", "--lora")
    assert ranks.run(2, run, "sft", tmp_path / "2", "--lora")[0] == pytest.approx(expected, rel=1e-3)
    assert (tmp_path / "2" / "final" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 60


def launch(name: str, folder: Path) -> None:
    printed(torchrun([FOLDER / f"{name}.py", folder], ranks=2, HF_HUB_OFFLINE="1"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["accelerate_loop", "sft"])
def test_with_torchrun(tmp_path: Path, name: str) -> None:
    launch(name, tmp_path)
    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resuming_in_new_processes_is_bit_equal(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    launch("trainer", tmp_path)
    expected = load_file(tmp_path / "final" / "model.safetensors")
    shutil.rmtree(tmp_path / "final")
    shutil.rmtree(tmp_path / "checkpoint-20")
    launch("trainer", tmp_path)
    resumed = load_file(tmp_path / "final" / "model.safetensors")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
