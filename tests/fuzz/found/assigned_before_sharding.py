"""torch loses an assignment to .data of its own DTensors, also of those that are not sharded yet."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=4, mesh="tp", interface="fsdp2", strategy=2, units="whole", replicated=True),
    [step("write", how="data", what="block"), step("kept_weight")],
)

if __name__ == "__main__":
    check(PROGRAM)
