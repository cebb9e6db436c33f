"""Decides which checkpoint Megatron's training loop resumes from.

A tracker file names the latest checkpoint. If that checkpoint is incomplete or damaged, the run resumes from the newest
one that is whole; if the tracker file is missing, it looks for checkpoints itself.
"""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.fsdp.checkpoint.checksums import METADATA
from megatron.fsdp.checkpoint.newest import folder_of, iterations_in, newest_complete
from megatron.fsdp.checkpoint.reader import FORMAT_FILE, RELEASE, TRACKER

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Environment variable: 0 to load without reading all files twice.
VERIFY = "MEGATRON_FSDP_VERIFY_CHECKPOINT"

# An iteration as Megatron writes it. Longer numbers would exceed Python's limit on conversions.
_ITERATION = re.compile(r"[0-9]{1,18}")
# Checkpoints whose files this process has compared with their checksums. It need not do so again to load them.
_compared: set[Path] = set()


def megatron_arguments() -> Any:
    """Megatron's arguments; None if none have been parsed, as in Megatron-Bridge."""
    from megatron.training import get_args

    try:
        return get_args()
    except AssertionError:
        return None


def needs_checksums(folder: Path) -> bool:
    """Whether a checkpoint's files have to be compared with their checksums before it is loaded."""
    return _verifies() and folder not in _compared


def read_metadata(original: Callable[..., Any], tracker_filename: str) -> tuple[int, bool]:
    """Read a tracker file; return the iteration to resume from, and whether it is a release.

    Raises:
        RuntimeError: There is no whole checkpoint, or the tracker file names one of Megatron's legacy format.
    """
    folder = Path(tracker_filename).parent
    text = Path(tracker_filename).read_bytes().decode(errors="replace").strip()
    wanted = int(text) if _ITERATION.fullmatch(text) else None
    args = megatron_arguments()  # None: they will be taken from the checkpoint
    torch_dist = wanted is not None and (folder_of(folder, wanted) / FORMAT_FILE).exists()
    if text == RELEASE or (torch_dist if args is None else not uses_fsdp_dtensor(args)):
        return original(tracker_filename)
    if wanted is not None:
        refuse_legacy(folder_of(folder, wanted))
    if getattr(args, "ckpt_step", None):  # explicitly requested: load it or fail
        return int(args.ckpt_step), False
    found = _newest(folder, wanted)
    if found is None:
        raise RuntimeError(f"{folder}: no whole checkpoint found; {tracker_filename} contains {text[:40]!r}.")
    return found, False


def load_base_checkpoint(original: Callable[..., Any], load_dir: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Load a checkpoint; without a tracker file, load the newest whole checkpoint in the folder.

    Megatron would start from random weights, and later overwrite the checkpoints in the folder.
    """
    chosen = getattr(args, "ckpt_step", None)
    found = None
    if load_dir is not None and not chosen and uses_fsdp_dtensor(args) and not _has_tracker(Path(load_dir)):
        found = _untracked(Path(load_dir))
    if found is None:
        return original(load_dir, args, *rest, **kwargs)
    args.ckpt_step = found
    try:
        return original(load_dir, args, *rest, **kwargs)
    finally:
        args.ckpt_step = chosen


def checkpoint_exists(original: Callable[..., bool], checkpoints_path: Any) -> bool:
    """Whether a folder has a checkpoint, with or without a tracker file."""
    if original(checkpoints_path):
        return True
    ours = checkpoints_path is not None and uses_fsdp_dtensor(megatron_arguments())
    return ours and bool(_completed(Path(checkpoints_path)))


def _verifies() -> bool:
    return os.environ.get(VERIFY, "1") != "0"


def uses_fsdp_dtensor(args: Any) -> bool:
    """Whether a run, by its arguments, uses FSDP and its checkpoint format."""
    return args is not None and bool(args.use_megatron_fsdp) and args.ckpt_format == "fsdp_dtensor"


def _of_first_rank(value: T) -> T:
    """The first rank's value: a shared file system may show a new file to some machines before others."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _has_tracker(folder: Path) -> bool:
    return _of_first_rank((folder / TRACKER).is_file())


def _completed(folder: Path) -> list[Path]:
    """Checkpoints whose save was completed, even if they have been damaged since; the newest is first."""
    if not folder.is_dir():
        return []
    found = [*(folder_of(folder, iteration) for iteration in iterations_in(folder)), folder / RELEASE]
    return [path for path in found if (path / METADATA).exists()]


def _untracked(folder: Path) -> int | None:
    """The iteration to resume from if there is no tracker file; None if there are no checkpoints. A collective.

    Raises:
        RuntimeError: There are checkpoints, but none of them can be chosen without a tracker file.
    """
    completed = _of_first_rank(_completed(folder))
    if not completed:
        return None
    found = _newest(folder, None)
    if not found:  # Megatron takes neither iteration 0 nor a release by number
        raise RuntimeError(
            f"{folder}: expected {TRACKER} next to the checkpoints, or a whole checkpoint of an iteration; found "
            f"neither. Write the iteration to load, or {RELEASE!r}, into that file, or give another --load."
        )
    logger.warning("%s: %s is missing; resuming from iteration %d.", folder, TRACKER, found)
    return found


def _newest(folder: Path, wanted: int | None) -> int | None:
    """The checkpoint that :func:`newest_complete` chooses. Records that its checksums have been compared."""
    check = _verifies() and dist.is_initialized()
    found = newest_complete(folder, wanted, check, _compared)
    if found is not None and check:
        _compared.add(folder_of(folder, found))
    return found


def refuse_legacy(folder: Path) -> None:
    """Raise RuntimeError if a checkpoint is of Megatron's legacy format, which FSDP cannot load."""
    if not (folder / METADATA).exists() and any(folder.glob("mp_rank_*")):
        raise RuntimeError(
            f"{folder}: expected an fsdp_dtensor or torch_dist checkpoint; got the legacy format torch. "
            "Load it with Megatron's DDP and --auto-detect-ckpt-format, and save it with --ckpt-format torch_dist."
        )
