"""How a kind of step is registered, and what several of them share."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of step: its function, the choices of its arguments (the plainest first), and how often it is chosen."""

    run: Callable[..., Any]
    choices: dict[str, tuple[Any, ...]]
    weight: float


KINDS: dict[str, Kind] = {}
ORDERS = ((0, 1), (0, 1), (0,), (1, 0), (1, 1, 0), ())
PARTS = ("all", "block", "head", "up")


def step(weight: float = 2, **choices: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        KINDS[function.__name__] = Kind(function, choices, weight)
        return function

    return register
