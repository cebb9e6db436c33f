"""Ranks with elements dropped loaded state from before the first step, which a frozen weight does not get again."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=3, units="whole", optimizer="momentum", features=Features(tied="root")),
    [
        step("resume", strategy=2, units="whole", kind="shards"),
        step("freeze", what="head", frozen=True),
        step("resume", strategy=0, units="block", kind="full"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
