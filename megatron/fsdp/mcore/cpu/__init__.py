"""Runs unmodified megatron.core and megatron.training on a machine without CUDA, over gloo.

    from megatron.fsdp.mcore import cpu

    cpu.enable()  # before anything of megatron.core or megatron.training is imported

Where CUDA is present, ``enable()`` changes nothing and returns False, so a script can call it unconditionally. The
tables ``CHANGES``, ``METHODS`` and ``MEGATRON`` list what it changes otherwise, and ``ADJUSTMENTS`` the command-line
arguments that it sets. Only Megatron's modules see the changes to PyTorch. The engine, this adapter and the user's
script do not, except that ``.cuda()`` and ``.pin_memory()`` do nothing in the script, which moves its batches.
"""

from __future__ import annotations

import logging
import sys

import torch

from megatron.fsdp.mcore.cpu.arguments import ADJUSTMENTS, Adjustment
from megatron.fsdp.mcore.cpu.changes import CHANGES, MEGATRON, METHODS, Change, Scope
from megatron.fsdp.mcore.cpu.imports import MegatronFinder
from megatron.fsdp.mcore.cpu.replacements import PACKAGES
from megatron.fsdp.mcore.cpu.torch_view import is_within

__all__ = ["ADJUSTMENTS", "Adjustment", "CHANGES", "Change", "MEGATRON", "METHODS", "Scope", "enable", "is_enabled"]


def is_enabled() -> bool:
    """Whether Megatron's modules run on the CPU in this process."""
    return any(isinstance(finder, MegatronFinder) for finder in sys.meta_path)


def enable() -> bool:
    """Make Megatron run on the CPU if there is no CUDA device. Calling it again is harmless.

    Returns:
        True if Megatron runs on the CPU, False if CUDA is present and nothing was changed.

    Raises:
        RuntimeError: Megatron modules have been imported before; they keep what they took from PyTorch.
    """
    if torch.cuda.is_available():
        return False
    if is_enabled():
        return True
    imported = sorted(name for name in sys.modules if is_within(name, PACKAGES))
    if imported:
        raise RuntimeError(
            "megatron.fsdp.mcore.cpu.enable(): expected to be called before any module of "
            f"{' or '.join(PACKAGES)} is imported; {imported[0]} and {len(imported) - 1} more are imported already."
        )
    METHODS.install()
    # The CPU's random numbers stand in for the GPU's, so this warning would appear in every forward.
    warning = "CPU RNG state changed within GPU RNG context"
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: record.msg != warning)
    # A package of optimizers, which Megatron imports, would be compiled.
    sys.meta_path.insert(0, MegatronFinder((*PACKAGES, "emerging_optimizers"), CHANGES))
    MEGATRON.install()
    return True
