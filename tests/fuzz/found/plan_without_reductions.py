"""The first backward requests no reduction of a block; then only one rank runs it."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("captured", index=1, after="nothing"),
        step("apart", orders=((0,), (1,))),
        step("backward"),
        step("optimize"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
