"""Loads a nested state dict in place, after all files have been checked and all keys have been matched."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from megatron.fsdp.checkpoint.backend import FlatLoadPlanner, Reader, check_files, open_checkpoint
from megatron.fsdp.checkpoint.matching import Aliases, Strictness, match, report, unexpected_keys

logger = logging.getLogger(__name__)


class _Renaming(FlatLoadPlanner):
    """Loads values that the checkpoint has under other names.

    Args:
        source: The checkpoint, for messages.
        names: The checkpoint's name of every key.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._names = names

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        assert self.metadata is not None
        items = []
        for key, value in self.state_dict.items():
            name = self._names[key]
            for item in _create_read_items(key, self.metadata.state_dict_metadata[name], value):
                items.append(replace(item, storage_index=replace(item.storage_index, fqn=name)))
        return LoadPlan(items)


def no_aliases(key: str) -> tuple[str, ...]:
    """No other names."""
    return ()


def load(
    state_dict: dict[str, Any],
    folder: Path,
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
    strictness = strictness or Strictness()
    if check:
        check_files(folder)
    metadata = open_checkpoint(folder).metadata
    wanted, paths = flatten_state_dict(state_dict)
    found = match(wanted, metadata, aliases)
    unexpected = [k for k in unexpected_keys(found.sources.values(), metadata) if not strictness.extra(k)]
    text = report(found, unexpected, metadata, strictness)
    if text:
        logger.warning("%s: %s", folder, text)
    into = {key: _place(wanted[key], name, metadata) for key, name in found.sources.items()}
    dcp.load(into, storage_reader=Reader(folder), planner=_Renaming(str(folder), found.sources))
    for key, value in into.items():
        target = wanted[key]
        if isinstance(target, torch.Tensor):
            if value is not target:
                target.fill_(value)
        else:
            set_element(state_dict, paths[key], value.item() if isinstance(value, torch.Tensor) else value)


def load_objects(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Some of the objects of a checkpoint, on this rank alone.

    Args:
        folder: Of the checkpoint.
        keys: Of the objects.

    Raises:
        RuntimeError: The checkpoint lacks one.
    """
    metadata = open_checkpoint(folder).metadata
    lacking = [key for key in keys if key not in metadata.state_dict_metadata]
    if lacking:
        raise RuntimeError(f"{folder}: expected a checkpoint with {', '.join(keys)}; it has no {', '.join(lacking)}.")
    found: dict[str, Any] = dict.fromkeys(keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, storage_reader=Reader(folder), planner=FlatLoadPlanner(str(folder)), no_dist=True)
    return found


def _place(target: Any, name: str, metadata: Metadata) -> Any:
    """Where a value is loaded to: an optimizer's step is a tensor for one optimizer and a number for another."""
    stored = metadata.state_dict_metadata[name]
    if isinstance(stored, BytesStorageMetadata):
        return None
    return target if isinstance(target, torch.Tensor) else torch.empty(stored.size, dtype=stored.properties.dtype)
