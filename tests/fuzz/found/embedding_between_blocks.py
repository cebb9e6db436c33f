"""A unit whose inputs need no gradients is used again before a later block, and shares its buffer."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(double_buffer=True, features=Features(embedded=True)),
    [
        *(one for _ in range(2) for one in (step("forward"), step("backward"), step("optimize"), step("zero_grad"))),
        step("forward", order=(1, 0)),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
