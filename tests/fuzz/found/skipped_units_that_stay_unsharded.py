"""Ranks run one block each without a backward. The weights of both stay unsharded on all ranks."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2", strategy=2),
    [step("apart", orders=((0,), (1,))), step("forward", order=(1, 1, 0)), step("backward"), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
