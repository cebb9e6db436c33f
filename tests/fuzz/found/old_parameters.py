"""Parameters listed before sharding are clipped, read and written."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(),
    [
        step("backward"),
        step("clip", kind="old"),
        step("read", kind="old"),
        step("write", how="old"),
        step("forward"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
