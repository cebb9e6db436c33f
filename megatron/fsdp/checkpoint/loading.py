"""Loads a nested state dict in place, after all files have been checked and all keys have been matched."""

import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from megatron.fsdp.checkpoint.backend import FlatLoadPlanner, Reader, check_files, open_checkpoint
from megatron.fsdp.checkpoint.checksums import METADATA, DamagedCheckpoint, crc32_of
from megatron.fsdp.checkpoint.matching import Aliases, Match, Strictness, match, report, unexpected_keys
from megatron.fsdp.checkpoint.reader import CheckpointReader

logger = logging.getLogger(__name__)

# How often what another job replaces meanwhile is read anew.
ATTEMPTS = 3
_SECONDS_BETWEEN = 0.1


class _Renaming(FlatLoadPlanner):
    """Loads values that the checkpoint has under other names, or as some rows of a larger tensor.

    Args:
        source: The checkpoint, for messages.
        found: Where every key is.
    """

    def __init__(self, source: str, found: Match) -> None:
        super().__init__(source)
        self._found = found

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, value in self.state_dict.items():
            name = self._found.sources[key]
            stored = self.metadata.state_dict_metadata[name]
            items += _read_items(key, value, name, stored, self._found.starts.get(key, 0))
        return LoadPlan(items)


def _read_items(key: str, value: Any, name: str, stored: Any, start: int) -> Iterator[ReadItem]:
    """What to read of an entry of the checkpoint, whose row ``start`` is the first of the value's."""
    if start:
        chunks = [replace(chunk, offsets=_shifted(chunk.offsets, -start)) for chunk in stored.chunks]
        stored = replace(stored, chunks=chunks)
    for item in _create_read_items(key, stored, value):
        offset = item.storage_index.offset
        offset = _shifted(offset, start) if start and offset is not None else offset
        yield replace(item, storage_index=replace(item.storage_index, fqn=name, offset=offset))


def _shifted(offsets: torch.Size, rows: int) -> torch.Size:
    return torch.Size([offsets[0] + rows, *offsets[1:]])


def no_aliases(key: str) -> tuple[str, ...]:
    """No other names."""
    return ()


def load(
    state_dict: dict[str, Any],
    folder: Path | str,
    aliases: Aliases = no_aliases,
    strictness: Strictness | None = None,
    check: bool = True,
) -> None:
    """Load a checkpoint into a state dict: tensors in place, all else by replacing it. A collective.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors and objects.
        folder: Of the checkpoint.
        aliases: Other names that a value may have.
        strictness: What to do about keys that only one side has; None: missing ones are an error.
        check: Whether to compare files with their checksums before.

    Raises:
        DamagedCheckpoint: A file is not what was written.
        UnsafePickle: An object would run code.
        RuntimeError: Keys are missing or unexpected.
        ValueError: Shapes differ.
    """
    folder, strictness = Path(folder), strictness or Strictness()
    for left in reversed(range(ATTEMPTS)):
        opened = _open_alike(folder)
        try:
            if check:
                check_files(opened)
            _load(state_dict, opened, aliases, strictness)
            return
        except (DamagedCheckpoint, CheckpointException):
            if not left or not _is_replaced(opened):
                raise
            logger.warning("%s: another job has saved into it while it was loaded; loading what is there now.", folder)


def _load(state_dict: dict[str, Any], opened: CheckpointReader, aliases: Aliases, strictness: Strictness) -> None:
    folder, metadata = opened.path, opened.metadata
    wanted, paths = flatten_state_dict(state_dict)
    found = match(wanted, metadata, aliases)
    unexpected = [k for k in unexpected_keys(found.sources.values(), metadata) if not strictness.extra(k)]
    text = report(found, unexpected, metadata, strictness)
    if text:
        logger.warning("%s: %s", folder, text)
    into = {key: _place(wanted[key], name, metadata) for key, name in found.sources.items()}
    dcp.load(into, storage_reader=Reader(folder, opened), planner=_Renaming(str(folder), found))
    for key, value in into.items():
        target = wanted[key]
        if isinstance(target, torch.Tensor):
            if value is not target:
                target.fill_(value)
        else:
            set_element(state_dict, paths[key], value.item() if isinstance(value, torch.Tensor) else value)


def _open_alike(folder: Path) -> CheckpointReader:
    """The checkpoint, the same on every rank, whatever another job does. A collective."""
    for left in reversed(range(ATTEMPTS)):
        opened, error = None, None
        try:
            opened = open_checkpoint(folder)
        except (OSError, ValueError, NotImplementedError) as caught:
            error = caught
        mine = (opened.metadata_crc32 if opened else "", str(error) if error else "")
        everyone = _from_all(mine)
        if opened is not None and all(of_rank == mine for of_rank in everyone):
            return opened
        if error is not None and not left:
            raise error
        time.sleep(_SECONDS_BETWEEN)
    if text := next((text for _, text in everyone if text), ""):
        raise DamagedCheckpoint(text)
    raise RuntimeError(f"{folder}: ranks find different metadata in it, again and again. Does a job save into it?")


def _is_replaced(opened: CheckpointReader) -> bool:
    """Whether the folder has another checkpoint by now, as the first rank sees it. A collective."""
    path = opened.path / METADATA
    return _from_all(path.is_file() and crc32_of(path) != opened.metadata_crc32)[0]


def _from_all[T](value: T) -> list[T]:
    """Every rank's value. A collective."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return [value]
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def load_objects(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Some of the objects of a checkpoint, on this rank alone.

    Args:
        folder: Of the checkpoint.
        keys: Of the objects.

    Raises:
        RuntimeError: The checkpoint lacks one.
    """
    opened = open_checkpoint(folder)
    lacking = [key for key in keys if key not in opened.metadata.state_dict_metadata]
    if lacking:
        raise RuntimeError(f"{folder}: expected a checkpoint with {', '.join(keys)}; it has no {', '.join(lacking)}.")
    found: dict[str, Any] = dict.fromkeys(keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, storage_reader=Reader(folder, opened), planner=FlatLoadPlanner(str(folder)), no_dist=True)
    return found


def _place(target: Any, name: str, metadata: Metadata) -> Any:
    """Where a value is loaded to: an optimizer's step is a tensor for one optimizer and a number for another."""
    stored = metadata.state_dict_metadata[name]
    if isinstance(stored, BytesStorageMetadata):
        return None
    return target if isinstance(target, torch.Tensor) else torch.empty(stored.size, dtype=stored.properties.dtype)
