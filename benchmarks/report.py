"""Writes the tables and plots of all results into out/benchmarks, and what is kept of them into docs.

    python -m benchmarks.report

docs/status.md gets when and where each benchmark ran, and what the planner predicted. docs/performance.md is written by
hand and explains the method; this module does not touch it.
"""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import planner, plots, targets
from benchmarks.columns import cell, columns_of
from benchmarks.figures import Summary
from benchmarks.peers import PEERS
from benchmarks.results import FOLDER, Case, Result, load_all
from benchmarks.sections import SECTIONS
from scripts import status

HEAD = """# Benchmark tables

`make bench-report` generates this page from the results next to it. docs/performance.md explains the method and the
peers. Tables show medians and, in brackets, quartiles.
"""


def page(results: Mapping[str, Result]) -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        parts.append(f"## {section.title}\n")
        if section.text:
            parts.append(f"{section.text}\n")
        parts.append(f"{block(name, results)}\n")
    return "\n".join(parts)


def block(name: str, results: Mapping[str, Result]) -> str:
    """The tables of one section: the targets, the machines, or all cases of a benchmark."""
    if name == "targets":
        return _targets(results)
    if name == "machine":
        return _machine(results)
    result = results.get(name)
    if result is None:
        return f"*Not measured: `python -m benchmarks --only {name}`.*"
    if result.skipped:
        return f"*Skipped: {result.skipped}.*"
    parts = ["*A quick run: these figures only show that the benchmark works.*"] if result.quick else []
    for number, case in enumerate(result.cases):
        parts.append(_case(result, case))
        if plots.is_plotted(result, case):
            parts.append(f"![{_words(case.tags)}](pictures/{plots.file_name(result, number)})")
    return "\n\n".join(parts)


def _words(tags: dict[str, Any]) -> str:
    return ", ".join(f"{value} {tag}" if isinstance(value, int) else str(value) for tag, value in tags.items())


def _case(result: Result, case: Case) -> str:
    columns = columns_of(result.benchmark, case)
    names = [name for name in PEERS if name in case.figures] + [name for name in case.figures if name not in PEERS]
    rows = [[_title(name), *(cell(column, case, name) for column in columns)] for name in names]
    notes = "".join(f"\n* {_escaped(note)}" for note in case.notes)
    table = _table(["peer", *(column.title for column in columns)], rows)
    return f"**{_words(case.tags)}**\n\n{table}" + (f"\n{notes}" if notes else "")


def _title(name: str) -> str:
    return PEERS[name].title if name in PEERS else name


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(_escaped(text) for text in line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _targets(results: Mapping[str, Result]) -> str:
    rows = []
    for verdict in targets.judge_all(results):
        value = "" if verdict.value is None else f"{verdict.value:.3g}"
        outcome = f"**{verdict.outcome}**" if verdict.outcome == "missed" else verdict.outcome
        rows.append([verdict.benchmark, verdict.target, verdict.case, value, outcome])
    return _table(["benchmark", "target", "case", "measured", "verdict"], rows)


def _machine(results: Mapping[str, Result]) -> str:
    if not results:
        return "*Nothing measured yet.*"
    rows = []
    for name, result in results.items():
        about, machine = result.about, result.about["machine"]
        versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
        bf16 = "native bf16" if machine["native_bf16"] else "no native bf16: figures in bf16 say little"
        where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {bf16}{gpus}"
        rows.append([name, about["date"][:10], about["commit"], where, versions])
    return _table(["benchmark", "date", "commit", "machine", "versions"], rows)


def summary(results: Mapping[str, Result]) -> str:
    """When, with which commit and on which processor the benchmarks ran."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        about = result.about
        groups.setdefault((about["date"][:10], about["commit"], about["machine"]["processor"]), []).append(name)
    rows = [[", ".join(names), *key] for key, names in groups.items()]
    return _table(["benchmarks", "date", "commit", "processor"], rows)


def predictions(results: Mapping[str, Result]) -> str:
    """The planner's errors over the strategies: of the peaks of memory, and of the step times."""
    memory, times = (_errors(results.get(name)) for name in ("predicted-memory", "prediction"))
    return f"Worst error of a strategy in % (in brackets: not judged).\n\n* Peak memory: {memory}\n* Step time: {times}"


def _errors(result: Result | None) -> str:
    """The worst error of each case's strategies that are judged, and of the others."""
    if result is None or result.skipped:
        return f"*{result.skipped if result else 'not measured'}*"
    found = []
    for case in (case for case in result.cases if planner.NAME not in case.figures):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for figures in case.figures.values():
            if "error" in figures:
                is_judged = "judged" not in figures or bool(figures["judged"].median)
                errors[is_judged].append(100 * figures["error"].median)
        worst = (form.format(max(errors[judged], key=abs)) for judged, form in _FORMS.items() if errors[judged])
        found.append(" ".join(["/".join(map(str, case.tags.values())), *worst]))
    tags = "/".join(result.cases[0].tags) if result.cases else ""
    found += [f"{name.replace('_', ' ')} {figure.median:.3g}" for name, figure in _summary(result).items()]
    return f"{tags} {'; '.join(found)}"


_FORMS = {True: "{:+.1f}", False: "({:+.1f})"}


def _summary(result: Result) -> dict[str, Summary]:
    return next((case.figures[planner.NAME] for case in result.cases if planner.NAME in case.figures), {})


def main() -> int:
    """Write the pages and the pictures."""
    results = load_all(FOLDER)
    pictures = FOLDER / "pictures"
    shutil.rmtree(pictures, ignore_errors=True)
    pictures.mkdir(parents=True)
    for result in results.values():
        for number, case in enumerate(result.cases):
            if plots.is_plotted(result, case):
                plots.draw(result, case, pictures / plots.file_name(result, number))
    (FOLDER / "tables.md").write_text(page(results))
    status.write("benchmarks", summary(results))
    status.write("predictions", predictions(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
