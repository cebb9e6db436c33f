"""Which of the checkpoints in a folder can be loaded: the newest that is whole."""

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.fsdp.checkpoint.backend import check_files, open_checkpoint
from megatron.fsdp.checkpoint.checksums import size_of

logger = logging.getLogger(__name__)

ITERATION = re.compile(r"iter_(\d{7,})")


def iterations_in(folder: Path) -> list[int]:
    """Iterations of which there are folders, the newest first."""
    found = [ITERATION.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in found if match is not None), reverse=True)


def folder_of(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return folder / f"iter_{iteration:07d}"


def newest_whole(folder: Path, wanted: int | None, check: bool = True, checked: Collection[Path] = ()) -> int | None:
    """The iteration to load: the one that is wanted, or the newest before it that is whole. A collective.

    Args:
        folder: With a folder ``iter_0000123`` per checkpoint.
        wanted: Iteration that the tracker file names; None: it names none, and any will do.
        check: Whether to compare files with their checksums.
        checked: Folders whose files have been compared before.

    Returns:
        None if none is whole.
    """
    found = iterations_in(folder)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # File systems that many machines share do not show everything to everyone at the same time.
        of_first: list[Any] = [found, wanted]
        dist.broadcast_object_list(of_first, src=0)
        found, wanted = of_first
    for iteration in found:
        if wanted is not None and iteration > wanted:
            continue
        of_iteration = folder_of(folder, iteration)
        damage = _damage(of_iteration, check and of_iteration not in checked)
        if not damage:
            if iteration != wanted:
                logger.warning("%s: going back to the checkpoint of iteration %d.", folder, iteration)
            return iteration
        logger.warning("%s: the checkpoint of iteration %d is not whole: %s", folder, iteration, damage)
    return None


def _damage(folder: Path, check: bool) -> str:
    """What is wrong with a checkpoint, on any rank; empty if nothing is."""
    found, opened = "", None
    try:
        opened = open_checkpoint(folder)
        for name, end in opened.files().items():
            size = size_of(folder / name)
            if size < end:
                found = f"{folder / name}: expected at least {end} bytes; got {size}"
    except (OSError, ValueError, NotImplementedError) as error:
        found = str(error)
    found = _any(found)
    if not found and check and opened is not None:
        try:
            check_files(opened)
        except ValueError as error:
            found = str(error)
    return found


def _any(message: str) -> str:
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return message
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return next(filter(None, messages), "")
