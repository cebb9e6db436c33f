"""A write after a forward without a step."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=1),
    [
        step("forward", mode="no_grad"),
        step("write", how="foreach", what="head"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
