"""The distributions that tests install."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.environments import pip
from tests.ranks import ROOT


class Distributions(NamedTuple):
    """The files of a release."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist, and the wheel made of the tree. Made of a copy, so that the checkout stays as it is."""
    source, made = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    outputs = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "*_output", "gpu_checks", "cluster_test"
    )
    shutil.copytree(ROOT, source, ignore=outputs)
    sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, check=True, capture_output=True, timeout=200)
    build_wheel(source, made)
    (archive,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    return Distributions(archive, wheel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of Megatron's loop."""
    from scripts.parity import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def wheel(distributions: Distributions) -> Path:
    """The wheel."""
    return distributions.wheel


def build_wheel(source: Path, folder: Path) -> None:
    """Build a wheel of a source tree or an sdist, without a registry."""
    pip(sys.executable, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(source))
