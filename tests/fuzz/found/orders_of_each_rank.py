"""Ranks that run blocks in orders of their own, after an iteration in which all ran them in one."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2),
    [
        step("forward", order=(1, 1, 0)),
        step("backward"),
        step("apart", orders=((0, 1), (1, 0))),
        step("backward"),
        step("optimize"),
        step("apart", orders=((0, 1), (0,))),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
