"""An optimizer's zero_grad, when a frozen parameter that it does not have has a gradient."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(groups="part"),
    [
        step("backward"),
        step("freeze", what="head"),
        step("zero_grad"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
