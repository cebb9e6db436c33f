"""Generated pages of the documentation match the output of their tools."""

import ast
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

from megatron_fsdp import fully_shard_model
from scripts import argument_table, compatibility_table, draw_pictures, status
from tests.docs_code import read_page
from tests.models import TinyModel
from tests.ranks import DEVICE, RankPool, on_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def _step() -> str:
    return draw_pictures.draw_step(draw_pictures.record_step()).svg()


@pytest.mark.skipif(DEVICE == "cuda", reason="the simulated device computes on CPU tensors")
def test_pictures(ranks: RankPool) -> None:
    drawn = {**{name: draw().svg() for name, draw in draw_pictures.STATIC.items()}, "step": ranks.run(1, _step)[0]}
    for name, svg in drawn.items():
        assert (DOCS / "images" / f"{name}.svg").read_text() == svg, "run: python scripts/draw_pictures.py"


def test_losses_lie_on_top_of_each_other(ranks: RankPool) -> None:
    ddp, sharded = ranks.run(2, draw_pictures.both_losses)[0]
    assert sharded == pytest.approx(ddp, rel=1e-6) and ddp[-1] < 0.5 * ddp[0]


def test_pages_say_where_the_arguments_of_their_commands_are_defined() -> None:
    users = [page for page in DOCS.rglob("*.md") if "${GPT[@]}" in (text := page.read_text()) and "GPT=(" not in text]
    assert len(users) > 10
    assert [page.name for page in users if "start/megatron.md#2-add-the-flags" not in page.read_text()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("examples/**/README.md")])
def test_blocks_that_no_test_runs_are_visibly_marked(page: Path) -> None:
    commands = read_page(page).commands
    # Where GPT is defined, readers learn that the doctor alone has checked its commands.
    own = [block.code for block in commands if block.doctor is not None and "GPT" not in block.code]
    assert not own or "checked by the doctor" in page.read_text() or page.stem == "pretrain_megatron", own


def test_every_argument_is_described() -> None:
    names = set(inspect.signature(fully_shard_model).parameters)
    assert set(argument_table.described(fully_shard_model)) == names


def test_compatibility() -> None:
    for feature in compatibility_table.FEATURES:
        for test in (*feature.tests, *(f"simulated/{test}" for test in feature.simulated)):
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / "unit_tests" / file).read_text()
            assert re.search(rf"^(def )?{name}\b", text, re.MULTILINE), test


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
    training = "tests/unit_tests/test_training.py::"
    names = [f"{training}test_tied", f"{training}test_frozen", "tests/unit_tests/test_deferred.py"]
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


@on_ranks(1)
@pytest.mark.skipif(DEVICE == "cuda", reason="NCCL can average")
def test_gloo_cannot_average() -> None:
    with pytest.raises(ValueError, match="gloo can sum only"):
        fully_shard_model(TinyModel(), average_in_collective=True)


GUIDE = sorted(page for page in (DOCS / "guide").glob("*.md"))
HEAD = "| Megatron flag / field | `fully_shard` argument | default | values |\n"
# Pages about tools, and about no single option.
WITHOUT_OPTIONS = {"index", "doctor", "verify", "settings", "multi_node"}
# Described elsewhere: the model itself, where it computes, arguments without effect, and what ranks start from.
NOT_IN_GUIDE = {"module", "device", "disable_bucketing", "preproc_state_dict_for_dcp_ckpt"}


@pytest.mark.parametrize(
    "page", [page for page in GUIDE if page.stem not in WITHOUT_OPTIONS], ids=lambda page: page.stem
)
def test_pages_of_the_guide_begin_with_both_ways_to_set_an_option(page: Path) -> None:
    text = page.read_text()
    assert text.count(HEAD) == 1 and text.index(HEAD) < text.index("\n## ")
    assert f"({page.name}" in (DOCS / "guide" / "index.md").read_text(), "add it to docs/guide/index.md"


def test_the_guide_describes_every_argument() -> None:
    text = "".join(page.read_text() for page in GUIDE)
    arguments = set(inspect.signature(fully_shard_model).parameters) - NOT_IN_GUIDE
    assert not [name for name in arguments if not re.search(rf"`{name}\b", text)]


def test_the_start_page_leads_to_every_task() -> None:
    tasks = "start/pytorch start/megatron tutorials/resume checkpoints troubleshooting hangs guide/fp8".split()
    tasks += ["frameworks/huggingface", "coming_from/ddp", "coming_from/nvidia"]
    assert {*tasks} <= set(re.findall(r"\]\(([^)\s#]*)\.md", (DOCS / "index.md").read_text()))


def test_names_are_imported_from_where_the_reference_says() -> None:
    text = (DOCS / "reference" / "index.md").read_text()
    rows = re.findall(r"^\| \[.*?\]\(\S+\) \| (.*?) \| `(\S+)` \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for names, package in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            # Importing Megatron-Core's class needs a GPU, or a call before.
            assert name == "FullyShardedDataParallel" or pkgutil.resolve_name(f"{package}.{name}")


def test_launch_scripts_have_the_recommended_settings() -> None:
    block = re.search(r"^FSDP=\((.*?)^\)", (DOCS / "guide" / "settings.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    wanted = set(re.findall(r"--[\w-]+", block[1]))
    scripts = [path.read_text() for path in (ROOT / "examples" / "megatron_fsdp").glob("*.s*")]
    used = [set(re.findall(r"--[\w-]+", text)) for text in scripts if "--use-megatron-fsdp" in text]
    assert len(used) == 3 and all(flags >= wanted for flags in used), [wanted - flags for flags in used]
    assert not any(flags & {"--no-gradient-accumulation-fusion", "--grad-reduce-in-bf16"} for flags in used)


def test_no_page_runs_code_from_a_hidden_import_of_the_tests() -> None:
    assert [page.name for page in DOCS.rglob("*.md") if "from tests." in page.read_text()] == []


def _imported(code: str) -> set[str]:
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).split(".")[0] for node in found for alias in node.names}


def _assigned(code: str) -> set[str]:
    made = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Name, ast.FunctionDef, ast.ClassDef))]
    return {
        n.id if isinstance(n, ast.Name) else n.name
        for n in made
        if isinstance(getattr(n, "ctx", None) or ast.Store(), ast.Store)
    }


