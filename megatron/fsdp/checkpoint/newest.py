"""Finds the newest complete checkpoint in a folder."""

import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from megatron.fsdp.checkpoint.checksums import METADATA
from megatron.fsdp.checkpoint.coordination import attempt, from_rank_0
from megatron.fsdp.checkpoint.loading import check_files
from megatron.fsdp.checkpoint.reader import CheckpointReader, open_checkpoint
from megatron.fsdp.checkpoint.storage import as_path

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
    found, wanted = from_rank_0(lambda: (iterations_in(folder), wanted))
    allowed = [iteration for iteration in found if wanted is None or iteration <= wanted]
    chosen = _first_complete([folder_of(folder, iteration) for iteration in allowed], check, checked)
    iteration = None if chosen is None else allowed[chosen]
    if iteration is not None and iteration != wanted:
        logger.warning("%s: falling back to the checkpoint of iteration %d.", folder, iteration)
    return iteration


def newest_complete_checkpoint(folder: str | os.PathLike, check: bool = True) -> Path | None:
    """Find the checkpoint to resume from: the newest complete one among the subfolders. A collective.

    A run that was killed while it saved leaves a folder without ``.metadata``, which is skipped with a warning. So are
    checkpoints with damaged files. Newer means a higher number at the end of the subfolder's name, as in ``step_20``
    or ``iter_0000020``; other subfolders are ignored.

    Args:
        folder: Holds a subfolder for each checkpoint. It need not exist.
        check: Whether to compare files with their checksums, which reads all of them. Sizes are always compared.

    Returns:
        The subfolder, the same on all ranks; None if no checkpoint is complete.

    Raises:
        ValueError: Names of checkpoints differ in more than the number, such as dates, or epochs and steps.
    """
    found = from_rank_0(lambda: _numbered(as_path(folder)))
    saved = from_rank_0(lambda: [path.name for path in found if (path / METADATA).is_file()])
    kinds = {name.rstrip("0123456789"): name for name in saved}
    if len(kinds) > 1:
        raise ValueError(
            f"{folder}: expected checkpoints whose names differ in the number at their end only, which tells the "
            f"newest; got {' and '.join(sorted(kinds.values())[:2])}. Rename them, or give each kind its own folder."
        )
    chosen = _first_complete(found, check)
    return None if chosen is None else found[chosen]


def _numbered(folder: Path) -> list[Path]:
    """The subfolders with files of a checkpoint whose names end with a number, highest first."""
    names = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    # Folders of other things, such as tensorboard's, have dates.
    found = [(int(match[0]), path) for path in names if (match := re.search(r"[0-9]{1,18}$", path.name))]
    return [path for _, path in sorted(found)[::-1] if (path / METADATA).is_file() or any(path.glob("*.distcp"))]


def _first_complete(folders: list[Path], check: bool, checked: Collection[Path] = ()) -> int | None:
    """Number of the first folder that is a complete checkpoint. Warns about those before it. A collective."""
    for number, folder in enumerate(folders):
        damage = _damage(folder, check and folder not in checked)
        if not damage:
            return number
        logger.warning("%s: the checkpoint %s is incomplete or damaged: %s", folder.parent, folder.name, damage)
    return None


def _damage(folder: Path, check: bool) -> str:
    """Describe what any rank finds wrong with a checkpoint; empty if it is complete. A collective."""

    def opened() -> CheckpointReader:
        found = open_checkpoint(folder)
        found.check_sizes()
        return found

    found, damage = attempt(opened)
    return damage if damage or not check or found is None else attempt(lambda: check_files(found))[1]
