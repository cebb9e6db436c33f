"""Reads a checkpoint of either format into the canonical view, and writes that view in either format."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megatron.fsdp.checkpoint.checksums import write_file
from megatron.fsdp.checkpoint.reader import RELEASE, TRACKER, CheckpointReader, checkpoint_folder
from megatron.fsdp.checkpoint.writer import Draft, write_checkpoint
from megatron.fsdp.convert import fsdp_dtensor
from megatron.fsdp.convert.canonical import TrainingState
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST
from megatron.fsdp.convert.torch_dist import reading, writing

_READERS = {TORCH_DIST: reading.read, FSDP_DTENSOR: fsdp_dtensor.read}
_WRITERS = {TORCH_DIST: writing.lay_out, FSDP_DTENSOR: fsdp_dtensor.lay_out}


def format_of(path: Path) -> str:
    """The format of a checkpoint: ``torch_dist`` or ``fsdp_dtensor``.

    Raises:
        FileNotFoundError: There is no checkpoint.
        DamagedCheckpoint: A file is damaged.
    """
    return CheckpointReader(checkpoint_folder(path)).format


def read_state(path: Path, options: ReadOptions | None = None) -> TrainingState:
    """Read a checkpoint of either format into the canonical view.

    Args:
        path: The checkpoint, or its parent folder with a tracker file.
        options: Facts that the checkpoint may not record.

    Raises:
        FileNotFoundError: There is no checkpoint.
        DamagedCheckpoint: A file is damaged.
        UnsafePickle: An object needs a name that is not on the allow-list.
        ValueError: The checkpoint lacks information, or contradicts itself or the options.
        NotImplementedError: The checkpoint is of a kind that cannot be read.
    """
    options = options or ReadOptions()
    return read_opened(CheckpointReader(checkpoint_folder(path), verify=options.verify), options)


def read_opened(reader: CheckpointReader, options: ReadOptions) -> TrainingState:
    """Read a checkpoint that is open; see :func:`read_state`."""
    reader.check()
    return _READERS[reader.format](reader, options)


def converted(reader: CheckpointReader, options: ReadOptions) -> Draft:
    """Show a ``torch_dist`` checkpoint as its conversion to ``fsdp_dtensor``, of which only what is needed is read.

    Raises the errors of :func:`read_state`.
    """
    return lay_out(read_opened(reader, options), FSDP_DTENSOR)


def lay_out(state: TrainingState, format: str, options: WriteOptions | None = None) -> Draft:
    """Plan a checkpoint of a format, without reading any tensor.

    Raises:
        ValueError: There is no such format, or the state cannot be stored in it.
    """
    if format not in _WRITERS:
        raise ValueError(f"expected one of the formats {', '.join(_WRITERS)}; got {format!r}.")
    return _WRITERS[format](state, options or WriteOptions())


def write_state(
    state: TrainingState,
    path: Path,
    format: str,
    options: WriteOptions | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Draft:
    """Write a checkpoint as a stream. The folder appears once it is complete.

    If the folder is named like an iteration, the tracker file next to it is updated.

    Args:
        state: The contents.
        path: The folder to create.
        format: ``torch_dist`` or ``fsdp_dtensor``.
        options: How to write it. If several processes divide the work, all call this with the same arguments except for
            ``process``.
        progress: Called with the number of bytes of each written block.

    Returns:
        What was written.

    Raises:
        FileExistsError: The folder is there already.
        ValueError: The format cannot store the state, or main weights do not round to the model's weights.
    """
    options = options or WriteOptions()
    draft = lay_out(state, format, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in asdict(options).items() if key != "process"}
    source = f"{state.source} {format} {sorted(settings.items())}"
    write_checkpoint(draft, path, (options.process, options.processes), options.block, source, progress)
    if options.process == 0:
        _update_tracker(path)
    return draft


def tracked_as(path: Path) -> str:
    """Text of a checkpoint's tracker file; empty if Megatron looks for no folder of this name."""
    match = re.fullmatch(r"iter_(\d+)", path.name)
    if match is None:
        return RELEASE if path.name == RELEASE else ""
    return str(int(match[1])) if path.name == f"iter_{int(match[1]):07d}" else ""


def _update_tracker(path: Path) -> None:
    """Write the new checkpoint into the tracker file, unless the file names a later one."""
    text, tracker = tracked_as(path), path.parent / TRACKER
    if not text:
        return
    found = tracker.read_bytes().decode(errors="replace").strip() if tracker.is_file() else ""
    later = text != RELEASE and re.fullmatch("[0-9]{1,18}", found) and int(found) > int(text)
    if not later:
        write_file(tracker, text.encode())
