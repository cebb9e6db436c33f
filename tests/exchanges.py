"""The two ways to exchange flat buffers: gloo's sends and receives, and the collectives that NCCL runs."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

SENDS, COLLECTIVES = "sends", "collectives"


def both_exchanges(name: str, strategies: Iterable[Any]) -> Callable[..., Any]:
    """Decorate a test that takes a strategy: it runs with both exchanges where anything is sharded, else with one.

    Args:
        name: The test's argument that takes the strategy, or several names as pytest writes them.
        strategies: Values of the argument. ``no_shard`` only reduces whole buffers, with one collective in any case.
    """
    pairs = [(s, e) for s in strategies for e in (SENDS, COLLECTIVES) if e == SENDS or not _shards_nothing(s)]
    flat = [((*s, e) if isinstance(s, tuple) else (s, e)) for s, e in pairs]
    parametrize = pytest.mark.parametrize(f"{name}, exchange", flat, indirect=["exchange"])
    return lambda test: parametrize(pytest.mark.usefixtures("exchange")(test))


def _shards_nothing(strategy: Any) -> bool:
    return set(strategy if isinstance(strategy, tuple) else (strategy,)) == {"no_shard"}
