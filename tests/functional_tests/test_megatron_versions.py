"""Versions of megatron-core: with each, training equals its own DDP, saves, and resumes in new processes."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from megatron.fsdp.version import TRIED_MEGATRON
from tests.functional_tests.test_training_loop import DDP, OURS, numbers, train
from tests.launch import ROOT, printed, python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]

VERSIONS = ("0.18.2", "0.19.0", "0.19.2")


@pytest.fixture(scope="module", params=VERSIONS)
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a version of megatron-core and nothing else; empty if that version is installed."""
    version = request.param
    if version == importlib.metadata.version("megatron-core"):
        return ""
    folder = str(tmp_path_factory.mktemp("packages"))
    wanted = f"megatron-core=={version}"
    result = python("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wanted)
    if result.returncode:
        pytest.skip(f"cannot install {wanted}: {result.stderr.strip().splitlines()[-1]}")
    assert _imported(folder) == [version, folder]
    return folder


def _imported(folder: str) -> list[str]:
    """The version of megatron.core that a process imports, and the folder of megatron.training."""
    code = """
import importlib.util, sys
from megatron.core import package_info
print(package_info.__version__, *importlib.util.find_spec("megatron.training").submodule_search_locations)
"""
    version, training = printed(python("-c", code, packages=folder)).split()
    return [version, training.removesuffix("/megatron/training")]


@pytest.mark.parametrize("parallel", ["", "--tensor-model-parallel-size 2"], ids=["ZeRO-3", "TP 2"])
def test_trains_as_its_ddp_does_and_resumes(packages: str, parallel: str, tmp_path: Path) -> None:
    counted = f"{parallel} --log-num-zeros-in-grad"
    ddp = train(f"{DDP} {counted}", packages=packages)
    ours = train(f"{OURS} {counted} --save {tmp_path}", packages=packages)
    assert list(ours.iterations) == list(ddp.iterations) == [1, 2, 3, 4]
    assert numbers(ours) == pytest.approx(numbers(ddp), rel=1e-6)
    zeros = r"num zeros: (\S+)"
    assert re.findall(zeros, ours.output) == re.findall(zeros, ddp.output) != []
    assert "was not tested with megatron-core" not in ours.output
    resumed = train(f"{OURS} {counted} --load {tmp_path} --ckpt-step 2", packages=packages)
    assert resumed.iterations[3] == ours.iterations[3]
    assert resumed.validation == ours.validation


def test_the_versions_are_tried_ones() -> None:
    assert set(VERSIONS) <= set(TRIED_MEGATRON)
    assert importlib.metadata.version("megatron-core") in VERSIONS
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"| {version} |" in page for version in TRIED_MEGATRON)
