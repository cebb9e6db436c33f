"""The first backward is that of one block; then each rank runs another one."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("part", index=0),
        step("backward"),
        step("apart", orders=((0,), (1,))),
        step("backward"),
        step("optimize"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
