"""Checks that a checkpoint is complete: its files, their contents, and keys that belong together."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron.fsdp.checkpoint.checksums import METADATA, NAME, Checksums, DamagedCheckpoint, size_of
from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.checkpoint.reader import COMMON, COMMON_KEY, CheckpointReader, common_state
from megatron.fsdp.checkpoint.safe_pickle import UnsafePickle
from megatron.fsdp.convert.inspecting import GROUP_META
from megatron.fsdp.helpers.spelling import bare_name
from megatron.fsdp.naming.names import without_half

WEIGHTS = "model.module."
_STATE = "optimizer.state."
_GROUPS = f"optimizer.{GROUP_META}."
# Keys that Megatron needs to load an fsdp_dtensor checkpoint.
_NEEDED = ("args", "checkpoint_version", "iteration")
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Parameters of fused layers and of multi-token prediction, which optimizer groups may list under another name.
_STORED_OTHERWISE = re.compile(r"linear_(?:q|kv)_down_proj|layer_?norm|mtp\.")

_PROBLEMS = (DamagedCheckpoint, UnsafePickle, FileNotFoundError, NotImplementedError, KeyError)


class Report(NamedTuple):
    """The result of a check.

    Attributes:
        files: The problem of each file; "" if it has none.
        checked_by: ``checksums.json``, or ``chunk headers`` if the checkpoint has none.
        tensors: Number of tensors.
        objects: Number of objects.
        problems: All problems.
        unused: Data files that the metadata does not mention.
    """

    files: dict[str, str]
    checked_by: str
    tensors: int
    objects: int
    problems: list[str]
    unused: list[str]


def bytes_to_verify(path: Path) -> int:
    """The total that ``verify`` reports as progress: the size of all files."""
    return sum(p.stat().st_size for p in path.iterdir() if p.is_file())


def verify(path: Path, progress: Callable[[int], None] = lambda _: None) -> Report:
    """Check a checkpoint and report all problems.

    Files are compared with ``checksums.json``, or, without it, their items with the checksums that torch.save stores.
    Chunks must tile their tensors and agree with the metadata, objects must be readable without running code, and the
    optimizer state of each parameter must be complete.

    Args:
        path: The folder.
        progress: Called with the number of bytes checked since the last call.
    """
    files: dict[str, str] = {}
    try:
        checksums = Checksums.load(path)
        files[METADATA] = _problem(lambda: checksums.check_metadata(path) if checksums else None)
        reader = CheckpointReader(path, verify=False)
        named = reader.files()
    except _PROBLEMS as error:
        files[METADATA] = _text(error)
        return Report(files, "", 0, 0, [_text(error)], [])
    progress((path / METADATA).stat().st_size)
    others = [name for name in (COMMON,) if (path / name).is_file()]
    for name in sorted({*named, *others, *(checksums.files if checksums else ())}):
        files[name] = _problem(partial(_check_file, path, name, checksums, named.get(name, 0)))
        if checksums and (path / name).is_file():
            progress((path / name).stat().st_size)
    problems = [text for text in files.values() if text]
    structure = _problem(reader.check)
    problems += [structure] if structure and structure not in problems else []
    damaged = {name for name, text in files.items() if text}
    for name, text in _contents(reader, damaged, checksums is None, progress):
        files[name] = files[name] or text
        problems.append(text)
    problems += incomplete(reader)
    unused = sorted(p.name for p in path.glob("*.distcp") if p.name not in named)
    checked_by = NAME if checksums else "chunk headers"
    return Report(files, checked_by, len(reader.tensors), len(reader.objects), problems, unused)


def _check_file(path: Path, name: str, checksums: Checksums | None, least: int) -> None:
    size = size_of(path / name)
    if size < least:
        raise DamagedCheckpoint(f"{path / name}: expected at least {least} bytes; got {size}.")
    if checksums and name not in checksums.files:
        raise DamagedCheckpoint(f"{path / name}: expected a checksum of it in {NAME}; got none.")
    if checksums:
        checksums.check_file(path, name)
    if name == COMMON:
        common_state(path, verify=False)


def _contents(
    reader: CheckpointReader, damaged: set[str], with_bytes: bool, progress: Callable[[int], None]
) -> Iterator[tuple[str, str]]:
    """Check the items in files that are not damaged: yields the file and the problem of each bad item."""
    for key, chunk in reader.items():
        if _problem(partial(reader.place, key, chunk)) or reader.place(key, chunk).file in damaged:
            continue  # reported already
        found = _problem(partial(_check_item, reader, key, chunk, with_bytes))
        if found:
            yield reader.place(key, chunk).file, found
        if with_bytes:
            progress(reader.place(key, chunk).length)


def _check_item(reader: CheckpointReader, key: str, chunk: Region | None, with_bytes: bool) -> None:
    if with_bytes:
        reader.check_contents(key, chunk)
    if chunk is None:
        reader.read_object(key)
    else:
        reader.stored(key, chunk)


def incomplete(reader: CheckpointReader) -> list[str]:
    """Problems of a Megatron checkpoint's keys: missing keys, and keys that do not fit together."""
    if reader.format == "torch_dist":
        found = [] if _has_common(reader) else [f"{reader.path}: expected {COMMON} or {COMMON_KEY}; got neither."]
        return found + _unlike_states(reader)
    if not any(key.startswith(WEIGHTS) for key in reader.tensors):
        return []  # not written by Megatron
    found = [f"{reader.path}: expected {key}; got none." for key in _NEEDED if key not in reader.objects]
    return found + _unlike_moments(reader)


