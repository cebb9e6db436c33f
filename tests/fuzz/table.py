"""The table of a run: programs, steps by kind, verdicts, refused steps by message, defects."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .program import Program
from .runner import Result
from .steps import KINDS


def table(results: list[Result], control: list[Result], seconds: float) -> str:
    """Markdown.

    Args:
        results: What became of the programs.
        control: The same for torch's FSDP2; may be empty.
        seconds: How long the run took.
    """
    count = len(results)
    verdicts, others = (Counter(result.verdict.kind for result in part) for part in (results, control))
    steps, refused = (
        sum(len(result.made.steps) for result in results),
        Counter(reason for result in results for _, reason in result.refused),
    )
    discarded = Counter(reason for result in results for _, reason in result.discarded)
    lines = [
        f"{count} programs of {steps / max(1, count):.1f} steps on average, in {seconds:.0f} s.",
        "",
        "| verdict | programs | with torch's FSDP2 |",
        "|---|---|---|",
        *(f"| {kind} | {verdicts[kind]} | {others[kind] if control else '-'} |" for kind in {**verdicts, **others}),
        "",
        f"Refused: {sum(refused.values())} steps, {100 * sum(refused.values()) / max(1, steps):.1f} % of all.",
        "",
        "| message | steps |",
        "|---|---|",
        *(f"| {reason} | {number} |" for reason, number in refused.most_common()),
        "",
        f"Discarded, because plain torch raises: {sum(discarded.values())} steps.",
        "",
        *(f"* {number}: {reason}" for reason, number in discarded.most_common(12)),
        "",
        "| step | programs | steps | refused | discarded |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        inside = [sum(one.kind == kind for one in result.program.steps) for result in results]
        dropped = [sum(name == kind for name, _ in part) for r in results for part in (r.refused, r.discarded)]
        lines.append(
            f"| {kind} | {sum(map(bool, inside))} | {sum(inside)} | {sum(dropped[::2])} | {sum(dropped[1::2])} |"
        )
    return "\n".join(lines) + "\n"


def mostly_discarded(results: list[Result]) -> dict[str, tuple[int, int]]:
    """The kinds of steps that plain torch refuses in more than half of their draws, or that were never drawn.

    Returns:
        For each, and for "all" if more than a tenth of all steps are discarded: how many were, and of how many.
    """
    drawn = Counter(one.kind for result in results for one in result.made.steps)
    lost = Counter(kind for result in results for kind, _ in result.discarded)
    found = {kind: (lost[kind], drawn[kind]) for kind in KINDS if 2 * lost[kind] > drawn[kind] or not drawn[kind]}
    every = lost.total(), drawn.total()
    return found | ({"all": every} if 10 * every[0] > every[1] else {})


def frequencies(made: Iterable[Program]) -> str:
    """Markdown: how many programs have each kind of step, and which of its arguments' values are in the fewest."""
    kinds: Counter[str] = Counter()
    values: Counter[tuple[str, str, Any]] = Counter()
    lengths = []
    for program in made:
        lengths.append(len(program.steps))
        kinds.update({one.kind for one in program.steps})
        values.update({(one.kind, name, value) for one in program.steps for name, value in one.arguments.items()})
        features = program.setting.features._asdict()
        for name, value in (program.setting._asdict() | features).items():
            values["", name, repr(value)] += name != "features"
    mean = sum(lengths) / max(1, len(lengths))
    lines = [f"{len(lengths)} programs of {mean:.1f} steps on average.", ""]
    lines += ["| step | programs | fewest have | programs |", "|---|---|---|---|"]
    for kind in KINDS:
        every = [(kind, name, value) for name, choices in KINDS[kind].choices.items() for value in choices]
        rarest = min(every, key=lambda each: values[each], default=None)
        rare = f"{rarest[1]}={rarest[2]!r} | {values[rarest]}" if rarest else "|"
        lines.append(f"| {kind} | {kinds[kind]} | {rare} |")
    lines += ["", "| setting | programs |", "|---|---|"]
    settings = sorted((name, value) for kind, name, value in values if not kind and name != "features")
    lines += [f"| {name}={value} | {values['', name, value]} |" for name, value in settings]
    return "\n".join(lines) + "\n"


def defect(found: list[Result], reduced: Result) -> str:
    """A kind of defect: how many programs have it, and the reduced one."""
    verdict = reduced.verdict
    head = f"{len(found)} programs: {verdict.kind} in step {verdict.at + 1}: {verdict.what[:400]}"
    return f"\n## {head}\n\n```python\n{source(reduced)}```\n\n```text\n{verdict.trace[-1500:]}\n```\n"


def source(result: Result) -> str:
    """A script that runs the program, which a test keeps in tests/fuzz/found.py."""
    what = result.verdict.what.splitlines()[0][:100] if result.verdict.what else ""
    program = result.program.source()
    features = "from tests.fuzz.network import Features\n" if "Features(" in program else ""
    return f'''"""{result.verdict.kind}: {what.replace('"', "'")}"""

{features}from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

{program}
if __name__ == "__main__":
    check(PROGRAM)
'''
