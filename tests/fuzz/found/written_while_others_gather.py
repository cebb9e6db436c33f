"""A rank that runs no block writes its weights while the others gather them."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(slow="all"),
    [
        step("backward"),
        step("apart", orders=((0, 1), ())),
        step("write_gradients"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
