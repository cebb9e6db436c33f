"""Which tests are left to `make test-all`: longer runs of what others show, too."""

from collections.abc import Iterable
from typing import Any

import pytest

# ZeRO-1 (full gradients, sharded main weights) and ZeRO-3 (everything sharded) take the code paths of these as well.
LATER_STRATEGIES = ("no_shard", "optim_grads")


def all_but_slow(values: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of a test, of which CI takes only ``quick`` ones."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
