"""A mean teacher that was sharded while other weights were frozen: operands "are sharded differently"."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=3, interface="fsdp2", strategy=2),
    [
        step("freeze", what="up", frozen=True),
        step("teach", how="lerp_"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
