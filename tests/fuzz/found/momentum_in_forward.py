"""The forward of the model writes weights of a block that runs later."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(forces="detached")),
    [
        step("write_in_forward", how="data ="),
        step("backward"),
        step("optimize"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
