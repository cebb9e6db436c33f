"""Ranks run other blocks, behind an embedding that a plan gathers twice: a rank that skips a block gathers it once."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(features=Features(embedded=True)),
    [
        step("both_models", detach=False, sync=False),
        step("apart", orders=((0, 1), (1, 0))),
        step("backward", sync=False, retain=True),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
