"""The versions of torch that are tested: one list, a warning about others, and the documents that repeat the list."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron.fsdp.helpers import patches
from megatron.fsdp.helpers.patches import Versions
from megatron.fsdp.version import TRIED_TORCH
from tests.models import TinyModel, logged
from tests.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_makefile_tests_the_versions_of_the_list() -> None:
    found = re.search(r"^TORCH_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None and pinned is not None
    others = [_minor(version) for version in found[1].split()]
    assert sorted([*others, _minor(pinned[1])]) == list(TRIED_TORCH), "oldest first, and those of .venv as well"
    assert (others[0], others[-1]) == (TRIED_TORCH[0], TRIED_TORCH[-1]), "CI runs the oldest and the newest"


def test_the_metadata_names_the_versions() -> None:
    """The README is the long description of the wheel."""
    *others, last = TRIED_TORCH
    assert f"torch {', '.join(others)} and {last}" in (ROOT / "README.md").read_text()
    assert f'"torch>={TRIED_TORCH[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_quick_start_names_the_python_of_megatron_core() -> None:
    oldest = re.search(r"megatron-core.*python_version >= '([\d.]+)'", (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"Python {oldest[1]} or later" in (ROOT / "docs" / "start" / "megatron.md").read_text()


def test_a_tried_version_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    patches.warn_if_untried.cache_clear()
    for version in TRIED_TORCH:
        patches.warn_if_untried(patches.TORCH, f"{version}.1+cu130")
    assert not caplog.records


def _warnings() -> list[str]:
    from megatron_fsdp import fully_shard_model

    patches.warn_if_untried.cache_clear()
    with patch.object(patches, "TORCH", Versions("torch", ("1.0", "1.2"))), logged(by=patches.logger.name) as said:
        fully_shard_model(TinyModel())
        fully_shard_model(TinyModel())
    return said


def test_another_version_warns_once_when_a_model_is_sharded(ranks: RankPool) -> None:
    expected = f"Megatron-FSDP was not tested with torch {torch.__version__}. It was tested with torch 1.0, 1.2."
    assert ranks.run(1, _warnings) == [[expected]]
