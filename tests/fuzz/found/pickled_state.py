"""A pickled state dict is loaded."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("save", kind="pickle", optimizer=True),
        step("optimize"),
        step("load"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
