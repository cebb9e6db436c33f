"""Copies a checkpoint with keys removed and renamed, without unpickling or computing anything."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.fsdp.checkpoint.checksums import METADATA, NAME
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.writer import Draft, RawObject

_OPERATIONS = "'remove REGEX' or 'rename REGEX REPLACEMENT'"


class Operation(NamedTuple):
    """A change of keys: remove those that match a pattern, or replace the pattern in them.

    Attributes:
        pattern: A regular expression, which may match anywhere in a key.
        replacement: A replacement as for ``re.sub``; None to remove the key.
    """

    pattern: re.Pattern[str]
    replacement: str | None

    def apply(self, key: str) -> str | None:
        """The new name; None if the key is removed."""
        if self.replacement is not None:
            return self.pattern.sub(self.replacement, key)
        return None if self.pattern.search(key) else key


def parse_operation(text: str) -> Operation:
    """Parse an operation from a command line; words are separated as in a shell.

    Args:
        text: ``remove REGEX`` or ``rename REGEX REPLACEMENT``.

    Raises:
        ValueError: It is neither.
    """
    try:
        # Regular expressions are full of backslashes: do not treat them as the shell's escapes.
        lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
        name, *words = list(lexer)
        if (name, len(words)) not in (("remove", 1), ("rename", 2)):
            raise ValueError(f"got {len(words)} words after {name!r}")
        operation = Operation(re.compile(words[0]), words[1] if name == "rename" else None)
        if operation.replacement is not None:
            re.compile(f"{words[0]}|").sub(operation.replacement, "")
    except (ValueError, re.error, IndexError) as error:
        raise ValueError(f"operation {text!r}: expected {_OPERATIONS}; {error}.") from error
    return operation


class Renaming(NamedTuple):
    """New keys by old ones, in the checkpoint's order, and the removed keys."""

    kept: dict[str, str]
    removed: list[str]


def rename(keys: Sequence[str], operations: Sequence[Operation]) -> Renaming:
    """Apply operations to keys, in order.

    Raises:
        ValueError: Two keys would get one name, or nothing would be left.
    """
    kept: dict[str, str] = {}
    owners: dict[str, str] = {}
    for key in keys:
        name: str | None = key
        for operation in operations:
            name = operation.apply(name) if name is not None else None
        if name is None:
            continue
        if name in owners:
            raise ValueError(f"{name}: expected one key of this name; got {owners[name]} and {key}.")
        kept[key], owners[name] = name, key
    if not kept:
        raise ValueError(f"expected operations that leave some of {len(keys)} keys; they remove all of them.")
    return Renaming(kept, [key for key in keys if key not in kept])


def modified(
    source: CheckpointReader, operations: Sequence[Operation], contents: bool = True
) -> tuple[Draft, Renaming]:
    """Plan a copy of a checkpoint.

    Args:
        source: The checkpoint.
        operations: The changes of its keys.
        contents: Whether to read the objects and other files. Of processes that share the work, the first needs them.

    Returns:
        The copy; the new keys and the removed ones.

    Raises:
        ValueError: Two keys would get one name, or nothing would be left.
    """
    renaming = rename([*source.tensors, *source.objects], operations)
    kept, attributes = renaming.kept, {}
    if isinstance(data := vars(source.metadata).get("mcore_data"), dict):
        attributes["mcore_data"] = {kept[key]: entry for key, entry in data.items() if key in kept}
    draft = Draft(
        tensors={kept[key]: tensor for key, tensor in source.tensors.items() if key in kept},
        objects={kept[k]: RawObject(source.object_bytes(k) if contents else b"") for k in source.objects if k in kept},
        planner_data=_planner_data(source.metadata.planner_data, kept),
        files=_files(source) if contents else {},
        attributes=attributes,
    )
    return draft, renaming


def _planner_data(found: Any, kept: Mapping[str, str]) -> dict[str, tuple[Any, ...]] | None:
    """The nesting of the keys; None if the planner stored something else, which loading does not need."""
    if not isinstance(found, dict):
        return None
    return {
        kept[key]: _renamed_path(path, key, kept[key])
        for key, path in found.items()
        if key in kept and isinstance(path, tuple)
    }


def _files(source: CheckpointReader) -> dict[str, bytes]:
    """The other files in the folder."""
    taken = {METADATA, NAME, *source.files()}
    paths = [p for p in source.path.iterdir() if p.is_file() and p.name not in taken and p.suffix != ".distcp"]
    return {path.name: path.read_bytes() for path in paths}


def _renamed_path(path: tuple[Any, ...], key: str, name: str) -> tuple[Any, ...]:
    """The path of a renamed key: it keeps the steps that both names have at the beginning and at the end."""
    if key == name or ".".join(map(str, path)) != key:
        return path if key == name else (name,)
    before, after, rest = 0, 0, name
    while before < len(path) - 1 and rest.startswith(f"{path[before]}."):
        rest = rest.removeprefix(f"{path[before]}.")
        before += 1
    while before + after < len(path) - 1 and rest.endswith(f".{path[len(path) - 1 - after]}"):
        rest = rest.removesuffix(f".{path[len(path) - 1 - after]}")
        after += 1
    return (*path[:before], rest, *path[len(path) - after :])
