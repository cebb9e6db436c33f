"""A backward inside a forward that follows a write: all units are reset when the forward begins."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(forces="graph")),
    [
        step("accumulate", count=2),
        step("freeze", what="all", frozen=True),
        step("write", how="copy_", what="all"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
