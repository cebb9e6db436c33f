"""zero_grad(set_to_none=False), and a step with weight decay."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(optimizer="momentum"),
    [
        step("backward"),
        step("zero_grad", to_none=False),
        step("optimize"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
