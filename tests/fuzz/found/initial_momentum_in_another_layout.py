"""A load dropped state from before the first step on ranks that held elements of it, and gathered it on the others."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(strategy=2, granularity="tensor", optimizer="momentum"),
    [step("resume", strategy=0, units="none", kind="shards"), step("forward"), step("backward"), step("optimize")],
)

if __name__ == "__main__":
    check(PROGRAM)
