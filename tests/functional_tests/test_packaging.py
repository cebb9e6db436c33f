"""The contents of the wheel, and the search for a Python to install it with."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron/fsdp", "megatron_fsdp")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel, without its metadata. It is built from a copy, to leave the checkout unchanged."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(output),
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = output.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_contains_the_packages_and_nothing_else(wheel_names: set[str]) -> None:
    expected = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert wheel_names == expected


def test_wheel_contains_no_files_of_megatron_core(wheel_names: set[str]) -> None:
    theirs = {str(path) for path in files("megatron-core") or ()}
    assert len(theirs) > 100
    assert wheel_names.isdisjoint(theirs)
    assert "megatron/__init__.py" not in wheel_names | theirs


def find_python(path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "HOME": str(home)}
    script = str(ROOT / "scripts" / "find_python.sh")
    return subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True, timeout=60)


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_without_a_python_it_prints_one_sentence_and_exits_with_2(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    write_program(tmp_path / "bin" / "python3", "exit 1")
    result = find_python(tmp_path / "bin", tmp_path / "home")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("No working Python >= 3.12") and result.stderr.count("\n") == 1


def test_a_broken_shim_does_not_hide_a_working_python(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "python3.12", "exit 127")
    works = write_program(
        tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12", f'exec "{sys.executable}" "$@"'
    )
    result = find_python(tmp_path / "bin", tmp_path / "home")
    assert (result.returncode, result.stdout) == (0, f"{works}\n")


def test_the_scripts_are_executable() -> None:
    for name in (".ci/run", "scripts/find_python.sh"):
        assert os.access(ROOT / name, os.X_OK), name
