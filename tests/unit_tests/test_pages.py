"""Pages of the documentation that are printed by a tool are what it prints."""

import inspect
from pathlib import Path

import pytest

from megatron_fsdp import fully_shard_model
from tests.models import TinyModel
from tests.ranks import DEVICE, RankPool
from tools import argument_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_arguments() -> None:
    page = argument_table.as_markdown()
    assert (DOCS / "arguments.md").read_text() == page, "run: python tools/argument_table.py > docs/arguments.md"


def test_every_argument_has_a_meaning_and_an_effect() -> None:
    names = set(inspect.signature(fully_shard_model).parameters)
    assert set(argument_table.meanings()) == names
    assert set(argument_table.EFFECTS) == names


def _average() -> None:
    with pytest.raises(ValueError, match="gloo can sum only"):
        fully_shard_model(TinyModel(), average_in_collective=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="NCCL can average")
def test_gloo_cannot_average(ranks: RankPool) -> None:
    ranks.run(1, _average)
