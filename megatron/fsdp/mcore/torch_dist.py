"""Loads ``torch_dist`` checkpoints of Megatron's DDP as if they had been converted to ``fsdp_dtensor`` before."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron.fsdp.checkpoint.loading import Contents
from megatron.fsdp.checkpoint.reader import CheckpointReader, common_state, format_of, open_checkpoint
from megatron.fsdp.checkpoint.storage import as_path
from megatron.fsdp.convert.fsdp_dtensor import CHECKPOINT_VERSION
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.rewrites import TORCH_DIST
from megatron.fsdp.convert.run import converted
from megatron.fsdp.mcore.resuming import megatron_arguments, refuse_legacy, uses_fsdp_dtensor


def is_torch_dist(folder: Path) -> bool:
    """Whether a checkpoint is one of Megatron's DDP."""
    return format_of(folder) == TORCH_DIST


def view(optimizer: bool, opened: CheckpointReader) -> Contents:
    """The source to load a checkpoint from: the conversion of a ``torch_dist`` one, others as they are.

    Args:
        optimizer: Whether optimizer state is loaded. If not, nothing has to be known about it.
        opened: The checkpoint.
    """
    if opened.format != TORCH_DIST:
        return opened
    args = megatron_arguments() or argparse.Namespace()
    options = ReadOptions(optimizer=optimizer, verify=False, args=args, keeps_rest=False)
    try:
        return converted(opened, options)
    except (ValueError, NotImplementedError) as error:
        raise RuntimeError(
            f"{opened.path}: this torch_dist checkpoint cannot be loaded as it is. {error} Options are those of "
            "megatron-fsdp-inspector convert-torch-dist-to-fsdp-dtensor; its output can be loaded."
        ) from error


def load_common(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Read the common state of a ``torch_dist`` checkpoint on this rank alone; only those of the keys that it has."""
    common = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, **common_state(folder, verify=False)}
    return {key: common[key] for key in keys if key in common}


class Reader(FileSystemReader):
    """Reads metadata, without running code: that of a ``torch_dist`` checkpoint as if it had been converted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata. Raises the errors of ``CheckpointReader``."""
        opened, run = open_checkpoint(as_path(self.path)), megatron_arguments()
        lenient = not getattr(run, "strict_fsdp_dtensor_load", True)
        # Then Megatron compares keys: a layer of a GPT model becomes several of a hybrid one, which it finds by them.
        compares = lenient or getattr(run, "hybrid_layer_pattern", None)
        # The conversion of a large model takes seconds to plan.
        if not compares or not is_torch_dist(as_path(self.path)):
            return opened.metadata
        loads = not (getattr(run, "finetune", False) or getattr(run, "no_load_optim", False))
        return view(loads, opened).metadata


def checkpoint_format(original: Callable[..., str], checkpoint_name: Any, args: Any) -> str:
    """The format of a checkpoint. A run with FSDP loads ``torch_dist`` in the same way as ``fsdp_dtensor``.

    Raises:
        RuntimeError: It is Megatron's legacy format, which the loop would fail to load, and end without an error.
    """
    if uses_fsdp_dtensor(args):
        refuse_legacy(as_path(checkpoint_name))
    if uses_fsdp_dtensor(args) and is_torch_dist(as_path(checkpoint_name)):
        return "fsdp_dtensor"
    return original(checkpoint_name, args)
