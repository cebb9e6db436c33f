"""The first backward is one of a captured loss, which has an order of its own; then ranks run other blocks."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2"),
    [
        step("captured", index=0, after="nothing"),
        step("apart", orders=((0,), (1,))),
        step("backward"),
        step("optimize"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
