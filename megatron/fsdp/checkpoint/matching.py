"""What a model asks for against what a checkpoint has: one report of everything that does not fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.fsdp.helpers.spelling import did_you_mean


class Rows(NamedTuple):
    """A tensor of a checkpoint that has the rows of several wanted ones, one after the other.

    Attributes:
        key: Its name.
        parts: The keys of those.
    """

    key: str
    parts: tuple[str, ...]


# What else a value may be in a checkpoint, the likeliest first.
Aliases = Callable[[str], Sequence[str | Rows]]
SHOWN = 50


class Reaction(Enum):
    """What to do about a difference."""

    RAISE = "raise"
    LOG = "log"
    IGNORE = "ignore"


@dataclass(frozen=True)
class Strictness:
    """What to do about keys that only one side has. A shape that differs is always an error.

    Attributes:
        missing: The model has it, the checkpoint does not.
        unexpected: The checkpoint has it, no rank's model does.
        optional: Whether a missing key is all right in any case.
        extra: Whether an unexpected key is: it says something about the checkpoint.
    """

    missing: Reaction = Reaction.RAISE
    unexpected: Reaction = Reaction.IGNORE
    optional: Callable[[str], bool] = lambda key: False
    extra: Callable[[str], bool] = lambda key: False


@dataclass
class Match:
    """How the keys of a model and of a checkpoint go together.

    Attributes:
        sources: For every key that is loaded, the checkpoint's name of it.
        starts: For those that are some rows of a larger tensor, the first of these.
        missing: Keys that the checkpoint does not have.
        misshaped: For keys of other shapes: what is expected, and what is there.
    """

    sources: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


def match(wanted: Mapping[str, Any], metadata: Metadata, aliases: Aliases) -> Match:
    """Find every wanted key in a checkpoint.

    Args:
        wanted: Tensors and objects by key.
        metadata: Of the checkpoint.
        aliases: What else to look for if a key is not there.
    """
    found = Match()
    there = metadata.state_dict_metadata
    for key, value in wanted.items():
        candidates = _candidates(key, aliases)
        source = next((c for c in candidates if c.key in there and all(part in wanted for part in c.parts)), None)
        if source is None:
            found.missing.append(key)
            continue
        found.sources[key] = source.key
        stored = there[source.key]
        if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            if source.parts and shape:
                lengths = [wanted[part].shape[0] for part in source.parts]
                found.starts[key] = sum(lengths[: source.parts.index(key)])
                shape = (sum(lengths), *shape[1:])
            if shape != tuple(stored.size) and value.numel() > 1:
                found.misshaped[key] = shape, tuple(stored.size)
    return found


def _candidates(key: str, aliases: Aliases) -> Iterator[Rows]:
    yield Rows(key, ())
    yield from (other if isinstance(other, Rows) else Rows(other, ()) for other in aliases(key))


def unexpected_keys(sources: Iterable[str], metadata: Metadata) -> list[str]:
    """Keys of a checkpoint that no rank asks for. A collective."""
    keys = list(metadata.state_dict_metadata)
    asked = set(sources)
    flags = torch.tensor([key in asked for key in keys], dtype=torch.int32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flags = flags.to(device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [key for key, flag in zip(keys, flags.tolist(), strict=True) if not flag]


def report(found: Match, unexpected: Sequence[str], metadata: Metadata, strictness: Strictness) -> str:
    """Say what does not fit, and raise if it must not be so. A collective: ranks agree on whether to raise.

    Returns:
        What is only to be logged; empty if there is nothing.

    Raises:
        RuntimeError: Keys are missing, or unexpected, and must not be.
        ValueError: Shapes differ.
    """
    missing = [key for key in found.missing if not strictness.optional(key)]
    everyone = [(missing, found.misshaped)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        any_wrong = torch.tensor([int(bool(missing or found.misshaped))], dtype=torch.int32, device=device)
        dist.all_reduce(any_wrong, dist.ReduceOp.MAX)
        if any_wrong.item():
            everyone = [([], {})] * dist.get_world_size()
            dist.all_gather_object(everyone, (missing, found.misshaped))
    missing = list(dict.fromkeys(key for keys, _ in everyone for key in keys))
    misshaped = {key: shapes for _, of_rank in everyone for key, shapes in of_rank.items()}
    names = metadata.state_dict_metadata.keys()
    parts = {
        "missing": [f"{key}.{did_you_mean(key, unexpected or names, 0.8)}" for key in missing[:SHOWN]],
        "unexpected": [*unexpected[:SHOWN]],
        "of another shape": [
            f"{key}: expected {want}; the checkpoint has {got}" for key, (want, got) in misshaped.items()
        ],
    }
    counts = {"missing": len(missing), "unexpected": len(unexpected), "of another shape": len(misshaped)}
    fatal = {
        "missing": bool(missing) and strictness.missing is Reaction.RAISE,
        "unexpected": bool(unexpected) and strictness.unexpected is Reaction.RAISE,
        "of another shape": bool(misshaped),
    }
    logged = {
        "missing": strictness.missing is not Reaction.IGNORE,
        "unexpected": strictness.unexpected is not Reaction.IGNORE,
        "of another shape": True,
    }
    text = "\n".join(
        f"{counts[kind]} {'key' if counts[kind] == 1 else 'keys'} {kind}:\n  " + "\n  ".join(lines)
        for kind, lines in parts.items()
        if counts[kind] and logged[kind]
    )
    if any(fatal.values()):
        raise (ValueError if misshaped else RuntimeError)(f"The checkpoint does not fit the model. {text}")
    return text
