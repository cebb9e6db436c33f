"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes."""
    pool = RankPool()
    yield pool
    pool.close()
