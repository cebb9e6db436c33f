"""Every mistake of tests/mistakes/README.md ends within seconds in the error that its row has, or it works."""

from importlib.util import find_spec

import pytest

from tests.mistakes import expected
from tests.mistakes.case import MEGATRON, check, run
from tests.mistakes.table import PATH, Mistake, mistakes
from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the table has the messages of a CPU")
MISTAKES = mistakes()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_mistake(ranks: RankPool, mistake: Mistake) -> None:
    if mistake.theme == MEGATRON and find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core")
    check(mistake, run(ranks, mistake))


def test_every_row_is_read_and_has_a_title_of_its_own() -> None:
    titles = [mistake.title for mistake in MISTAKES]
    assert len(set(titles)) == len(titles) > 100
    assert {*expected.CHECKS, *expected.ON, *expected.PARTS, *expected.OF_TORCH} <= set(titles)
    assert len(titles) == PATH.read_text().count("\n| **")
