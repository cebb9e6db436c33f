"""What a rank process is asked to build: plain values that travel as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.model import Shape

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Job:
    """One peer's part of a benchmark.

    Attributes:
        peer: A name in ``benchmarks.peers.PEERS``.
        ranks: Data-parallel ranks.
        dtype: "fp32", or "bf16": compute in bf16, with main weights, reductions and optimizer in fp32.
        shape: The model.
        fake: Whether one process stands for all ranks, on the process group that moves no data.
        device: "cpu" or "cuda".
        threads: Threads that a rank computes with.
    """

    peer: str
    ranks: int
    dtype: str = "fp32"
    shape: Shape = field(default_factory=Shape)
    fake: bool = False
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise ValueError(f"dtype: expected fp32 or bf16; got {self.dtype!r}")

    @property
    def low_precision(self) -> bool:
        """Whether the model computes in bf16."""
        return self.dtype == "bf16"

    def as_json(self) -> dict[str, Any]:
        """Values that :meth:`from_json` takes."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Job":
        """Rebuild what :meth:`as_json` gave."""
        return Job(**{**values, "shape": Shape(**values["shape"])})
