"""A backward of what a hook has captured in a unit."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("captured", index=0, after="nothing"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
