"""A step with a closure, while no backward synchronizes gradients."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(sync_each=False),
    [
        step("closure"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
