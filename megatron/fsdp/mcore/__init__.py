"""The adapter to Megatron-Core: the wrapper, the plugin that makes Megatron use it, and Megatron on CPU.

Importing this package imports nothing of Megatron-Core, so that :mod:`megatron.fsdp.mcore.cpu` can come first.
"""

from typing import TYPE_CHECKING

from megatron.fsdp.helpers.extras import too_old_for_megatron
from megatron.fsdp.mcore.patches import install, is_installed, uninstall

if TYPE_CHECKING:
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

if _problem := too_old_for_megatron():
    raise ImportError(f"{_problem}. Without megatron.fsdp.mcore, megatron.fsdp runs on Python 3.10 and later.")

__all__ = ["FullyShardedDataParallel", "install", "is_installed", "uninstall"]


def __getattr__(name: str) -> object:
    if name == "FullyShardedDataParallel":
        from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

        return FullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
