"""A backward of a forward before the last, in which ranks have run blocks in orders of their own."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2, units="fine"),
    [
        step("apart", orders=((0, 1), (1, 0))),
        step("hooked", kind="forward"),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
