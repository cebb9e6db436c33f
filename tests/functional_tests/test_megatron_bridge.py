"""Megatron-Bridge trains, saves, resumes, exports and imports through our adapter, on the CPU.

Its wheel is installed, without its dependencies, in a folder of its own. Stand-ins replace what has no build for a CPU.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from megatron.fsdp.convert.huggingface_commands import COMMANDS
from megatron.fsdp.mcore.patches import MEGATRON_BRIDGE
from tests.huggingface_models import save
from tests.launch import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]

EXPORT, IMPORT = COMMANDS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Megatron-Bridge."""
    folder = tmp_path_factory.mktemp("site")
    package = f"megatron-bridge=={MEGATRON_BRIDGE.checked[-1]}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=280)
    if installed.returncode:
        pytest.skip(f"cannot install {package}: {installed.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("llama")
    save("llama", folder)
    return folder


def run(site: Path, *arguments: object, ranks: int = 2) -> str:
    """Run ``tests/bridge_runs.py`` and return what it prints."""
    command = ["-m", "tests.bridge_runs", *map(str, arguments)]
    result = torchrun(command, ranks, timeout=280, path=(site,))
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-5000:]
    return output


@functools.cache
def steps(site: Path, *arguments: object, ranks: int = 2) -> dict[int, list[float]]:
    """The loss and the gradient norm of every step."""
    lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", run(site, *arguments, ranks=ranks))
    return {int(step): [float(loss), float(norm)] for step, loss, norm in lines}
