"""The README's example runs unchanged, and all links in the documentation lead to existing files."""

import re
from pathlib import Path

import pytest

from megatron.fsdp.checkpoint.newest import newest_complete_checkpoint
from tests.docs_code import Command, Page, run_command
from tests.launch import ROOT, printed, torchrun

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


def test_the_example_for_pytorch_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(import os\n.*?)```", PAGES[0].read_text(), flags=re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(example)
    runs = [torchrun([script], ranks=2, folder=tmp_path) for _ in range(2)]
    for result in runs:
        printed(result)
        assert "destroy_process_group" not in result.stderr and "Error" not in result.stderr, result.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\d+\.\d{3})$", runs[0].stdout, flags=re.MULTILINE)]
    assert len(losses) == 10 and losses[-1] < losses[0] < 1.5
    assert newest_complete_checkpoint(tmp_path / "run") == tmp_path / "run" / "step_10"
    # The output is reproducible.
    assert runs[0].stdout == runs[1].stdout


def test_the_commands_for_megatron_run(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(ARGS=.*?)```", PAGES[0].read_text(), flags=re.DOTALL)
    assert block.count("--train-iters 20 ") == 1
    shorter = block.replace("--train-iters 20 ", "--train-iters 2 ")
    # A doctor that finds an error ends the block.
    output = run_command(Page(PAGES[0]), Command(0, shorter), tmp_path, timeout=280)
    assert "validation loss at iteration 2 on validation set" in output, output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
