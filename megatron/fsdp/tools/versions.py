"""Prints the versions that a bug report needs.

    python -m megatron.fsdp.tools.versions

Needs torch only, and no GPU.
"""

import importlib.metadata
import platform
import sys

import torch
from torch.utils import collect_env

from megatron.fsdp.version import __version__

# Packages whose version changes what this one does. NVIDIA's megatron-fsdp has the import name of this project.
PACKAGES = (
    *("megatron-core", "megatron-fsdp", "transformer-engine", "torchao", "emerging-optimizers"),
    *("transformers", "accelerate", "peft", "trl", "lightning"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


def versions() -> dict[str, str]:
    """Return the versions of this package, Python, torch, CUDA, its driver and related packages, and the GPUs."""
    found = {
        "megatron-fsdp-engine": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "none",
        "GPUs": (collect_env.get_gpu_info(collect_env.run) or "none").replace("\n", "; "),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Print one line per version."""
    for name, version in versions().items():
        print(f"{name:<22}{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
