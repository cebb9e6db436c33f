"""Matches the keys of a model against those of a checkpoint, and reports all mismatches at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.fsdp.checkpoint.coordination import gather_from_ranks, on_any_rank
from megatron.fsdp.helpers.spelling import did_you_mean


class Rows(NamedTuple):
    """A stored tensor that holds the rows of several of the model's tensors, one after the other.

    Attributes:
        key: The name of the stored tensor.
        parts: The keys of the model's tensors, in the order of their rows.
    """

    key: str
    parts: tuple[str, ...]


# Maps a key to the other names that its value may have in a checkpoint, the likeliest first.
Aliases = Callable[[str], Sequence[str | Rows]]
Shape = tuple[int, ...]
# Judges a key by its shape in the model and in the checkpoint. None: load the rows that both have, and set the model's
# further rows to zero. Otherwise the text that the error adds.
Padding = Callable[[str, Shape, Shape], str | None]
# Keys that a message lists.
SHOWN = 50


class Reaction(Enum):
    """Reactions to keys that do not match."""

    RAISE = "raise"
    LOG = "log"
    IGNORE = "ignore"


@dataclass(frozen=True)
class Strictness:
    """The reaction to keys that only the model or only the checkpoint has, and to different shapes.

    Attributes:
        missing: Reaction to keys that the model has and the checkpoint lacks.
        unexpected: Reaction to keys that the checkpoint has and the model of every rank lacks.
        optional: Whether a key may be missing in any case.
        extra: Whether a key may be unexpected in any case, because it describes the checkpoint itself.
        padding: Whether shapes differ by padding only. By default they never do.
        why: What messages add about unexpected keys.
    """

    missing: Reaction = Reaction.RAISE
    unexpected: Reaction = Reaction.IGNORE
    optional: Callable[[str], bool] = lambda key: False
    extra: Callable[[str], bool] = lambda key: False
    padding: Padding = lambda key, shape, stored: ""
    why: str = ""


@dataclass
class Match:
    """How the keys of a model correspond to those of a checkpoint.

    Attributes:
        sources: The checkpoint's name of every key that is loaded.
        starts: The first row of every key that is some rows of a larger stored tensor.
        missing: Keys that the checkpoint lacks.
        padded: Keys of which only the rows are loaded that both sides have.
        misshaped: The expected and the stored shape of keys whose shapes differ, as text.
    """

    sources: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    misshaped: dict[str, str] = field(default_factory=dict)


def match(wanted: Mapping[str, Any], metadata: Metadata, aliases: Aliases, padding: Padding) -> Match:
    """Look up every key of a model in a checkpoint.

    Args:
        wanted: The model's tensors and objects, by key.
        metadata: Of the checkpoint.
        aliases: Other names to try for a key that the checkpoint lacks.
        padding: Whether different shapes are accepted.
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
            # A single element, such as an optimizer's step, may be stored with any number of dimensions.
            if shape != tuple(stored.size) and not value.numel() == stored.size.numel() == 1:
                why_not = padding(key, shape, tuple(stored.size))
                if why_not is None:
                    found.padded.append(key)
                else:
                    found.misshaped[key] = f"expected {shape}; the checkpoint has {tuple(stored.size)}{why_not}"
    return found


def _candidates(key: str, aliases: Aliases) -> Iterator[Rows]:
    yield Rows(key, ())
    yield from (other if isinstance(other, Rows) else Rows(other, ()) for other in aliases(key))


def unexpected_keys(sources: Iterable[str], metadata: Metadata) -> list[str]:
    """Return the keys of a checkpoint that no rank loads. A collective."""
    keys = list(metadata.state_dict_metadata)
    loaded = set(sources)
    is_loaded = on_any_rank([key in loaded for key in keys])
    return [key for key, flag in zip(keys, is_loaded, strict=True) if not flag]


def report(found: Match, unexpected: Sequence[str], metadata: Metadata, strictness: Strictness) -> str:
    """Report all mismatches, of all ranks. A collective, so that either every rank raises an error or none does.

    Returns:
        Mismatches that are only to be logged; empty if there are none.

    Raises:
        RuntimeError: Keys are missing or unexpected, and the strictness forbids it.
        ValueError: Shapes differ.
    """
    of_ranks = gather_from_ranks(([key for key in found.missing if not strictness.optional(key)], found.misshaped))
    missing = list(dict.fromkeys(key for keys, _ in of_ranks for key in keys))
    misshaped = {key: text for _, of_rank in of_ranks for key, text in of_rank.items()}
    names = unexpected or metadata.state_dict_metadata.keys()
    hints = [f"{key}.{did_you_mean(key, names, 0.8)}" for key in missing[:SHOWN]]
    shapes = [f"{key}: {text}" for key, text in misshaped.items()]
    kinds = (
        (len(missing), "missing", hints, strictness.missing),
        (len(unexpected), f"unexpected{strictness.why}", unexpected[:SHOWN], strictness.unexpected),
        (len(misshaped), "of a different shape", shapes, Reaction.RAISE),
    )
    text = "\n".join(
        f"{count} {'key' if count == 1 else 'keys'} {kind}:\n  " + "\n  ".join(lines)
        for count, kind, lines, reaction in kinds
        if count and reaction is not Reaction.IGNORE
    )
    if any(count and reaction is Reaction.RAISE for count, _, _, reaction in kinds):
        raise (ValueError if misshaped else RuntimeError)(f"The checkpoint does not fit the model. {text}")
    return text
