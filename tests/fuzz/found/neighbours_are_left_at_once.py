"""set_reshard_after_forward took away the group of neighbours from tasks of a failed backward that still used it."""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=4, interface="fsdp2", within=True),
    [
        step("fail", where="backward", direct=True),
        step("method", name="reduce"),
        step("fail", where="forward", interrupt=True, direct=True),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
