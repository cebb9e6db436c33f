"""Every mistake ends within seconds in an error that names the argument and says what to do, or it works.

``python scripts/mistake_table.py --write`` writes what these tests find to docs/mistakes.md.
"""

from importlib.util import find_spec

import pytest
import torch

from scripts import mistake_table
from tests.mistakes import THEMES, find
from tests.mistakes.case import LIMIT, LIMIT_OF_OTHERS, run, shown
from tests.ranks import DEVICE, RankPool

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the page has the messages of a CPU")

TITLES = [mistake.title for theme in THEMES for mistake in theme.mistakes]


@pytest.mark.parametrize("title", TITLES)
def test_mistake(ranks: RankPool, title: str) -> None:
    theme, mistake = find(title)
    if theme.title == "Megatron-Core" and find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core")
    outcomes = run(ranks, theme, mistake)
    assert min(each.seconds for each in outcomes if each.kinds or not mistake.error) < LIMIT, outcomes
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < LIMIT_OF_OTHERS, outcomes
        assert bool(outcome.kinds) == (mistake.error is not None and rank in mistake.on), outcomes
        if outcome.kinds:
            assert set(outcome.kinds) & set(mistake.errors), outcomes
            assert [part for part in mistake.says if part not in outcome.text] == [], outcome.text
    if torch.__version__.startswith(mistake_table.TORCH):
        assert mistake_table.on_page().get(title) == shown(outcomes, mistake), (
            "run: python scripts/mistake_table.py --write"
        )


def test_the_page_has_every_mistake_once() -> None:
    assert len(set(TITLES)) == len(TITLES)
    text = mistake_table.PAGE.read_text()
    assert mistake_table.as_markdown(mistake_table.on_page()) == text, "run: python scripts/mistake_table.py --write"
