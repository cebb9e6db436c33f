"""What a prediction assumes of a machine: its device, its links, and how many ranks share them."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """The data-parallel ranks.

    Attributes:
        inner: Ranks of the inner axis, over which the strategy shards.
        outer: Ranks of the outer axis (HSDP, hybrid FSDP); 1 if there is none.
        per_host: Ranks that share the cores of one host. Only a device with ``cores`` reads it. None: all ranks.
    """

    inner: int
    outer: int = 1
    per_host: int | None = None

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return self.inner * self.outer


@dataclass(frozen=True)
class Link:
    """How a rank is connected along one axis, in each direction.

    Attributes:
        name: For messages.
        bandwidth: Bytes per second of one rank, without the protocol's headers.
        latency: Seconds from the first byte sent to the first byte received.
    """

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """Speed and memory of what a rank computes on.

    Attributes:
        name: For messages.
        memory: Bytes; None if that does not matter.
        flops: Peak floating-point operations per second, by dtype ("float32", "bfloat16", "float8").
        bandwidth: Bytes per second of its memory.
        efficiency: Part of the peak that an operation reaches, by kind: "matmul", "attention", "memory".
        launch: Seconds that the smallest operation takes.
        runs_ahead: The host issues work that the device runs later, on streams, as with CUDA.
        cores: Cores of one host, which its ranks share; None for a GPU.
        send_seconds: Seconds of a core per byte that is sent or received. 0 for a GPU.
        message_seconds: Seconds of a core per message. 0 for a GPU.
    """

    name: str
    memory: int | None
    flops: dict[str, float]
    bandwidth: float
    efficiency: dict[str, float] = field(default_factory=dict)
    launch: float = 0.0
    runs_ahead: bool = True
    cores: float | None = None
    send_seconds: float = 0.0
    message_seconds: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` has measured.

    Attributes:
        device: Speed of the device.
        link: The network between the ranks that have measured; None for a single process.
    """

    device: Device
    link: Link | None = None

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what :meth:`save` has written."""
        found = json.loads(Path(path).read_text())
        return cls(Device(**found["device"]), None if found["link"] is None else Link(**found["link"]))


def calibrate(*, seconds: float = 20.0, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Calibration:
    """Measure operations, and links if ``torch.distributed`` is initialized, where this process runs.

    No model is run: matrices, copies and messages of several sizes are timed. With process groups, all ranks must call
    it. Each result is the median of several rounds.

    Args:
        seconds: Time to spend, about.
        dtypes: Names of the dtypes to measure.
    """
    raise NotImplementedError
