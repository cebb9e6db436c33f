"""Packages that some tests need and that may be missing, for instance on a machine that has torch and pytest only."""

from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from tests.ranks import ROOT

MEGATRON = ("megatron.core", "psutil")
CONVERT = ("click", "rich", "safetensors", "transformers")
# Files and folders that are not collected without these packages.
NEEDS = {
    "unit_tests/mcore": MEGATRON,
    "unit_tests/mcore/test_muon.py": (*MEGATRON, "emerging_optimizers"),
    "unit_tests/convert": CONVERT,
    "unit_tests/checkpoint/test_inspector.py": CONVERT,
    "unit_tests/checkpoint/test_saving.py": MEGATRON,
    "unit_tests/test_benchmark_figures.py": ("psutil",),
    "unit_tests/test_benchmark_report.py": ("psutil",),
}


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those of the packages that are not installed. Nothing is imported."""
    return [name for name in packages if find_spec(name) is None]


def left_out(tests: Path) -> dict[Path, list[str]]:
    """The tests that cannot be collected here, with the packages that are missing."""
    found = {tests / name: missing(packages) for name, packages in NEEDS.items()}
    return {path: names for path, names in found.items() if names}


def project_is_installed() -> bool:
    """Whether this project can be imported without PYTHONPATH. A build leaves metadata in the checkout as well."""
    return any(Path(str(found.locate_file(""))) != ROOT for found in distributions(name="megatron-fsdp-engine"))
