"""A forward writes a weight of a unit that is not unsharded yet, and whose inner shard stays in memory."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=4, mesh="hsdp", outer=1, overlap=False),
    [
        step("accumulate", count=1),
        step("write_in_forward", how="in place"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
