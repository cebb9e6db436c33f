"""Loads a nested state dict in place, after checking all files and matching all keys."""

import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard

from megatron.fsdp.checkpoint.checksums import METADATA, Checksums, DamagedCheckpoint, crc32_of
from megatron.fsdp.checkpoint.coordination import agreed, from_rank_0, gather_from_ranks, rank_and_world_size
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region, of
from megatron.fsdp.checkpoint.matching import Aliases, Reaction, Strictness, match, report, unexpected_keys
from megatron.fsdp.checkpoint.reader import CheckpointReader, open_checkpoint
from megatron.fsdp.checkpoint.storage import as_path
from megatron.fsdp.helpers.codes import can_be_trained, check_values

logger = logging.getLogger(__name__)

# How often to read a checkpoint that another job replaces meanwhile.
ATTEMPTS = 4
_SECONDS_BETWEEN = 0.1
# Bytes that loading holds besides the model.
BLOCK = 32 << 20
# Damaged files that a message lists.
_SHOWN = 50
# The dtype for a stored number, also for those of numpy.
_OF_NUMBERS = {
    bool: torch.bool,
    numbers.Integral: torch.int64,
    numbers.Real: torch.float64,
    numbers.Complex: torch.complex128,
}
# Errors that damaged or replaced files cause, on every rank.
_OF_FILES = (DamagedCheckpoint, CheckpointException)


