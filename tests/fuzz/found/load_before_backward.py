"""A backward of a loss from before load_state_dict, which has to raise."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2),
    [
        step("forward"),
        step("load"),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
