"""A weight that is written after its use in a forward, whose gradients inside need it as it was."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2", strategy=2, units="fine", watch=True, features=Features(forces="graph")),
    [
        step("optimize"),
        step("write_inside", when="after"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
