"""The wheel: what it holds, and that it works with torch alone; and the search for a Python to install with."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron/fsdp", "megatron_fsdp")
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; built from a copy, so that the checkout stays as it is."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-build-isolation", "-w", str(output), str(source))
    (built,) = output.glob("*.whl")
    return built


def pip(command: str, *arguments: str) -> None:
    run = [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", *arguments]
    result = subprocess.run(run, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    """Names in the wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_packages_and_nothing_else(wheel_names: set[str]) -> None:
    sources = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert wheel_names == sources | {f"{name}/py.typed" for name in PACKAGES}


def test_wheel_holds_nothing_of_megatron_core(wheel_names: set[str]) -> None:
    theirs = {str(path) for path in importlib.metadata.files("megatron-core") or ()}
    assert len(theirs) > 100
    assert wheel_names.isdisjoint(theirs)
    assert "megatron/__init__.py" not in wheel_names | theirs


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--quiet", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to torch and the packages that torch requires. An environment of its own takes gigabytes."""
    folder = tmp_path_factory.mktemp("torch_alone")
    for distribution in with_requirements("torch"):
        for path in distribution.files or ():
            link, target = folder / path.parts[0], SITE_PACKAGES / path.parts[0]
            # A copy that setuptools vendors may be found in place of a package; its files are elsewhere.
            if path.parts[0] not in ("..", "__pycache__") and target.exists() and not link.exists():
                link.symlink_to(target)
    assert (folder / "torch").exists() and not (folder / "megatron").exists()
    return folder


def with_requirements(name: str, seen: set[str] | None = None) -> Iterator[importlib.metadata.Distribution]:
    """A distribution and, of those it requires directly or indirectly, all that are installed."""
    seen = set() if seen is None else seen
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # required on other platforms
    yield distribution
    for requirement in distribution.requires or ():
        required = re.split(r"[^\w.-]", requirement)[0]
        if "extra ==" not in requirement and required not in seen:
            seen.add(required)
            yield from with_requirements(required, seen)


IMPORT_AND_TRAIN = """
import importlib.util, json
import torch, torch.distributed as dist
import megatron.fsdp, megatron_fsdp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model, optimizer = megatron_fsdp.fully_shard(
    model, torch.optim.SGD(model.parameters(), lr=0.01), fsdp_unit_modules=[torch.nn.Linear]
)
losses = []
for _ in range(2):
    loss = model(torch.ones(2, 4)).square().sum()
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
others = [name for name in ("megatron.core", "numpy", "pytest", "click") if importlib.util.find_spec(name)]
versions = [megatron.fsdp.__version__, megatron_fsdp.__version__]
print(json.dumps([megatron.fsdp.__file__, megatron_fsdp.__file__, versions, others, losses]))
"""


@pytest.mark.slow
def test_the_engine_trains_where_only_torch_is_installed(wheel: Path, installed: Path, torch_alone: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{installed}:{torch_alone}"}
    # -S: no site-packages; they would bring what the project's own environment has.
    command = [sys.executable, "-S", "-c", IMPORT_AND_TRAIN]
    result = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    engine, public, versions, others, losses = json.loads(result.stdout)
    assert Path(engine).is_relative_to(installed) and Path(public).is_relative_to(installed)
    assert versions == [wheel.name.split("-")[1]] * 2
    assert not others
    assert losses[1] < losses[0]


SCRIPTS = tuple(f"megatron-fsdp-{name}" for name in "doctor verify memory trace convert inspector".split())


@pytest.mark.slow
def test_console_scripts_start(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    assert {path.name for path in (installed / "bin").iterdir()} == set(SCRIPTS)
    for name in SCRIPTS:
        command = [str(installed / "bin" / name), "--help"]
        result = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr
        assert "usage: " in result.stdout.lower()


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)


def test_another_distribution_of_the_import_name_is_found(installed: Path, tmp_path: Path) -> None:
    """NVIDIA's megatron-fsdp, whose files are overwritten, overwrite ours, or come first in the path."""
    both, theirs = tmp_path / "both", tmp_path / "theirs"
    shutil.copytree(installed, both)
    alone = _python("import megatron_fsdp", both)
    assert alone.returncode == 0 and "megatron-fsdp" not in alone.stderr
    info = both / "megatron_fsdp-0.6.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: megatron-fsdp\nVersion: 0.6.1\n")
    (info / "RECORD").write_text("megatron_fsdp/__init__.py,,\n")
    remedy = "pip uninstall megatron-fsdp && pip install --force-reinstall --no-deps megatron-fsdp-engine"
    assert remedy in _python("import megatron_fsdp", both).stderr

    ask = "from megatron.fsdp.helpers.import_name import conflict; print(conflict())"
    (both / "megatron_fsdp" / "__init__.py").write_text("")
    assert remedy in _python(ask, both).stdout
    (theirs / "megatron_fsdp").mkdir(parents=True)
    (theirs / "megatron_fsdp" / "__init__.py").write_text("")
    other = _python(f"import sys; sys.path[:0] = [{str(theirs)!r}, {str(installed)!r}]; {ask}", installed).stdout
    assert other.startswith(f"import megatron_fsdp finds {theirs}")


def test_extras_name_no_unrelated_project(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(name="megatron-fsdp-engine", path=[str(installed)])
    assert {"te", "apex"} <= set(found.metadata.get_all("Provides-Extra"))
    required = {extra: [x for x in found.requires if f'"{extra}"' in x] for extra in ("te", "apex")}
    assert required["apex"] == [], "apex on PyPI is another project"
    assert len(required["te"]) == 1 and required["te"][0].startswith("transformer-engine[")


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
