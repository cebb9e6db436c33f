"""Some ranks run fewer blocks, which reentrant checkpointing recomputes, in the first iteration."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(checkpoint="around", reentrant=True)),
    [step("apart", orders=((0, 1), (0,))), step("backward"), step("apart", orders=((0, 1), (0,))), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