class Contents(Protocol):
    """A source of tensors: a checkpoint that is open for reading, or a view of one with other keys."""

    @property
    def metadata(self) -> Metadata:
        """Keys, and the shapes of tensors."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """Tensors by key."""

    def read_object(self, key: str) -> Any:
        """Read what is not a tensor."""


View = Callable[[CheckpointReader], Contents]


def load(
    state_dict: dict[str, Any],
    folder: Path | str,
    aliases: Aliases = lambda key: (),
    strictness: Strictness | None = None,
    check: bool = True,
    view: View = lambda opened: opened,
) -> None:
    """Load a checkpoint into a state dict. A collective.

    Args:
        state_dict: Nested dicts and lists of tensors and DTensors, which are loaded in place, and of objects, which are
            replaced.
        folder: Of the checkpoint.
        aliases: Other names that a value may have in the checkpoint.
        strictness: What to do about missing and unexpected keys. None: missing keys are an error, and so are unexpected
            ones in an empty dict of the state dict, or in a list that has fewer elements than the checkpoint's.
        check: Whether to compare all files with their checksums first.
        view: Returns what to load: the opened checkpoint, or a view of it with other keys.

    Raises:
        DamagedCheckpoint: A file is missing, truncated or altered.
        UnsafePickle: An object would run code.
        RuntimeError: Keys are missing or unexpected.
        ValueError: Shapes differ.
        CheckpointException: A value cannot be read, or weights would be loaded from codes, such as 8-bit floats.
    """
    folder, strictness = as_path(folder), strictness or _filling(state_dict)
    for left in reversed(range(ATTEMPTS)):
        opened = None
        try:
            opened = _open_on_all_ranks(folder)
            if check:
                check_files(opened)
            _load(state_dict, agreed(partial(view, opened)), folder, aliases, strictness)
            return
        except Exception as error:
            replaced = opened is None or (isinstance(error, _OF_FILES) and _is_replaced(opened))
            if not left or not replaced:
                raise
            if opened is not None:
                logger.warning("%s: another job replaced this checkpoint during loading; loading the new one.", folder)
            time.sleep(_SECONDS_BETWEEN)


def _filling(state_dict: dict[str, Any]) -> Strictness:
    """Refuse to leave out what belongs into a container that lacks entries for it. A collective.

    The state dict of an optimizer of torch is empty before the first step: loading into it would lose the moments.
    """
    unfilled = tuple({prefix for of_rank in gather_from_ranks([*_unfilled(state_dict)]) for prefix in of_rank})
    why = ", in an empty dict or a list with fewer elements. Give it entries of these names before loading"
    return Strictness(unexpected=Reaction.RAISE, extra=lambda key: not f"{key}.".startswith(unfilled), why=why)


def _unfilled(value: Any, path: str = "") -> Iterator[str]:
    """Beginnings of keys that would belong into an empty dict, or behind the last element of a list."""
    entries: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    for key, entry in enumerate(value) if isinstance(value, list) else entries:
        yield from _unfilled(entry, f"{path}{key}.")
    if isinstance(value, list):
        yield f"{path}{len(value)}."
    elif isinstance(value, Mapping) and not value and path:
        yield path


def load_with_optimizers(state_dict: dict[str, Any], folder: Path | str) -> None:
    """Load a checkpoint into a state dict with state dicts of optimizers among its values. A collective.

    As with torch's ``load_state_dict``, an optimizer gets the saved options, and loses those that were not saved. State
    of parameters that have none now, because they are frozen, is ignored with a warning.

    Raises:
        RuntimeError: An optimizer has a different number of parameter groups, or as :func:`load` raises errors.
    """
    kept = tuple(f"{name}.state." for name, value in state_dict.items() if _groups_of(value))
    ignoring = Strictness(unexpected=Reaction.LOG, extra=lambda key: not key.startswith(kept))
    load(state_dict, folder, strictness=ignoring, view=partial(_with_saved_options, state_dict))


def _with_saved_options(state_dict: dict[str, Any], opened: CheckpointReader) -> Contents:
    """Remove options from the state dicts of optimizers that a checkpoint lacks, and return the checkpoint."""
    saved = opened.metadata.state_dict_metadata
    for name, value in state_dict.items():
        groups, prefix = _groups_of(value), f"{name}.param_groups."
        options: dict[str, set[str]] = {}
        for key in (key.removeprefix(prefix) for key in saved if key.startswith(prefix)):
            place, *path = key.split(".")
            options.setdefault(place, set()).add(path[0])
        if len(groups) != len(options) and groups:
            raise ValueError(
                f"{name}: expected {len(groups)} parameter groups, those of the optimizer; got a checkpoint with a "
                f"different number of parameter groups, {len(options)}. Give the optimizer the same groups before "
                "loading, also those that a callback such as Lightning's BaseFinetuning has added during training."
            )
        for number, group in enumerate(groups):
            for option in [key for key in group if key not in options[str(number)]]:
                if not isinstance(group[option], torch.Tensor):
                    del group[option]
    return opened


def _groups_of(value: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's state dict; none if it is another one."""
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return groups if isinstance(groups, list) else []


@torch.no_grad()
def _load(state_dict: dict[str, Any], opened: Contents, folder: Path, aliases: Aliases, strictness: Strictness) -> None:
    metadata = opened.metadata
    wanted, paths = flatten_state_dict(state_dict)
    # Ranks that have an embedding read the tokenizer and saved arguments, which may fail.
    found = agreed(partial(match, wanted, metadata, aliases, strictness.padding))
    unexpected = [k for k in unexpected_keys(found.sources.values(), metadata) if not strictness.extra(k)]
    text = report(found, unexpected, metadata, strictness)
    if text:
        logger.warning("%s: %s", folder, text)
    values, failure = {}, None
    try:
        # Before anything is overwritten.
        sources = {key: _source(key, wanted[key], name, opened) for key, name in found.sources.items()}
        for key, name in found.sources.items():
            stored = sources[key]
            if key in found.padded and stored is not None:
                stored = stored.with_rows(wanted[key].shape[0])
            values[key] = _read(wanted[key], name, stored, found.starts.get(key, 0), opened)
    except Exception as error:
        failure = _wrap_exception(error)
    failures = {rank: failed for rank, failed in enumerate(gather_from_ranks(failure)) if failed is not None}
    if failures:
        raise CheckpointException("load", failures)
    for key, value in values.items():
        if value is not wanted[key]:
            _replace(state_dict, paths[key], value)


