"""The first forward of the FSDP2 interface runs in inference mode."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2"),
    [
        step("forward", mode="inference"),
        step("backward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
