"""A frozen model of one unit recomputes blocks for a loss that one of them keeps."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(units="none", features=Features(checkpoint="around")),
    [step("freeze", what="all", frozen=True), step("auxiliary", index=0, together=False)],
)

if __name__ == "__main__":
    check(PROGRAM)
