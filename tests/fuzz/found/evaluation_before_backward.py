"""The model is evaluated between a forward and its backward, and some ranks have run fewer blocks."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2", strategy=2),
    [step("apart", orders=((0, 1), ())), step("forward", mode="no_grad"), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
