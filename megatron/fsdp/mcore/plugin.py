"""Makes an unmodified Megatron-Core, and its training loop, use our wrapper wherever it would use its own.

``install()`` replaces the names in ``PATCHES`` and nothing else; ``uninstall()`` puts them back.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = ("0.19.2",)


@dataclass(frozen=True)
class Patch:
    """One name of Megatron that is replaced.

    Attributes:
        module: Module that has the name.
        name: The name.
        why: What Megatron does with it.
        replacement: Makes the new value from the old one.
    """

    module: str
    name: str
    why: str
    replacement: Callable[[Any], Any]


# What install() was given in place of the wrapper.
_stand_in: Callable[..., Any] | None = None


def _wrapper(original: Any) -> Any:
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    return FullyShardedDataParallel if _stand_in is None else _stand_in


def _checked_validate_args(original: Any) -> Any:
    from megatron.fsdp.mcore.arguments import checking_validate_args

    return checking_validate_args(original)


def _preprocess_state_dict(original: Any) -> Any:
    from megatron.fsdp.mcore.checkpoint import preprocess_fsdp_dtensor_state_dict

    return preprocess_fsdp_dtensor_state_dict


def _whole_norm(original: Any) -> Any:
    from megatron.fsdp.mcore.adapter import adding_up_over_instances

    return adding_up_over_instances(original)


PATCHES = (
    Patch(
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        "FullyShardedDataParallel",
        "unwrap_model() imports it when it runs, to see which wrappers to take off; so do modules imported later",
        _wrapper,
    ),
    Patch(
        "megatron.core.distributed",
        "FullyShardedDataParallel",
        "what scripts import to wrap a model",
        _wrapper,
    ),
    Patch(
        "megatron.training.training",
        "megatron_FSDP",
        "get_model() wraps with it; train() tells by it that a model chunk has no_sync()",
        _wrapper,
    ),
    Patch(
        "megatron.training.models.dist_utils",
        "FullyShardedDataParallel",
        "model builders wrap with it",
        _wrapper,
    ),
    Patch(
        "megatron.training.training",
        "get_megatron_optimizer",
        "its gradient norm is that of one optimizer instance, which with the outer strategy optim has a part only",
        _whole_norm,
    ),
    Patch(
        "megatron.training.arguments",
        "validate_args",
        "checks the command line: what does not fit together is said before anything is allocated",
        _checked_validate_args,
    ),
    Patch(
        "megatron.training.checkpointing",
        "preprocess_fsdp_dtensor_state_dict",
        "prepares tensors for an fsdp_dtensor checkpoint; ours are described by the layout, with no communication",
        _preprocess_state_dict,
    ),
)

_originals: dict[Patch, Any] = {}


def is_installed() -> bool:
    """True between ``install()`` and ``uninstall()``."""
    return bool(_originals)


def install(stand_in: Callable[..., Any] | None = None) -> None:
    """Make Megatron use our wrapper. Calling it again changes nothing.

    Call it before the model is built, and best before the command line is parsed, so that it is checked too.

    Args:
        stand_in: Called in place of the wrapper, with its arguments.

    Raises:
        ImportError: Megatron-Core is not installed, or lacks a name that has to be replaced; the message names it
            and the supported versions.
    """
    if _originals:
        return
    global _stand_in
    _stand_in = stand_in
    targets = [(patch, _target(patch)) for patch in PATCHES]
    for patch, module in targets:
        _originals[patch] = getattr(module, patch.name)
        setattr(module, patch.name, patch.replacement(_originals[patch]))


def uninstall() -> None:
    """Put everything back that ``install()`` replaced."""
    while _originals:
        patch, original = _originals.popitem()
        setattr(importlib.import_module(patch.module), patch.name, original)


def _target(patch: Patch) -> Any:
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        module = importlib.import_module(patch.module)
    except ImportError as error:
        raise ImportError(
            f"megatron.fsdp.mcore.install(): cannot import {patch.module} ({error}). It needs megatron-core[training] "
            f"of version {supported}; installed is megatron-core {version}."
        ) from error
    if not hasattr(module, patch.name):
        raise ImportError(
            f"megatron.fsdp.mcore.install(): {patch.module} has no {patch.name} ({patch.why}). Supported versions of "
            f"megatron-core: {supported}; installed: {version}."
        )
    return module
