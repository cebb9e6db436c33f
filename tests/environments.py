"""Fresh environments with a wheel of this project and torch, for any version of Python."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
# The same file works on every version of Python, and most of what torch's CUDA build installs is in there.
_PLAIN_LIBRARIES = re.compile(r"nvidia.*")
# Files for one version of Python, which torch does not need on a CPU. Their metadata keeps pip from installing them.
_CUDA_ONLY = re.compile(r"(triton|cuda)\b.*")


def interpreter(version: str) -> Path | None:
    """A Python of a version such as ``3.10``, from PATH or from pyenv's versions; None if there is none that starts."""
    found = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for path in map(Path, filter(None, found)):
        if subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return None


def make_environment(folder: Path, python: Path, *requirements: str) -> Path:
    """Create an environment with the version of torch that runs this, and what pip installs.

    torch is linked if this environment has the same version of Python, and otherwise installed without the libraries
    that it requires. These are linked: they take gigabytes, and are the same for every version of Python.

    Args:
        folder: Where to create it.
        python: The version of Python to create it with.
        requirements: What pip installs.

    Returns:
        The environment's Python.
    """
    run = [python, "-m", "venv", folder]
    subprocess.run(run, check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    same = site.parent.name == SITE_PACKAGES.parent.name
    for distribution in _with_requirements("torch"):
        name = distribution.metadata["Name"].lower()
        metadata_only = _CUDA_ONLY.fullmatch(name) is not None
        if same or metadata_only or _PLAIN_LIBRARIES.fullmatch(name):
            _link(distribution, site, metadata_only and not same)
    made = folder / "bin" / "python"
    if not same:
        pip(made, "install", "--no-deps", f"torch=={importlib.metadata.version('torch').partition('+')[0]}")
    pip(made, "install", *requirements)
    return made


def pip(python: Path | str, *arguments: str) -> None:
    """Run pip with a version of Python; an AssertionError shows what it printed.

    ``-I`` keeps what PYTHONPATH names, such as this checkout, from counting as installed.
    """
    run = [str(python), "-I", "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(run, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr


def run_in(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with nothing of this environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=280)


def _link(distribution: importlib.metadata.Distribution, site: Path, metadata_only: bool) -> None:
    for name in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
        link, target = site / name, SITE_PACKAGES / name
        # A copy that setuptools vendors may be found in place of a package; its files are elsewhere.
        if not target.exists() or link.exists() or (metadata_only and not name.endswith(".dist-info")):
            continue
        if target.is_dir():
            # Link files, not folders: what pip installs into a linked folder would change this environment, too.
            shutil.copytree(target, link, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            link.symlink_to(target)


def _with_requirements(name: str, seen: set[str] | None = None) -> Iterator[importlib.metadata.Distribution]:
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
            yield from _with_requirements(required, seen)
