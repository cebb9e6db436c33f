"""A weight that is full on every rank took its new values from a sharded one on the rows of that one's shard only."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=0),
    [step("other_model"), step("resume", strategy=3, units="block", kind="full"), step("teach", how="lerp_")],
)

if __name__ == "__main__":
    check(PROGRAM)
