"""After Ctrl-C in a forward, model.zero_grad() kept the gradients of the main weights."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(interface="fsdp2"),
    [
        step("backward", sync=True, retain=False),
        step("fail", where="forward", interrupt=True, direct=False),
        step("zero_grad", who="model", to_none=True),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
