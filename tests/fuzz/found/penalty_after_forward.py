"""A gradient penalty's backward after another forward."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("penalty", forward=True),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
