"""p.data = x with ZeRO-0."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=0),
    [
        step("write", how="data"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
