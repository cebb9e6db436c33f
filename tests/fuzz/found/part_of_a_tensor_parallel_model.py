"""A module outside of units that is called directly, with ZeRO-0 and tensor parallelism: torch's AttributeError.

Its weights are the main weights, with which F.linear returned a plain tensor; torch's parallel styles expect a DTensor.
"""

from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=4, mesh="tp", strategy=0, units="whole"),
    [
        step("part"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
