"""The plan unshards an embedding before the first block. A rank without the second block reads it afterwards."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(embedded=True)),
    [step("optimize"), step("forward"), step("backward"), step("apart", orders=((0,), (1,))), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
