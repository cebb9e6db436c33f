"""Ranks run other blocks with ZeRO-2 and a double buffer: weights that stay unsharded take nobody's buffer."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=3, strategy=2, units="fine", double_buffer=True, overlap=False),
    [
        step("both_models", detach=False, sync=True),
        step("optimize"),
        step("apart", orders=((0,), (1,))),
        step("backward", sync=False, retain=False),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
