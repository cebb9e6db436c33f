"""Forces in the forward, of recomputed layers."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(units="fine", features=Features(checkpoint="inside", forces="graph")),
    [
        step("backward"),
        step("optimize"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
