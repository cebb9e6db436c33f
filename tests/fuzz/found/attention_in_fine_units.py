"""Attention reads the weights of its output layer, which was a unit: a gather that other ranks did not do."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=0, units="fine", features=Features(extra="attention")),
    [step("apart", orders=((0, 1), ())), step("backward", sync=True)],
)

if __name__ == "__main__":
    check(PROGRAM)