def _replace(container: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set an element that exists. Paths have the keys of dicts as text, whatever they are."""
    key, *rest = path
    if isinstance(container, Mapping) and key not in container:
        key = next(own for own in container if str(own) == key)
    if rest:
        _replace(container[key], tuple(rest), value)
    else:
        container[key] = value


def _source(key: str, target: Any, name: str, opened: Contents) -> LazyTensor | None:
    """The tensor to read a value from; None if the checkpoint has an object, and the target is none that is a tensor.

    Model and checkpoint may disagree about what is a tensor: an optimizer's step is a tensor for some optimizers, and a
    number for others.

    Raises:
        ValueError: The target cannot hold the value. Reading raises it where only the elements tell.
    """
    stored = opened.tensors.get(name)
    if not isinstance(target, torch.Tensor):
        if stored is not None and math.prod(stored.shape) != 1:
            raise ValueError(
                f"{key}: expected a number in the checkpoint, as in the state dict; got a tensor of shape "
                f"{stored.shape}. Load into a tensor of this shape."
            )
        return stored
    steps = target.stride() if target.layout == torch.strided else ()
    if any(size > 1 and not step for size, step in zip(target.shape, steps, strict=False)):
        raise ValueError(
            f"{key}: expected a tensor whose elements have memory of their own; got one from expand(). Load into its "
            "clone()."
        )
    if stored is not None:
        check_values(name, stored.dtype, target.dtype)
    else:
        stored = _as_tensor(key, target, opened.read_object(name))
    return _fitting(key, stored, target.dtype)


def _as_tensor(key: str, target: torch.Tensor, value: Any) -> LazyTensor:
    """A stored number as a tensor, in a dtype that holds it."""
    dtype = next((dtype for kind, dtype in _OF_NUMBERS.items() if isinstance(value, kind)), None)
    if target.numel() != 1 or dtype is None:
        raise ValueError(
            f"{key}: expected a tensor of shape {tuple(target.shape)} in the checkpoint, as in the state dict; got an "
            f"object of type {type(value).__name__}. Load into an object of this type."
        )
    return of(torch.tensor(value, dtype=dtype))


def _kind(dtype: torch.dtype) -> int:
    """Whether the elements are booleans, integers, real or complex numbers. Each kind includes those before it."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype != torch.bool)


def _fitting(key: str, stored: LazyTensor, wanted: torch.dtype) -> LazyTensor:
    """The tensor, whose reading raises ValueError if the wanted dtype cannot hold a value. Rounding is allowed.

    Raises:
        ValueError: The wanted dtype is of a kind that cannot hold several elements of the stored one.
    """
    more = _kind(stored.dtype) - _kind(wanted)
    if more > 0 and math.prod(stored.shape) != 1:
        raise ValueError(
            f"{key}: expected {wanted} in the checkpoint, as in the state dict; got {stored.dtype}, whose values it "
            f"cannot hold. Load into a tensor of {stored.dtype}."
        )
    if stored.dtype == wanted or more < 0:
        return stored
    if not more and _kind(wanted) > 1:
        return stored.within(wanted, key) if can_be_trained(wanted) else stored

    def read(region: Region) -> torch.Tensor:
        found = stored.read(region)
        if not _equals_cast(found, wanted):
            raise ValueError(
                f"{key}: expected values that {wanted} can hold, as in the state dict; got others in {stored.dtype}. "
                f"Load into a tensor of {stored.dtype}."
            )
        return found

    return LazyTensor(stored.shape, stored.dtype, read)


def _equals_cast(found: torch.Tensor, wanted: torch.dtype) -> bool:
    cast = found.to(wanted)
    if _kind(found.dtype) != 1:
        return torch.equal(cast.to(found.dtype), found)
    # torch does not compare all pairs of integer dtypes. All values fit into int64, except for large ones of uint64.
    first, second = found.to(torch.int64), cast.to(torch.int64)
    large = torch.uint64 in (found.dtype, wanted) and bool((first < 0).any())
    return torch.equal(first, second) and not large


def _read(target: Any, name: str, stored: LazyTensor | None, start: int, opened: Contents) -> Any:
    """Read a value of the checkpoint. If ``target`` is a tensor, read into it and return it."""
    if stored is None:
        return opened.read_object(name)
    if not isinstance(target, torch.Tensor):
        return stored.full_tensor().item()
    if name not in opened.tensors:
        return target.fill_(stored.full_tensor().item())
    if len(target.shape) != len(stored.shape):  # a single element, see match()
        return target.copy_(stored.full_tensor().reshape(target.shape))
    for chunk in _create_chunk_list(target):
        local = find_tensor_shard(target, MetadataIndex(name, chunk.offsets))
        origin = tuple(chunk.offsets)
        stored.read_into(local, (origin[0] + start, *origin[1:]) if start else origin, BLOCK)
    return target


def _open_on_all_ranks(folder: Path) -> CheckpointReader:
    """Open a checkpoint such that all ranks have read the same metadata, even if another job saves. A collective."""
    opened, error = None, None
    try:
        opened = open_checkpoint(folder)
    except Exception as caught:  # noqa: BLE001 - other ranks wait for this one
        error = caught
    mine = (opened.metadata_crc32 if opened else "", str(error) if error else "")
    of_ranks = gather_from_ranks(mine)
    if error is not None:
        raise error
    if text := next((text for _, text in of_ranks if text), ""):
        raise DamagedCheckpoint(text)
    if opened is None or any(of_rank != mine for of_rank in of_ranks):
        raise RuntimeError(f"{folder}: ranks read different metadata. Does another job save into this folder?")
    return opened


def check_files(opened: CheckpointReader) -> None:
    """Compare all files of a checkpoint with their checksums. Ranks divide the files among them. A collective.

    Items in files that ``checksums.json`` does not list, such as those of a checkpoint that torch wrote, are compared
    with the checksums that ``torch.save`` stored with them.

    Args:
        opened: The checkpoint, the same on every rank.

    Raises:
        DamagedCheckpoint: On every rank. The message names all damaged files.
    """
    folder, sums = opened.path, opened.checksums or Checksums()
    checks: list[Callable[[], None]] = [partial(sums.check_file, folder, name) for name in sorted(sums.files)]
    rank, ranks = rank_and_world_size()
    found: list[str] = []
    try:
        checks += [partial(opened.check_contents, *item) for item in opened.unlisted()]
    except DamagedCheckpoint as damage:
        found.append(str(damage))
    for check in checks[rank::ranks]:
        try:
            check()
        except Exception as damage:  # noqa: BLE001 - other ranks wait for this one
            found.append(str(damage) or repr(damage))
    found = list(dict.fromkeys(message for of_rank in gather_from_ranks(found) for message in of_rank))
    if found:
        more = [f"... and {len(found) - _SHOWN} more."] if len(found) > _SHOWN else []
        raise DamagedCheckpoint("\n".join([*found[:_SHOWN], *more]))


def _is_replaced(opened: CheckpointReader) -> bool:
    """Whether rank 0 finds another checkpoint in the folder by now. A collective."""
    path = opened.path / METADATA
    return from_rank_0(lambda: path.is_file() and crc32_of(path) != opened.metadata_crc32)


def load_objects(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Load objects of a checkpoint on this rank alone.

    Args:
        folder: Of the checkpoint.
        keys: Of the objects.

    Raises:
        RuntimeError: The checkpoint lacks one of the keys.
        UnsafePickle: An object would run code.
    """
    opened = open_checkpoint(folder)
    lacking = [key for key in keys if key not in opened.objects]
    if lacking:
        raise RuntimeError(f"{folder}: expected a checkpoint with {', '.join(keys)}; it has no {', '.join(lacking)}.")
    return {key: opened.read_object(key) for key in keys}
