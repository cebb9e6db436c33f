"""Other micro-batches run between a forward, in which some ranks have run fewer blocks, and its backward."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [step("apart", orders=((0, 1), (0,))), step("accumulate"), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
