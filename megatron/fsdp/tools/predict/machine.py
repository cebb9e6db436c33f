"""The machine that a prediction assumes: its device, its links, and how many ranks share them."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fsdp.tools.devices import gpu_memory
from megatron.fsdp.tools.predict.ghosts import Cost
from megatron.fsdp.tools.predict.record import Message


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
        ranks_per_hop: Neighbouring ranks of the axis between which the latency does not count, as in one host.
        all_to_all: The bandwidth if every rank sends to every other; None if that is the same.
    """

    name: str
    bandwidth: float
    latency: float
    ranks_per_hop: int = 1
    all_to_all: float | None = None


@dataclass(frozen=True)
class Device:
    """Speed and memory of what a rank computes on.

    Attributes:
        name: For messages.
        memory: Bytes; None if that does not matter.
        flops: Peak floating-point operations per second, by dtype ("float32", "bfloat16", "float8").
        bandwidth: Bytes per second of its memory.
        efficiency: Part of the peak that an operation reaches, by kind: "matmul", "attention", "memory"; or by kind
            and dtype, as in "matmul float8".
        launch: Seconds that the smallest operation takes; on a CPU, what the framework adds to each operation.
        runs_ahead: The host issues work that the device runs later, on streams, as with CUDA.
        cores: Cores of one host, which its ranks share; None for a GPU.
        send_seconds: Seconds of a core per byte that is sent or received. 0 for a GPU.
        message_seconds: Seconds of a core per message. 0 for a GPU.
        measured: Seconds of operators, measured, by "name dtype": pairs of work and seconds, sorted. Work is
            floating-point operations of matmuls and attention, and bytes of others.
        slowdown: Factor of these within a step.
        offload: Peak bytes per second of a GPU's way to the host ("PCIe"), and of its part of the host's memory
            ("host").
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
    measured: dict[str, list[list[float]]] = field(default_factory=dict)
    slowdown: float = 1.0
    offload: dict[str, float] = field(default_factory=dict)

    def seconds(self, cost: Cost) -> float:
        """Time of an operator that nothing else slows down."""
        if cost.kind in ("PCIe", "host"):
            if not self.offload:
                raise NotImplementedError(f"{self.name}: offload_optimizer is not predicted, as its host is not known.")
            return self.launch + cost.bytes / (self.offload[cost.kind] * self.efficiency.get(cost.kind, 1.0))
        work = float(cost.bytes if cost.kind == "memory" else cost.flops)
        table = self.measured.get(f"{cost.name} {cost.dtype}") or self.measured.get(f"{cost.kind} {cost.dtype}")
        if table:
            alone = _interpolated(table, work) * self.slowdown
            return alone + (0.0 if self.runs_ahead else self.launch * cost.tensors)
        moved = cost.bytes / (self.bandwidth * self.efficiency.get("memory", 1.0))
        if cost.kind == "memory":
            return self.launch + moved
        peak = self.flops.get(cost.dtype) or max(self.flops.values())
        part = self.efficiency.get(f"{cost.kind} {cost.dtype}", self.efficiency.get(cost.kind, 1.0))
        return self.launch + max(cost.flops / (peak * part), moved)


def _interpolated(table: list[list[float]], work: float) -> float:
    """Seconds between the measured ones, and in proportion to the work beyond the largest."""
    last_work, last = table[-1]
    if work >= last_work:
        return last * work / last_work
    before, earlier = 0.0, table[0][1]
    for upper, seconds in table:
        if work <= upper:
            return earlier + (seconds - earlier) * (work - before) / max(upper - before, 1.0)
        before, earlier = upper, seconds
    return last


@dataclass(frozen=True)
class Calibration:
    """Results of :func:`calibrate`.

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


