"""Every mistake of docs/mistakes.md ends within seconds in the error that the page has, or it works."""

from importlib.util import find_spec

import pytest

from tests.mistakes import expected
from tests.mistakes.case import MEGATRON, check, run
from tests.mistakes.page import PAGE, Mistake, mistakes, with_messages
from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the page has the messages of a CPU")
MISTAKES = mistakes()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_mistake(ranks: RankPool, mistake: Mistake) -> None:
    if mistake.theme == MEGATRON and find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core")
    check(mistake, run(ranks, mistake))


def test_rows_have_titles_of_their_own_and_one_form() -> None:
    titles = [mistake.title for mistake in MISTAKES]
    assert len(set(titles)) == len(titles) > 100
    assert {*expected.CHECKS, *expected.ON, *expected.PARTS, *expected.OF_TORCH} <= set(titles)
    assert with_messages({}) == PAGE.read_text(), "run: python scripts/mistake_table.py --write nothing"
