"""Units inside others, with a double buffer: the next unit takes the outer one's buffer only once that has ended."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=3, units="fine", double_buffer=True),
    [
        step("apart", orders=((0, 1), (0,))),
        step("backward", sync=False, retain=False),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
