"""A gradient penalty of a model whose parameters are all frozen."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("freeze", what="all", frozen=True),
        step("penalty"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
