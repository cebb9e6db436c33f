"""The report of versions for a bug report."""

import subprocess
import sys

import pytest
import torch

from megatron.fsdp.tools.versions import main, versions
from megatron.fsdp.version import __version__


def test_names_what_a_bug_report_needs() -> None:
    found = versions()
    assert found["megatron-fsdp-engine"] == __version__
    assert found["torch"] == torch.__version__
    assert found["GPUs"] != "none" or not torch.cuda.is_available()
    assert {"Python", "CUDA of torch", "driver"} <= set(found)
    assert all(text and "\n" not in text for text in found.values())


def test_leaves_out_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.fsdp.tools.versions.PACKAGES", ("pytest", "no-such-package"))
    found = versions()
    assert found["pytest"] == pytest.__version__ and "no-such-package" not in found


def test_prints_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == [*versions()]


def test_does_not_import_megatron_core() -> None:
    code = "import sys, megatron.fsdp.tools.versions; print('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
