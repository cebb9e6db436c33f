"""As part_of_a_tensor_parallel_model.py, without a graph: torch refuses tensors of several meshes."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.runner import check
from tests.fuzz.settings import Setting

PROGRAM = Program(
    Setting(ranks=4, mesh="tp", strategy=0, units="whole", features=Features(checkpoint="inside", reentrant=True)),
    [
        step("part"),
    ],
)

if __name__ == "__main__":
    check(PROGRAM)