@dataclass(frozen=True)
class Cluster:
    """GPUs and how they are connected.

    Attributes:
        device: The GPU.
        per_host: GPUs that NVLink connects.
        inside: Bytes per second of a GPU over NVLink, in each direction.
        between: Bytes per second of a GPU's own network card, in each direction.
        site: GPUs of one data center; None if there is only one.
        line: Bytes per second from a data center to the next, which all its GPUs share, and seconds of latency.
    """

    device: Device
    per_host: int
    inside: float
    between: float
    site: int | None = None
    line: tuple[float, float] = (math.inf, 0.0)

    def link_of(self, message: Message) -> Link:
        """The link of one message."""
        return self.link(message.ranks, message.step)

    def link(self, ranks: int, step: int = 1) -> Link:
        """The link of ``ranks`` ranks at a distance of ``step``, with ``step`` such groups side by side."""
        if step * (ranks - 1) < self.per_host:
            return Link("NVLink", self.inside, 2e-6)
        # The ranks in one host receive different parts, each through its own card, and pass them on.
        near = max(self.per_host // step, 1)
        # An all-to-all has nothing to pass on: all that leaves the host goes through the rank's own card.
        own = (ranks - 1) / max((ranks - near) / self.between, (near - 1) / self.inside)
        network = Link("network", min(self.inside, self.between * near), 5e-6, near, own)
        if self.site is None or step * (ranks - 1) < self.site:
            return network
        # One hop of a ring in each data center leaves it, over a line that the groups side by side share.
        share, latency = self.line[0] / step, network.latency
        latency += self.line[1] * (ranks * step / self.site - 1) / (ranks / near - 1)
        here = max(self.site // step, 1)
        own = min(own, share * (ranks - 1) / (max(ranks - here, 1) * here))
        return Link("line between data centers", min(network.bandwidth, share), latency, near, own)


# Dense peaks of bf16 and fp32 (as TF32) per second, bytes per second of memory, NVLink and network card in one
# direction, GPUs per NVLink domain, and bytes per second to the host (PCIe; NVLink-C2C) and of a GPU's part of the
# host's memory, from data sheets.
SPEEDS = {
    "a100-40": (312e12, 156e12, 1.555e12, 300e9, 25e9, 8, 32e9, 51e9),
    "a100-80": (312e12, 156e12, 2.039e12, 300e9, 25e9, 8, 32e9, 51e9),
    "h100": (989e12, 494e12, 3.35e12, 450e9, 50e9, 8, 64e9, 77e9),
    "h200": (989e12, 494e12, 4.8e12, 450e9, 50e9, 8, 64e9, 77e9),
    "b200": (2250e12, 1125e12, 8e12, 900e9, 50e9, 8, 64e9, 90e9),
    "gb200": (2500e12, 1250e12, 8e12, 900e9, 50e9, 72, 450e9, 256e9),
}
FORMATS = ("float8", 2, (8, 9)), ("float4", 4, (10, 0))
# Parts of the peaks that the best matmuls reach in 16 and in fewer bits, by major compute capability, as measured by
# github.com/stas00/ml-engineering (compute/accelerator); and what those of a step reach of that, as on one H200.
BEST_MATMULS, IN_STEPS = {8: (0.869, 0.0), 9: (0.803, 0.734), 10: (0.776, 0.763)}, 0.87
# Parts that other kernels reach: assumptions. docs/guide/doctor.md has what one GPU measured.
EFFICIENCY = {"attention": 0.5, "memory": 0.8, "PCIe": 0.8, "host": 0.6}


def cluster_of(name: str) -> Cluster:
    """The GPU with a name, in hosts as they are sold.

    Raises:
        ValueError: It is unknown, or its speed is. The message lists the known ones.
    """
    memory = gpu_memory(name)
    key = memory.gpu
    if key not in SPEEDS:
        raise ValueError(f"expected one of {', '.join(SPEEDS)}, whose speeds are known; got {name!r}.")
    half, single, bandwidth, inside, between, per_host, *offload = SPEEDS[key]
    flops = {"bfloat16": half, "float16": half, "float32": single}
    # With half the bits, tensor cores are twice as fast, from the compute capability on that has the format.
    flops |= {name: half * times for name, times, least in FORMATS if memory.capability >= least}
    half_best, fewer_best = BEST_MATMULS[memory.capability[0]]
    efficiency = {**EFFICIENCY, "matmul": IN_STEPS * half_best}
    efficiency |= {f"matmul {name}": IN_STEPS * fewer_best for name, _, _ in FORMATS}
    to_host = dict(zip(("PCIe", "host"), offload, strict=True))
    return Cluster(Device(key, memory, flops, bandwidth, efficiency, 4e-6, offload=to_host), per_host, inside, between)
