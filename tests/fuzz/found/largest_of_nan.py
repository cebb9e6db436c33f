"""Wrong: gloo's maximum drops NaN, so that an infinity norm of NaN on one rank was a number."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(groups="part", features=Features(tied="blocks")),
    [
        step("scaled", overflow="all"),
        step("clip", kind="inf"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
