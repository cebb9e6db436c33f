"""After a backward, a unit whose inputs need no gradients was no longer known to be in the graph of a second one."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(embedded=True)),
    [step("closure"), step("apart"), step("backward", retain=True), step("backward")],
)

if __name__ == "__main__":
    check(PROGRAM)
