"""The sdist and the wheel: what they hold, and that the wheel works once installed; the search for a Python."""

import importlib.metadata
import json
import os
import re
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments import make_environment, pip, run_in
from tests.functional_tests.conftest import Distributions, build_wheel
from tests.launch import ROOT, Ended, printed, python, start, torchrun

PACKAGES = ("megatron/fsdp", "megatron_fsdp")


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


def test_the_sdist_holds_what_the_wheel_is_built_of(distributions: Distributions, tmp_path: Path) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    packages = {"megatron/fsdp", "megatron_fsdp", "megatron_fsdp_engine.egg-info"}
    rest = {name for name in names if not name.startswith(tuple(f"{package}/" for package in packages))}
    files = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert rest == {"", "megatron", *packages, *files}

    build_wheel(distributions.sdist, tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == distributions.wheel.name
    assert _contents(again) == _contents(distributions.wheel)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip(sys.executable, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of a fresh environment, in which pip has installed the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("fresh")
    yield make_environment(folder, Path(sys.executable), str(wheel))
    shutil.rmtree(folder)


INSTALLED = """
import importlib.util, json, megatron.fsdp, megatron_fsdp
others = [name for name in ("megatron.core", "pytest", "click") if importlib.util.find_spec(name)]
print(json.dumps([megatron.fsdp.__file__, megatron_fsdp.__file__, megatron.fsdp.__version__, others]))
"""


@pytest.mark.slow
def test_the_readmes_example_trains_in_a_fresh_environment(wheel: Path, fresh: Path, tmp_path: Path) -> None:
    *files, version, others = json.loads(run_in(tmp_path, fresh, "-c", INSTALLED).stdout)
    assert all(Path(file).is_relative_to(fresh.parents[1]) for file in files)
    assert version == wheel.name.split("-")[1] and not others
    (example,) = re.findall(r"```python\n(import os\n.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "script.py").write_text(example)
    torchrun = (fresh, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    result = run_in(tmp_path, *torchrun, "script.py")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", result.stdout, flags=re.MULTILINE)]
    assert len(losses) == 10 and losses[-1] < losses[0], result.stderr
    assert (tmp_path / "run" / "step_10" / ".metadata").is_file()


CONVERT = "click, rich not found: run pip install '.[convert]' in the checkout"
MCORE = "megatron.core, megatron.training, psutil not found: run pip install '.[mcore]' in the checkout"
# What is missing for each command in an environment without extras; empty if it prints its help.
COMMANDS = {
    "megatron-fsdp-inspector --help": CONVERT,
    "megatron-fsdp-doctor --help": "",
    "megatron-fsdp-doctor script.py": MCORE,
    "megatron-fsdp-plan --help": "",
    "megatron-fsdp-verify --help": "",
    "megatron-fsdp-verify script.py": MCORE,
    "python -m megatron.fsdp.launch script.py": MCORE,
    "python -m megatron.fsdp.pretrain_gpt --help": MCORE,
    "python -m megatron.fsdp.trace --help": "",
}
SCRIPTS = {command.split()[0] for command in COMMANDS} - {"python"}


@pytest.mark.slow
def test_commands_without_their_extra_say_what_to_install(fresh: Path, tmp_path: Path) -> None:
    assert {path.name for path in fresh.parent.glob("megatron-fsdp-*")} == SCRIPTS
    (tmp_path / "script.py").touch()
    for command, problem in COMMANDS.items():
        name, *arguments = command.split()
        result = run_in(tmp_path, fresh.with_name(name), *arguments)
        if problem:
            assert (result.returncode, result.stdout) == (2, ""), command
            assert result.stderr.endswith(f"error: {problem}\n"), result.stderr
        else:
            assert result.returncode == 0 and "usage: " in result.stdout, result.stderr


@pytest.mark.slow
def test_commands_with_their_extra_print_help(installed: Path) -> None:
    for name in sorted(SCRIPTS):
        command = [installed / "bin" / name, "--help"]
        assert "usage: " in printed(start(command, folder=installed, PYTHONPATH=str(installed))).lower()


# As where only torch and numpy are.
SELF_TEST = """
import os, runpy, sys
sys.modules.update(dict.fromkeys(("megatron.core", "click", "psutil", "pytest", "rich", "safetensors", "transformers")))
import megatron.fsdp
assert megatron.fsdp.__file__.startswith(os.environ["PYTHONPATH"])
runpy.run_module("megatron.fsdp.selftest", run_name="__main__")
"""


def test_the_self_test_runs_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SELF_TEST)
    begin = time.monotonic()
    out = printed(torchrun(["script.py", "--cpu"], 2, folder=tmp_path, PYTHONPATH=str(installed)))
    assert time.monotonic() - begin < 180
    (verdict,) = [line for line in out.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert verdict == out.splitlines()[-1] and verdict.startswith("PASSED: 15 checks")
    assert (tmp_path / "selftest.txt").read_text().startswith("PASSED: ")


def _python(code: str, folder: Path) -> Ended:
    return python("-c", code, folder=folder, PYTHONPATH=str(folder))


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
    remedy = "pip uninstall megatron-fsdp && pip install --force-reinstall --no-deps . (in the checkout)"
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
    assert "apex" not in found.metadata.get_all("Provides-Extra"), "apex on PyPI is another project"
    (required,) = [each for each in found.requires if '"te"' in each]
    assert required.startswith("transformer-engine[")


def find_python(path: Path, home: Path) -> Ended:
    return start(["/bin/sh", ROOT / "scripts" / "find_python.sh"], PATH=str(path), HOME=str(home), PYENV_ROOT="")


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
