"""The description of a peer's training job, which rank processes receive as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.model import Shape

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Job:
    """The training job of one peer.

    Attributes:
        peer: A name in ``benchmarks.peers.PEERS``.
        ranks: Data-parallel ranks.
        dtype: "fp32", or "bf16" for computing in bf16 with main weights, reductions and optimizer in fp32.
        shape: Sizes of the model.
        fake: Whether one process represents all ranks, on torch's fake process group, which moves no data.
        device: "cpu" or "cuda".
        threads: CPU threads per rank.
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
        """Plain values for :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Job":
        """The inverse of :meth:`as_json`."""
        return Job(**{**values, "shape": Shape(**values["shape"])})
