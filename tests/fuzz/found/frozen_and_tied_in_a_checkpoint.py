"""Recomputed values of a frozen model with tied blocks are said to have different metadata."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(replicated=True, features=Features(tied="blocks", checkpoint="around", forces="graph")),
    [step("freeze", what="all", frozen=True), step("auxiliary", index=0, together=False)],
)

if __name__ == "__main__":
    check(PROGRAM)
