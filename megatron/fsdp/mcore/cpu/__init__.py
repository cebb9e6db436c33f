"""Runs unmodified megatron.core and megatron.training on a machine without CUDA, over gloo.

    from megatron.fsdp.mcore import cpu

    cpu.enable()  # before anything of megatron.core or megatron.training is imported

Where CUDA is present, `enable()` changes nothing and returns False, so a script can call it unconditionally. What it
changes otherwise is the table `CHANGES`, and which command-line arguments it adjusts is the table `ADJUSTMENTS`.
Only Megatron's own modules see the changes; the engine, this adapter and the user's script have torch as it is.
"""

from __future__ import annotations

import sys

import torch

from megatron.fsdp.mcore.cpu.arguments import ADJUSTMENTS, Adjustment
from megatron.fsdp.mcore.cpu.changes import CHANGES, PACKAGES, Change, Scope
from megatron.fsdp.mcore.cpu.imports import MegatronFinder
from megatron.fsdp.mcore.cpu.torch_view import is_within

__all__ = ["ADJUSTMENTS", "Adjustment", "CHANGES", "Change", "Scope", "enable", "is_enabled"]


def is_enabled() -> bool:
    """Tell whether Megatron's modules run on the CPU in this process."""
    return any(isinstance(finder, MegatronFinder) for finder in sys.meta_path)


def enable() -> bool:
    """Let Megatron run on the CPU if there is no CUDA device. Calling it again is harmless.

    Returns:
        True if Megatron runs on the CPU, False if CUDA is present and nothing was changed.

    Raises:
        RuntimeError: Megatron modules were imported before; what they took from torch cannot be taken back.
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
    for change in CHANGES:
        if change.scope is Scope.CALL:
            change.apply()
    sys.meta_path.insert(0, MegatronFinder(PACKAGES, CHANGES))
    return True
