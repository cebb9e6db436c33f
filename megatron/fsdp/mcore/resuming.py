"""Decides which checkpoint Megatron's training loop resumes from.

A tracker file names the latest checkpoint. If that checkpoint is incomplete or damaged, the run resumes from the newest
one that is whole; if the tracker file is missing, it looks for checkpoints itself. A folder may also be a checkpoint.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.fsdp.checkpoint.checksums import METADATA
from megatron.fsdp.checkpoint.coordination import from_rank_0
from megatron.fsdp.checkpoint.loading import load_objects
from megatron.fsdp.checkpoint.newest import folder_of, iterations_in, newest_complete
from megatron.fsdp.checkpoint.reader import COMMON, FORMAT_FILE, RELEASE, TRACKER, common_state
from megatron.fsdp.checkpoint.storage import as_path

logger = logging.getLogger(__name__)


# Environment variable: 0 to load without reading all files twice.
VERIFY = "MEGATRON_FSDP_VERIFY_CHECKPOINT"

# An iteration as Megatron writes it. Longer numbers would exceed Python's limit on conversions.
_ITERATION = re.compile(r"[0-9]{1,18}")
# Weights of other libraries. A .bin of another name is a dataset.
_FOREIGN = re.compile(r".*\.(safetensors|pth?)|pytorch_model.*\.bin")
_LEGACY = (
    "expected an fsdp_dtensor or torch_dist checkpoint; got the legacy format torch. Load it with Megatron's DDP and "
    "--auto-detect-ckpt-format, and save it with --ckpt-format torch_dist."
)
# Checkpoints whose files this process has compared with their checksums. It need not do so again to load them.
_compared: set[Path] = set()
# The folder that Megatron is loading, if it was given itself instead of the folder above it.
_given: list[Path] = []


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
    folder = as_path(tracker_filename).parent
    text = as_path(tracker_filename).read_bytes().decode(errors="replace").strip()
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
    """Load a checkpoint; without a tracker file, the newest whole one in the folder, or the folder itself.

    Megatron would start from random weights, and later overwrite the checkpoints in the folder.

    Raises:
        RuntimeError: The folder has files of a checkpoint, and none that can be loaded. Or it is one, and the iteration
            that ``--ckpt-step`` gives is a different one.
    """
    chosen = getattr(args, "ckpt_step", None)
    if load_dir is None or not uses_fsdp_dtensor(args):
        return original(load_dir, args, *rest, **kwargs)
    folder = as_path(load_dir)
    _warn_of_saved(folder, args)
    if _has_tracker(folder) or (chosen and not _is_alone(folder, chosen)):
        return original(load_dir, args, *rest, **kwargs)
    found = None if chosen else _untracked(folder)
    itself = found is None and _is_checkpoint(folder)
    if chosen and (own := _iteration_in(folder) or chosen) != chosen:
        raise RuntimeError(f"{folder} is a checkpoint: expected --ckpt-step {own}, or none; got {chosen}.")
    if found is None and not itself:
        _require_usable(folder)
        return original(load_dir, args, *rest, **kwargs)
    # Megatron takes no iteration 0 for a number of an iteration.
    args.ckpt_step = found or _iteration_in(folder) or 1
    try:
        if not itself:
            return original(load_dir, args, *rest, **kwargs)
        with _giving(folder):
            state, name, _, kind = original(load_dir, args, *rest, **kwargs)
            return state, name, folder.name == RELEASE, kind
    finally:
        args.ckpt_step = chosen


def _warn_of_saved(load: Path, args: Any) -> None:
    """Warn if a run loads one folder again, and saves into another one that has checkpoints. A collective."""
    save = as_path(args.save) if getattr(args, "save", None) else load
    if save not in (load, load.parent) and _has_tracker(save):
        logger.warning(
            "--save %s has checkpoints, and --load %s is loaded. To continue the former, --load it.", save, load
        )


def checkpoint_name(original: Callable[..., str], checkpoints_path: Any, *rest: Any, **kwargs: Any) -> str:
    """The folder of a checkpoint in another folder, which may be that folder itself."""
    return str(_given[0]) if _given else original(checkpoints_path, *rest, **kwargs)


def load_path(original: Callable[..., str], args: Any, load_arg: str = "load") -> str:
    """The folder of the checkpoint to load; with ``--pretrained-checkpoint`` alone, that of its checkpoint."""
    load_arg = load_arg if getattr(args, load_arg) is not None else "pretrained_checkpoint"
    folder = getattr(args, load_arg)
    itself = folder is not None and not _has_tracker(as_path(folder)) and _is_checkpoint(as_path(folder))
    return str(folder) if itself else original(args, load_arg)


def checkpoint_exists(original: Callable[..., bool], checkpoints_path: Any) -> bool:
    """Whether a folder has a checkpoint, with or without a tracker file, or is one.

    Raises:
        RuntimeError: The folder has files of a checkpoint, and none that can be loaded.
    """
    if original(checkpoints_path):
        return True
    if checkpoints_path is None or not uses_fsdp_dtensor(megatron_arguments()):
        return False
    folder = as_path(checkpoints_path)
    found = _is_checkpoint(folder) or bool(_completed(folder))
    if not found:
        _require_usable(folder)
    return found


@contextmanager
def _giving(folder: Path) -> Iterator[None]:
    _given.append(folder)
    try:
        yield
    finally:
        _given.clear()


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint itself."""
    return from_rank_0((folder / METADATA).is_file)


