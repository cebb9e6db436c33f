"""Makes an unmodified Megatron-Core, and its training loop, use our wrapper wherever it would use its own.

``install()`` replaces the names in ``PATCHES`` and nothing else; ``uninstall()`` puts them back.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
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
        name: The name, or that of a class and, behind a dot, of its method.
        why: What Megatron does with it.
        replacement: Makes the new value from the old one.
    """

    module: str
    name: str
    why: str
    replacement: Callable[[Any], Any]

    @property
    def attribute(self) -> str:
        """What is set, of the module or of a class in it."""
        return self.name.rpartition(".")[2]


# What install() was given in place of the wrapper.
_stand_in: Callable[..., Any] | None = None


def _wrapper(original: Any) -> Any:
    from megatron.fsdp.mcore.adapter import FullyShardedDataParallel

    return FullyShardedDataParallel if _stand_in is None else _stand_in


def _checked_validate_args(original: Any) -> Any:
    from megatron.fsdp.mcore.limits import checking_validate_args

    return checking_validate_args(original)


def _checkpointing(name: str) -> Callable[[Any], Any]:
    """Looked up when it is needed: it imports Megatron-Core."""

    def replace(original: Any) -> Any:
        return getattr(importlib.import_module("megatron.fsdp.mcore.checkpoint_patches"), name)(original)

    return replace


def _counting(original: Any) -> Any:
    from megatron.fsdp.mcore.statistics import counting_once

    return counting_once(original)


def _recording(original: Any) -> Any:
    from megatron.fsdp.mcore.initialization import recording_initialization

    return recording_initialization(original)


def _whole_tensor(original: Any) -> Any:
    from megatron.fsdp.dtensor.uneven import uneven_dtensor_to_full_tensor

    return uneven_dtensor_to_full_tensor


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
        "get_model",
        "builds the model; on the meta device its own layers forget how they are initialized",
        _recording,
    ),
    Patch(
        "megatron.training.models.dist_utils",
        "build_virtual_pipeline_stages",
        "builds the model from a configuration, in the same way",
        _recording,
    ),
    Patch(
        "megatron.training.training",
        "get_megatron_optimizer",
        "its gradient norm is that of one optimizer instance, or without sharding of one data-parallel rank",
        _counting,
    ),
    Patch(
        "megatron.training.training",
        "check_param_hashes_across_dp_replicas",
        "compares parameters among ranks, which are shards here",
        _checkpointing("comparing_compute_weights"),
    ),
    Patch(
        "megatron.training.arguments",
        "validate_args",
        "checks the command line: what does not fit together is said before anything is allocated",
        _checked_validate_args,
    ),
    Patch(
        "megatron.training.checkpointing",
        "generate_state_dict",
        "collects what a checkpoint holds; which model chunks it is of is lost after that",
        _checkpointing("keeping_chunks"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "preprocess_fsdp_dtensor_state_dict",
        "prepares tensors for an fsdp_dtensor checkpoint; ours are described by the layout, with no communication",
        _checkpointing("preparing"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "torch",
        "saves and loads with torch.distributed.checkpoint, which overwrites checkpoints and unpickles anything",
        _checkpointing("torch_view"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "FileSystemReader",
        "looks at a checkpoint's metadata, which it unpickles",
        _checkpointing("reader"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "get_async_strategy",
        "says what writes a checkpoint in the background",
        _checkpointing("finishing_whole"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "read_metadata",
        "reads which checkpoint is the last, and ends the run if it cannot",
        _checkpointing("falling_back"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        "starts anew if the file is missing that says which checkpoint is the last, and in time writes over them all",
        _checkpointing("going_on_untracked"),
    ),
    Patch(
        "megatron.training.checkpointing",
        "checkpoint_exists",
        "looks for that file, and without it takes the weights of --pretrained-checkpoint",
        _checkpointing("seeing_untracked"),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._param_name",
        "names parameters in a checkpoint as this pipeline stage does, so that stages would share names",
        _checkpointing("naming_globally"),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._init_optimizer_states_with_dummy_values",
        "takes a step so that there is state to load into; if nothing is loaded, training begins with the second",
        _checkpointing("taking_no_step"),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._copy_model_params_to_main_params",
        "is called after loading without optimizer state, and refuses FSDP; main weights are what was loaded",
        _checkpointing("leaving_main_weights"),
    ),
    Patch(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor",
        "uneven_dtensor_to_full_tensor",
        "gathers parts of unequal size with an all-gather of lists, which gloo has for equal parts only",
        _whole_tensor,
    ),
)

# What Megatron-Bridge has of its own. It wraps models with Megatron's functions, which are patched above.
BRIDGE_PATCHES = (
    Patch("megatron.bridge.training.setup", "megatron_FSDP", "tells by it that a model chunk has no_sync()", _wrapper),
    Patch(
        "megatron.bridge.training.checkpointing",
        "generate_state_dict",
        "collects what a checkpoint holds",
        _checkpointing("keeping_chunks"),
    ),
    Patch(
        "megatron.bridge.training.checkpointing",
        "preprocess_fsdp_dtensor_state_dict",
        "prepares tensors for an fsdp_dtensor checkpoint",
        _checkpointing("preparing"),
    ),
    Patch(
        "megatron.bridge.training.checkpointing",
        "torch",
        "saves and loads with torch.distributed.checkpoint",
        _checkpointing("torch_view"),
    ),
)

_originals: dict[Patch, Any] = {}


def is_installed() -> bool:
    """True between ``install()`` and ``uninstall()``."""
    return bool(_originals)


def install(stand_in: Callable[..., Any] | None = None) -> None:
    """Make Megatron use our wrapper. Calling it again changes nothing.

    Call it before the model is built, and best before the command line is parsed, so that it is checked too; and after
    Megatron-Bridge has been imported, if it is used.

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
    bridge = [patch for patch in BRIDGE_PATCHES if patch.module in sys.modules]
    owners = [(patch, _owner(patch)) for patch in (*PATCHES, *bridge)]
    for patch, owner in owners:
        _originals[patch] = getattr(owner, patch.attribute)
        setattr(owner, patch.attribute, patch.replacement(_originals[patch]))


def uninstall() -> None:
    """Put everything back that ``install()`` replaced."""
    while _originals:
        patch, original = _originals.popitem()
        setattr(_owner(patch), patch.attribute, original)


def _owner(patch: Patch) -> Any:
    """The module or class that has the name."""
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
    owner: Any = module
    for name in patch.name.split(".")[:-1]:
        owner = getattr(owner, name, None)
    if not hasattr(owner, patch.attribute):
        raise ImportError(
            f"megatron.fsdp.mcore.install(): {patch.module} has no {patch.name} ({patch.why}). Supported versions of "
            f"megatron-core: {supported}; installed: {version}."
        )
    return owner