@pytest.mark.parametrize("page", DOCS.rglob("*.md"), ids=lambda page: page.stem)
def test_visible_code_imports_what_it_uses(page: Path) -> None:
    yours = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"[^.\n]*\b(?:are|is) yours\b", page.read_text()))))
    for script in re.split(r"<!-- script: .*? -->", page.read_text()):
        hidden = "\n".join(re.findall(r"<!-- hidden\n(.*?)-->", script, re.DOTALL))
        shown = re.sub(r"<!-- hidden\n.*?-->|<!-- not run.*?-->\s*```python.*?```", "", script, flags=re.DOTALL)
        blocks = re.findall(r"^( *)```python[^\n]*\n(.*?)^ *```", shown, re.DOTALL | re.MULTILINE)
        visible = "\n".join(textwrap.dedent(block) for _, block in blocks)
        used = {node.id for node in ast.walk(ast.parse(visible)) if isinstance(node, ast.Name)}
        assert not used & _imported(hidden) - _imported(visible)
        assert used & _assigned(hidden) - _assigned(visible) <= yours, "say which names are the reader's"


def test_the_words_are_within_the_budget() -> None:
    assert (site := pytest.importorskip("scripts.site_hooks", reason="needs mkdocs")).words() <= site.BUDGET
    assert site.words(ROOT / "README.md") <= 630


def test_the_site_is_not_built_above_the_budget_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    site = pytest.importorskip("scripts.site_hooks", reason="needs mkdocs")
    monkeypatch.setattr(site, "BUDGET", 0)
    with pytest.raises(site.PluginError, match=r"have [\d,]+ words; expected at most 0"):
        site.on_config(None)


def _rows(page: str, *words: str) -> list[list[float]]:
    """The numbers of the rows of tables that begin with these cells."""
    start, number = "".join(rf"\| {re.escape(word)} " for word in words), r"(?<![\w.#])\d+(?:\.\d+)?(?![\w.]*\.md)"
    rows = re.findall(rf"^{start}\|(.*)$", (DOCS / page).read_text(), re.MULTILINE)
    return [[float(found) for found in re.findall(number, cells.replace(",", ""))] for cells in rows]


def _row(page: str, *words: str) -> list[float]:
    """The numbers of the one row that begins with these cells."""
    (row,) = _rows(page, *words)
    return row


def test_figures_of_the_readme_are_those_of_the_page_with_their_source() -> None:
    """Performance has ratios of this engine to a peer; the README has those of a peer to this engine."""
    copied = _row("performance.md", "copied around all-gathers in an fp32 step, MiB")
    assert _row("../README.md", "copied around all-gathers, MiB per step") == copied
    _, *ratios = _row("performance.md", "64")
    peak = _row("../README.md", "peak memory, one of 64 simulated ranks, relative")
    assert peak == pytest.approx([1, *(1 / ratio for ratio in ratios)], abs=0.005)
    full, layers, _ = _rows("performance.md", "peak, GiB")
    found = _row("../README.md", "peak on one H200, two models, GiB")
    assert found == [peak for pair in zip(full, layers, strict=True) for peak in pair]


def test_what_has_run_on_gpus_stands_on_few_pages() -> None:
    said = re.compile(r"\bone\s+GPU\b[^.]*\bnever\s+on\s+several")
    pages = [page.stem for page in (*DOCS.rglob("*.md"), *ROOT.glob("*.md")) if said.search(page.read_text())]
    assert sorted(pages) == ["README", "index", "status"]


PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("examples/**/README.md")]
PATH = r"(?<![\w./$<{-])(?:\w[\w.-]*/)+[\w.*-]+\.(?:py|md|sh|sbatch|svg|png|toml|yml)\b"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text().lower(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


# mkdocs checks links between pages of the site; the README is not among them, nor are files outside of it.
def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        text = re.sub(r"^ *(```+).*?^ *\1$|`[^`\n]+`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", text):
            file = page.parent / target if target else page
            assert file.exists() and (not anchor or anchor in _anchors(file)), f"{page}: {target}#{anchor}"


def test_paths_of_the_repository_exist() -> None:
    # Those without a folder of the repository before them are the engine's, as in docs/design.md, or of its tests.
    roots = [ROOT / start for start in ("", "megatron/fsdp", "tests", "tests/unit_tests", "tests/fuzz")]
    folders = {path.name for root in roots for path in root.iterdir()} - {"out"}  # commands write that
    named = [(page, path) for page in PAGES for path in re.findall(PATH, page.read_text())]
    ours = [(page, path) for page, path in named if path.split("/")[0] in folders]
    assert len(ours) > 100
    assert not [each for each in ours if not any(next(root.glob(each[1]), None) for root in (each[0].parent, *roots))]
