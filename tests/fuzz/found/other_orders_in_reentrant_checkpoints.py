"""A unit that a reentrant checkpoint hides was reduced before its backward, where ranks differ in their order."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2, features=Features(checkpoint="around", reentrant=True)),
    [step("apart", orders=((0, 1), (1, 0))), step("hooked", kind="output"), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