def _is_alone(folder: Path, iteration: int) -> bool:
    """Whether a folder is a checkpoint itself, and has none of this iteration inside."""
    return _is_checkpoint(folder) and not from_rank_0((folder_of(folder, iteration) / METADATA).is_file)


def _iteration_in(folder: Path) -> int:
    """The iteration that a checkpoint was saved at."""
    in_common = (folder / FORMAT_FILE).exists()
    found = common_state(folder, verify=False) if in_common else load_objects(folder, ["iteration"])
    return int(found.get("iteration", 0))


def _require_usable(folder: Path) -> None:
    """Raise RuntimeError if a folder without a usable checkpoint has files of one. A collective."""
    if problem := from_rank_0(lambda: _unusable(folder)):
        raise RuntimeError(f"{folder}: {problem}")


def _unusable(folder: Path) -> str:
    """Why files of a checkpoint in a folder cannot be loaded, and what to do; empty if there are none."""
    if not folder.is_dir():
        return "expected a folder; got a file. Give the checkpoint's folder to --load." if folder.exists() else ""
    names = sorted(path.name for path in folder.iterdir())
    numbered = [name for name in names if re.fullmatch(r"iter_\d+", name)]
    if any(_is_legacy(folder / name) for name in ("", RELEASE, *numbered)):
        return _LEGACY
    args = megatron_arguments()
    # A checkpoint of another name: the output of convert, or of another loop. The pretrained one has its own argument.
    pretrained = as_path(getattr(args, "pretrained_checkpoint", None) or "")
    whole = [folder / name for name in names if folder / name != pretrained and (folder / name / METADATA).is_file()]
    if whole:
        return f"expected checkpoints named iter_NNNNNNN; got {whole[-1].name}. Give {whole[-1]} itself to --load."
    # A run may write files of its own, such as profiles, into the folder that it saves to.
    own = getattr(args, "load", None) is not None and args.load == getattr(args, "save", None)
    foreign = [name for name in names if _FOREIGN.fullmatch(name) and not (own and name.endswith((".pt", ".pth")))]
    if foreign:
        return (
            f"expected a checkpoint of Megatron; got {foreign[0]}. Convert safetensors files with "
            "megatron-fsdp-inspector import-safetensors, and load its output with --finetune. Save other files as "
            "safetensors first, with transformers' save_pretrained() or safetensors.torch.save_file()."
        )
    # Otherwise the first save of this run may have been killed.
    another = args is not None and getattr(args, "load", None) != getattr(args, "save", None)
    half = [name for name in names if _is_part(name)]
    half += [name for name in numbered if another and any(_is_part(path.name) for path in (folder / name).iterdir())]
    if half:
        return (
            f"expected a whole checkpoint; got {half[-1]} without {METADATA}: it was not saved or not copied to the "
            "end. Save, copy or convert it again, or give another --load."
        )
    inside = [name for name in names if another and (folder / name / TRACKER).is_file()]
    if inside:
        found = folder / inside[0]
        return f"expected a folder of checkpoints; got one that contains such a folder. Give {found} to --load."
    return ""


def _is_part(name: str) -> bool:
    return name.endswith(".distcp") or name in (COMMON, FORMAT_FILE)


def _verifies() -> bool:
    return os.environ.get(VERIFY, "1") != "0"


def uses_fsdp_dtensor(args: Any) -> bool:
    """Whether a run, by its arguments, uses FSDP and its checkpoint format."""
    return args is not None and bool(args.use_megatron_fsdp) and args.ckpt_format == "fsdp_dtensor"


def _has_tracker(folder: Path) -> bool:
    return from_rank_0((folder / TRACKER).is_file)


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
    completed = from_rank_0(lambda: _completed(folder))
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
    if _is_legacy(folder):
        raise RuntimeError(f"{folder}: {_LEGACY}")


def _is_legacy(folder: Path) -> bool:
    return not (folder / METADATA).exists() and any(folder.glob("mp_rank_*"))