def _has_common(reader: CheckpointReader) -> bool:
    return (reader.path / COMMON).is_file() or COMMON_KEY in reader.objects


def _unlike_states(reader: CheckpointReader) -> list[str]:
    """Problems of ``torch_dist`` keys ``optimizer.state.<state>.<model key>``: all states must have the same keys."""
    states: dict[str, set[str]] = {}
    for key in reader.tensors:
        state, _, name = key.removeprefix(_STATE).partition(".") if key.startswith(_STATE) else ("", "", "")
        if name:
            states.setdefault(state, set()).add(name)
    problems = []
    for name in sorted(set[str]().union(*states.values())):
        shapes = {state: reader.tensors[f"{_STATE}{state}.{name}"].shape for state in states if name in states[state]}
        missing = [f"{_STATE}{state}.{name}" for state in states if state not in shapes]
        problems += [f"{key}: expected it with the other states of {name}; got none." for key in missing]
        if len(set(shapes.values())) > 1:
            problems.append(f"{_STATE}*.{name}: expected states of one shape; got {shapes}.")
    return problems


def _unlike_moments(reader: CheckpointReader) -> list[str]:
    """In ``fsdp_dtensor``: ``optimizer.state.<prefix><name>.<state>`` must fit ``model.module.<name>``."""
    weights = {
        key.removeprefix(WEIGHTS): tensor.shape for key, tensor in reader.tensors.items() if key.startswith(WEIGHTS)
    }
    grouped = {
        bare_name(key.removeprefix(_GROUPS).rpartition(".")[0]) for key in reader.objects if key.startswith(_GROUPS)
    }
    moments: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in reader.tensors.items():
        if key.startswith(_STATE):
            name, _, state = key.removeprefix(_STATE).rpartition(".")
            moments.setdefault(bare_name(name), {})[state] = tensor.shape
    problems = []
    for name, found in sorted(moments.items()):
        shape = weights.get(name)
        if shape is None:
            problems.append(f"{WEIGHTS}{name}: expected the weight of an optimizer state; got none.")
        if found.keys() & set(_MOMENTS):
            problems += [f"{name}: expected {s} in the optimizer state; got none." for s in _MOMENTS if s not in found]
        problems += [
            f"{name}: expected {state} of the weight's shape {shape}; got {size}."
            for state, size in found.items()
            if shape is not None and size not in ((), shape)
        ]
        if without_half(name) not in grouped and not _STORED_OTHERWISE.search(name):
            problems.append(f"{name}: expected the settings of its optimizer group ({_GROUPS}...); got none.")
    return problems


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except _PROBLEMS as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
