"""Installs NVIDIA's Megatron-FSDP from PyPI into a separate folder, because it has this project's import name.

The repository contains none of its source. The installed copy is patched: device names and ``torch.cuda`` for the CPU,
and imports of megatron-core, with which the pinned version is not always compatible.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench"
PIN = Path(__file__).parent / "original.txt"

# Patterns and replacements for every file.
HIDE_MEGATRON = (
    (r"\bfrom megatron\.core", "from megatron_is_hidden.core"),
    (r"\bimport megatron\.core", "import megatron_is_hidden.core"),
)
# The copy uses the suite's emulated streams instead of torch.cuda.
FOR_CPU = (
    *HIDE_MEGATRON,
    (r"(?m)^import torch$", "import torch\nfrom benchmarks.peers import streams as _cuda"),
    (r"""f(["'])cuda:\{torch\.cuda\.current_device\(\)\}\1""", '"cpu"'),
    (r"""(["'])cuda\1""", '"cpu"'),
    (r"\.cuda\(\)", ""),
    (r"\btorch\.cuda\.(?=[A-Za-z])", "_cuda."),
)
# Each of these must match exactly once in param_and_grad_buffer.py, so that another version is not patched partially.
REDUCTION = (
    (r"with _coalescing_manager\(dp_group\):", "with _cuda.coalescing(dp_group):"),
    (
        r"for local_grad, reduced_grad in grad_accum_closure:",
        "for local_grad, reduced_grad in _cuda.after_collectives(\n"
        '                grad_accum_closure, ddp_config.data_parallel_sharding_strategy in ("no_shard", "optim")\n'
        "            ):",
    ),
)


class NotInstalled(RuntimeError):
    """The package of a peer is not available. The message contains the reason."""


def on_path(device: str) -> Path:
    """The folder to put on PYTHONPATH before this repository. It is created if necessary.

    Raises:
        NotInstalled: pip could not install the package, or the patches do not match its source.
    """
    plain = FOLDER / "original"
    if not (plain / "megatron_fsdp" / "__init__.py").exists():
        _install(plain)
    changed = FOLDER / f"original_{device}"
    change = for_cpu if device == "cpu" else for_cuda
    made_of = changed / "made_of"
    recipe = Path(__file__).read_text()
    if not made_of.exists() or made_of.read_text() != recipe:
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(plain / "megatron_fsdp", changed / "megatron_fsdp")
        for path in changed.rglob("*.py"):
            path.write_text(change(path.read_text(), path.name))
        made_of.write_text(recipe)
    return changed


def for_cpu(source: str, name: str) -> str:
    """Patch the source of one file to run on a CPU."""
    for pattern, replacement in FOR_CPU:
        source = re.sub(pattern, replacement, source)
    if name == "param_and_grad_buffer.py":
        for pattern, replacement in REDUCTION:
            source, count = re.subn(pattern, replacement, source)
            if count != 1:
                raise NotInstalled(f"{name} of NVIDIA's package: expected {pattern!r} once; found it {count} times")
    return source


def for_cuda(source: str, name: str) -> str:
    """Patch the source of one file to run with any version of megatron-core."""
    for pattern, replacement in HIDE_MEGATRON:
        source = re.sub(pattern, replacement, source)
    return source


# Why pip failed, if it did. On a machine without a registry, that takes a while, and another try would not help.
_failure: list[str] = []


def _install(folder: Path) -> None:
    if _failure:
        raise NotInstalled(_failure[0])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--target", str(folder), "--requirement", str(PIN)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        _failure.append(f"pip could not install {PIN.name}: {result.stderr.strip()[-500:]}")
        raise NotInstalled(_failure[0])
