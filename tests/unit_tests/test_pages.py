"""Generated pages of the documentation match the output of their tools."""

import inspect
import json
import re
from pathlib import Path

import pytest

from megatron_fsdp import fully_shard_model
from tests.models import TinyModel
from tests.ranks import DEVICE, RankPool
from tools import argument_table, compatibility_table, draw_pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_arguments() -> None:
    page = argument_table.as_markdown()
    assert (DOCS / "arguments.md").read_text() == page, "run: python tools/argument_table.py --write"


def _step() -> str:
    return draw_pictures.draw_step(draw_pictures.record_step()).svg()


@pytest.mark.skipif(DEVICE == "cuda", reason="the simulated device computes on CPU tensors")
def test_pictures(ranks: RankPool) -> None:
    drawn = {"layout": draw_pictures.draw_layout().svg(), "step": ranks.run(1, _step)[0]}
    for name, svg in drawn.items():
        assert (DOCS / "images" / f"{name}.svg").read_text() == svg, "run: python tools/draw_pictures.py"


def test_every_argument_is_described() -> None:
    names = set(inspect.signature(fully_shard_model).parameters)
    assert set(argument_table.described(fully_shard_model)) == names
    assert set(argument_table.EFFECTS) <= names


def test_compatibility() -> None:
    results = json.loads(compatibility_table.RESULTS.read_text())
    assert (DOCS / "compatibility.md").read_text() == compatibility_table.as_markdown(results), (
        "run: make compatibility"
    )
    for feature in compatibility_table.FEATURES:
        for test in (*feature.tests, *(f"simulated/{test}" for test in feature.simulated)):
            file, _, name = test.partition("::")
            assert f"def {name}" in (DOCS.parent / "tests" / "unit_tests" / file).read_text()
            assert any(t.startswith(f"tests/unit_tests/{test}") for t in results["cpu"]), "run: make compatibility"


def test_a_failed_test_shows() -> None:
    feature = compatibility_table.Feature("x", ("test_x.py",))
    results = {"tests/unit_tests/test_x.py::test_a": {"optim": "passed", "no_shard": "failed"}}
    found = [compatibility_table.outcome(results, feature, strategy) for strategy in compatibility_table.STRATEGIES]
    assert found == ["**fails**", "works", "", ""]


def test_the_simulated_device_counts_apart() -> None:
    feature = compatibility_table.Feature("x", ("test_x.py",), simulated=("test_y.py::test_b",))
    results = {"tests/unit_tests/simulated/test_y.py::test_b": {"optim": "passed", "no_shard": "skipped"}}
    assert compatibility_table.simulated(results, feature) == "optim"
    assert {compatibility_table.outcome(results, feature, s) for s in compatibility_table.STRATEGIES} == {""}
    results["tests/unit_tests/simulated/test_y.py::test_b"]["optim_grads"] = "failed"
    assert compatibility_table.simulated(results, feature) == "**fails**"


def _average() -> None:
    with pytest.raises(ValueError, match="gloo can sum only"):
        fully_shard_model(TinyModel(), average_in_collective=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="NCCL can average")
def test_gloo_cannot_average(ranks: RankPool) -> None:
    ranks.run(1, _average)


GUIDE = sorted(page for page in (DOCS / "guide").glob("*.md") if page.stem not in ("index", "doctor"))
HEAD = "| Megatron flag / field | `fully_shard` argument | default | values |\n"
SECTIONS = ["What it does", "Should I turn it on?", "Example", "Works with / not with", "How to see that it works"]
# Described elsewhere: the model itself, where it computes, and an argument without effect.
NOT_IN_GUIDE = {"module", "device", "disable_bucketing"}


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_pages_of_the_guide_have_one_form(page: Path) -> None:
    text = page.read_text()
    assert text.count(HEAD) == 1 and text.index(HEAD) < text.index("\n## ")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert f"({page.name})" in (DOCS / "guide" / "index.md").read_text(), "add it to docs/guide/index.md"


def test_the_guide_describes_every_argument() -> None:
    text = "".join(page.read_text() for page in GUIDE)
    arguments = set(inspect.signature(fully_shard_model).parameters) - NOT_IN_GUIDE
    assert not [name for name in arguments if not re.search(rf"`{name}\b", text)]
