"""Open: a backward of a loss from before the optimizer's step raises in plain torch, and is silently wrong here."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2),
    [
        step("forward", batch=1),
        step("closure"),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
