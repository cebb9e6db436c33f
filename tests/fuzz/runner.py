"""Runs programs on warm ranks, drops refused steps, attributes hangs and crashes, and reduces what is wrong."""

import contextlib
import io
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.ranks import RankFailure, RankPool

from .network import CHOICES as FEATURES
from .program import SECONDS, Program, Step, Verdict, run_in
from .settings import CHOICES
from .steps import KINDS

REFUSALS = [
    re.compile(line)
    for line in (Path(__file__).parent / "refusals.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

# The ranks of this process, where it runs programs for another one.
HERE: "Runner"


class Result(NamedTuple):
    """A program as it was made, what is left of it, its verdict, and the dropped steps with the reasons.

    Those that are refused are counted apart from those that plain torch refuses.
    """

    made: Program
    program: Program
    verdict: Verdict
    refused: list[tuple[str, str]]
    discarded: list[tuple[str, str]]

    @property
    def dropped(self) -> list[tuple[str, str]]:
        """Steps that say nothing: refused ones, and those that raise another error in plain torch than torch's own."""
        return self.refused + [(kind, what) for kind, what in self.discarded if not what.startswith("RuntimeError")]

    @property
    def signature(self) -> tuple[str, str]:
        """The key of a defect before it is reduced."""
        what = self.verdict.what.split(":")[0] if self.verdict.kind == "wrong" else self.verdict.what
        return self.verdict.kind, re.sub(r"\d+|'[^']*'|\b(inp|head|odd|blocks|batchnorm)\.\S*", "*", what)[:70]


class Runner:
    """Ranks that run programs.

    Args:
        torchs: Run the sharded side with torch's FSDP2.
        project: The folder of the project to run, if it is not this one.
    """

    def __init__(self, torchs: bool = False, project: str = "") -> None:
        self.pool = RankPool()
        self.torchs = torchs
        self.project = project

    def verdicts(self, programs: list[Program], seconds: int = SECONDS) -> list[Verdict]:
        """Verdicts of the first programs, at least of one. All have the same number of ranks.

        Args:
            programs: The programs.
            seconds: An alarm ends a rank whose program takes longer. Alone, it then gets ten times as long, and so does
                one that has crashed: the machine may be busy, and writing the stack of a running thread may crash.
        """
        self.pool.timeout = seconds * (2 + len(programs))
        try:
            with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                try:
                    arguments = self.project, programs, self.torchs, Path(folder), seconds
                    verdicts = self.pool.run(programs[0].setting.ranks, run_in, *arguments)[0]
                finally:
                    texts = [file.read_text() for file in Path(folder).glob("?")]
                    notes = [text.split(" ", 1) for text in texts if text]  # a rank may end while it writes
                    traces = "\n".join(file.read_text() for file in Path(folder).glob("*.trace"))
        except RankFailure as failure:
            at = min((int(note[0]) for note in notes), default=0)
            said = {note[1] for note in notes if int(note[0]) == at and note[1:]}
            before = self.verdicts(programs[:at]) if at else []
            if len(before) < at:
                return before
            lost = _lost(str(failure), said, traces)
            if seconds == SECONDS:
                return [*before, *self.verdicts(programs[at : at + 1], 10 * seconds)]
            return [*before, lost]
        if verdicts[-1].mismatch:
            self.pool.close()
        return verdicts

    def results(self, programs: list[Program], size: int = 25) -> list[Result]:
        """Run programs; steps that are refused are dropped, and their programs run again."""
        waiting = [Result(program, program, Verdict("right"), [], []) for program in programs]
        done: list[Result] = []
        while waiting:
            world = waiting[0].program.setting[:2]
            batch = [result for result in waiting if result.program.setting[:2] == world][:size]
            verdicts = self.verdicts([result.program for result in batch])
            again: list[Result] = []
            for result, verdict in zip(batch, verdicts, strict=False):
                waiting.remove(result)
                result = self._judge(result._replace(verdict=verdict))
                (again if result.verdict.kind == "again" else done).append(result)
            waiting = again + waiting
        return done

    def _judge(self, result: Result) -> Result:
        """Drop a step that was refused, or that plain torch refuses."""
        verdict, program = result.verdict, result.program
        reason = next((r.pattern for r in REFUSALS if verdict.kind == "error" and r.search(verdict.what)), None)
        if verdict.at >= len(program.steps) or (reason is None and verdict.kind != "plain"):
            return result
        kind = program.steps[verdict.at].kind
        program = program._replace(steps=program.steps[: verdict.at] + program.steps[verdict.at + 1 :])
        if reason:
            result = result._replace(refused=[*result.refused, (kind, reason)])
        else:
            result = result._replace(discarded=[*result.discarded, (kind, verdict.what.splitlines()[0][:100])])
        return result._replace(program=program, verdict=Verdict("again" if program.steps else "right"))

    def reduce(self, result: Result, seconds: float) -> Result:
        """A smaller program of the same kind of defect."""
        best, waiting, end = result, _smaller(result.program), time.time() + seconds
        while waiting and time.time() < end:
            other = self.results([waiting.pop(0)])[0]
            if other.signature == best.signature or other.verdict.kind == best.verdict.kind == "wrong":
                best, waiting = other, _smaller(other.program)
        return best


def prepare(torchs: bool) -> None:
    """Have this process run programs for another one."""
    global HERE
    HERE = Runner(torchs)


def results_here(programs: list[Program]) -> list[Result]:
    return HERE.results(programs)


def _lost(failure: str, said: set[str], traces: str) -> Verdict:
    """The reason why a rank's process ended, while others may have raised something."""
    ended = set(re.findall(r"exit code (-?\d+)", failure))
    kind = "crash" if ended - {str(-signal.SIGALRM)} else "hang"
    return Verdict(kind, 0, f"exit codes {sorted(ended)} {sorted(said) or ''}", traces.strip() or failure)


def _smaller(program: Program) -> list[Program]:
    steps, setting = program.steps, program.setting
    candidates = []
    for size in sorted({len(steps) // 2, len(steps) // 4, 1} - {0}, reverse=True):
        for start in range(0, len(steps), size):
            rest = steps[:start] + steps[start + size :]
            candidates += [program._replace(steps=rest)] if rest else []
    candidates += [
        program._replace(setting=setting._replace(**{name: choices[0]}).valid())
        for name, choices in CHOICES.items()
        if getattr(setting, name) != choices[0]
    ]
    for name, choices in FEATURES.items():
        if getattr(setting.features, name) != choices[0]:
            features = setting.features._replace(**{name: choices[0]})
            candidates.append(program._replace(setting=setting._replace(features=features)))
    for index, one in enumerate(steps):
        for name, choices in KINDS[one.kind].choices.items():
            if one.arguments[name] != choices[0]:
                plainer = Step(one.kind, one.arguments | {name: choices[0]})
                candidates.append(program._replace(steps=steps[:index] + [plainer] + steps[index + 1 :]))
    return candidates


def check(program: Program) -> None:
    """Run one program, and print what becomes of it.

    Raises:
        AssertionError: It is not right, or a step was dropped.
    """
    runner = Runner()
    try:
        result = runner.results([program])[0]
    finally:
        runner.pool.close()
    verdict = result.verdict
    print(verdict.kind, *(f"refused: {kind}: {message}" for kind, message in result.refused), verdict.trace)
    assert verdict.kind == "right", f"step {verdict.at + 1}: {verdict.what}"
    assert not result.dropped, f"steps were dropped: {result.dropped}"
