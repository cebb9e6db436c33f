"""Wrong: parameters got back their .data after an evaluation with an average, and had the average's values."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("average"),
        step("backward"),
        step("optimize"),
        step("average", use="data"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
