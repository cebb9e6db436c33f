"""Finds the newest complete checkpoint in a folder."""

import logging
import re
from collections.abc import Collection
from pathlib import Path

from megatron.fsdp.checkpoint.coordination import attempt, gather_from_ranks
from megatron.fsdp.checkpoint.loading import check_files
from megatron.fsdp.checkpoint.reader import CheckpointReader, open_checkpoint

logger = logging.getLogger(__name__)

ITERATION = re.compile(r"iter_(\d{7,})")


def iterations_in(folder: Path) -> list[int]:
    """Return the iterations that have a folder, newest first."""
    found = [ITERATION.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]) for match in found if match is not None), reverse=True)


def folder_of(folder: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint."""
    return folder / f"iter_{iteration:07d}"


def newest_complete(folder: Path, wanted: int | None, check: bool = True, checked: Collection[Path] = ()) -> int | None:
    """Choose the iteration to load: ``wanted``, or the newest complete one before it. A collective.

    Args:
        folder: Holds a folder ``iter_0000123`` for each checkpoint.
        wanted: The iteration in the tracker file. None allows any iteration.
        check: Whether to compare files with their checksums.
        checked: Folders whose files have already been compared.

    Returns:
        The iteration, or None if no checkpoint is complete.
    """
    # A shared file system may show different files to different machines, so all ranks use what rank 0 sees.
    found, wanted = gather_from_ranks((iterations_in(folder), wanted))[0]
    for iteration in found:
        if wanted is not None and iteration > wanted:
            continue
        of_iteration = folder_of(folder, iteration)
        damage = _damage(of_iteration, check and of_iteration not in checked)
        if not damage:
            if iteration != wanted:
                logger.warning("%s: falling back to the checkpoint of iteration %d.", folder, iteration)
            return iteration
        logger.warning("%s: the checkpoint of iteration %d is incomplete or damaged: %s", folder, iteration, damage)
    return None


def _damage(folder: Path, check: bool) -> str:
    """Describe what any rank finds wrong with a checkpoint; empty if it is complete. A collective."""

    def opened() -> CheckpointReader:
        found = open_checkpoint(folder)
        found.check_sizes()
        return found

    found, damage = attempt(opened)
    return damage if damage or not check or found is None else attempt(lambda: check_files(found))[1]
