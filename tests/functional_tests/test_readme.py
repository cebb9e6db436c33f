"""The README's example runs as it stands there, and what the README points to exists."""

import re
from pathlib import Path

import pytest

from tests.launch import torchrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


def test_the_example_for_pytorch_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", PAGES[0].read_text(), flags=re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(example + '\nprint(f"loss {loss.item():.3f}")\ntorch.distributed.destroy_process_group()\n')
    result = torchrun([str(script)], ranks=2, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d{3})", result.stdout)]
    assert len(losses) == 2 and all(0 < loss < 1.5 for loss in losses)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
