"""Sums of squares and full tensors of weights in a loss."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("regularized", kind="pow"),
        step("regularized", kind="full"),
        step("optimize"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
