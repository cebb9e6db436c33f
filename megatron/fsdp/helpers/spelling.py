"""Names of parameters, and help for who has misspelled one."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """A sentence, with a space before it, that names the choice nearest to ``name``; empty if none is near.

    Args:
        name: What was given.
        choices: What there is.
        cutoff: How near is near enough, from 0 to 1.
    """
    nearest = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def bare_name(name: str) -> str:
    """A parameter's name in the model itself, without the wrappers around it."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
