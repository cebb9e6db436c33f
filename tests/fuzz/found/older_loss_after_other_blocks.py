"""A retained loss runs backward again, after ranks have run one block each. The last unit is kept on one rank only."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("forward"),
        step("backward", retain=True),
        step("apart", orders=((0,), (1,))),
        step("backward", retain=True),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
