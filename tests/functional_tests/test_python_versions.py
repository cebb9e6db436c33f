"""The engine without extras on the oldest and the newest supported version of Python: it imports, trains and resumes.

Each version gets a fresh environment with the wheel. ``make python-versions`` runs this, and test_packaging.py, whose
fresh environment has the version in between.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import interpreter, make_environment, run_in
from tests.launch import printed
from tests.ranks import ROOT

# Installing torch may take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSIONS = ("3.10", "3.13")
NEEDS = ("pytest", "pytest-timeout", "hypothesis")
# Quick tests of what depends on Python: pickles, names, errors.
UNIT_TESTS = ("checkpoint/test_safe_pickle.py", "naming", "test_forward_methods.py")

# Modules that need more than torch are those that fail for want of one of these.
IMPORT_ALL = """
import importlib, pkgutil, sys
import megatron.fsdp, megatron_fsdp

extras = {"megatron.core", "psutil", "click", "torchao", "accelerate", "transformers", "lightning", "pytorch_lightning"}
imported = []
for package in (megatron.fsdp, megatron_fsdp):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            imported.append(importlib.import_module(module.name).__name__)
        except ModuleNotFoundError as error:
            assert error.name in extras, error
        except ImportError as error:
            assert sys.version_info < (3, 12) and "megatron-core needs Python 3.12" in str(error), error
assert len(imported) > 100, imported
print(megatron.fsdp.__file__)
"""


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python of this version with the wheel, torch and what the unit tests need. It takes more than a gigabyte."""
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"there is no Python {request.param} on PATH or among pyenv's versions")
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    yield make_environment(folder, found, str(wheel), *NEEDS)
    shutil.rmtree(folder)


def run(python: Path, folder: Path, *arguments: object) -> str:
    return printed(run_in(folder, python, *arguments))


def test_every_module_is_imported(python: Path, tmp_path: Path) -> None:
    assert "site-packages" in run(python, tmp_path, "-W", "error::SyntaxWarning", "-c", IMPORT_ALL)


def test_training_resumes_in_a_new_process(python: Path, tmp_path: Path) -> None:
    script = ROOT / "tests" / "functional_tests" / "engine_alone.py"
    train = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path / "checkpoint")
    losses = [loss for _ in range(2) for loss in json.loads(run(python, tmp_path, *train))]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 6
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_unit_tests(python: Path, tmp_path: Path) -> None:
    paths = [ROOT / "tests" / "unit_tests" / name for name in UNIT_TESTS]
    options = ("-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-m", "not slow")
    summary = run(python, tmp_path, "-m", "pytest", *options, *paths)
    assert " passed" in summary and "failed" not in summary
