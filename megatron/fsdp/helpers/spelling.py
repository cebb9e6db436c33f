"""Names in error messages: suggestions for misspelled names, and parameter names without wrappers."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: object, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """A sentence that suggests the choice closest to ``name``, with a leading space; empty if none is close.

    Args:
        name: The unknown name.
        choices: The known names.
        cutoff: Minimum similarity of a suggestion, from 0 to 1.
    """
    nearest = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def bare_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def shortened(names: Sequence[str], most: int = 5) -> str:
    """The names, or the first of them and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
