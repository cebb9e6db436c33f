"""Generated pages of the documentation match the output of their tools."""

import inspect
import re
from pathlib import Path

import pytest

from megatron_fsdp import fully_shard_model
from scripts import argument_table, compatibility_table, draw_pictures, status
from tests.models import TinyModel
from tests.ranks import DEVICE, RankPool

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_arguments() -> None:
    page = argument_table.as_markdown()
    assert (DOCS / "arguments.md").read_text() == page, "run: python scripts/argument_table.py --write"


def _step() -> str:
    return draw_pictures.draw_step(draw_pictures.record_step()).svg()


@pytest.mark.skipif(DEVICE == "cuda", reason="the simulated device computes on CPU tensors")
def test_pictures(ranks: RankPool) -> None:
    drawn = {"layout": draw_pictures.draw_layout().svg(), "step": ranks.run(1, _step)[0]}
    for name, svg in drawn.items():
        assert (DOCS / "images" / f"{name}.svg").read_text() == svg, "run: python scripts/draw_pictures.py"


def test_every_argument_is_described() -> None:
    names = set(inspect.signature(fully_shard_model).parameters)
    assert set(argument_table.described(fully_shard_model)) == names
    assert set(argument_table.EFFECTS) <= names


def test_compatibility() -> None:
    for feature in compatibility_table.FEATURES:
        for test in (*feature.tests, *(f"simulated/{test}" for test in feature.simulated)):
            file, _, name = test.partition("::")
            assert f"def {name}" in (DOCS.parent / "tests" / "unit_tests" / file).read_text()


def test_results_replace_blocks_of_the_status_page(tmp_path: Path) -> None:
    text = status.PAGE.read_text()
    assert all(text.count(f"<!-- {block} -->\n") == 1 for block in ("compatibility", "benchmarks"))
    page = tmp_path / "status.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n")
    status.write("x", "new\n", page)
    assert page.read_text() == "a\n<!-- x -->\n\nnew\n\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n"
    with pytest.raises(ValueError, match="expected a block that begins with '<!-- z -->'"):
        status.write("z", "new", page)


def test_a_summary_groups_features_by_what_they_work_with() -> None:
    names = [
        f"tests/unit_tests/{test}" for test in ("test_tied.py::test_a", "test_frozen.py::test_a", "test_deferred.py")
    ]
    works = dict.fromkeys(compatibility_table.STRATEGIES, "passed")
    found = compatibility_table.summary(
        {"cpu": {names[0]: works, names[1]: works | {"optim": "failed"}, names[2]: {"": "skipped"}}}
    )
    assert "| all strategies | tied parameters, also across units |" in found
    assert "| **fails** | frozen parameters |" in found and "Tests: 7 passed, 1 failed, 1 skipped." in found


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


GUIDE = sorted(page for page in (DOCS / "guide").glob("*.md") if page.stem not in ("index", "doctor", "verify"))
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
