"""Weights were gathered for the first backward, after an evaluation. Later, some ranks run fewer blocks."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [step("forward"), step("forward", mode="no_grad"), step("backward"), step("apart"), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
