"""Answers whether a model fits into a device's memory and, if it does not, which changes would make it fit."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools.activations import Workload, activation_bytes
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.estimate import AxisSizes, Memory, Outline, estimate_outline, usage

# What the estimate cannot see is assumed: the CUDA context with the kernels of libraries, NCCL's channels, and the
# fraction of buffers and activations that the allocator cannot use.
CONTEXT, NCCL, FRAGMENTATION = GIB * 3 // 4, GIB, 0.05
MOST_RANKS = 1 << 16


def with_overhead(tensors: int) -> int:
    """Bytes of a device that so many bytes of tensors take, with the assumed overhead."""
    return int(tensors * (1 + FRAGMENTATION)) + CONTEXT + NCCL


@dataclass(frozen=True)
class Situation:
    """The properties that determine the memory of a pipeline stage.

    Attributes:
        outlines: Its model chunks.
        config: Settings of the engine.
        dense: Axes of dense parameters.
        experts: Axes of experts.
        muon: Whether the optimizer is Megatron's Muon.
        workload: What activations depend on; None if they cannot be estimated.
    """

    outlines: Sequence[Outline]
    config: FSDPConfig
    dense: AxisSizes
    experts: AxisSizes
    muon: bool = False
    workload: Workload | None = None

    def memory(self) -> Memory:
        """Bytes at the peak of a step, with activations and assumed overhead."""
        chunks = [estimate_outline(chunk, self.config, self.dense, self.experts, self.muon) for chunk in self.outlines]
        found, activations = usage(chunks, self.config), activation_bytes(self.workload) if self.workload else 0
        overhead = CONTEXT + NCCL + int(FRAGMENTATION * (found.buffers + activations))
        return replace(found, activations=activations, overhead=overhead)

    def on(self, factor: float) -> "Situation | None":
        """The same on ``factor`` times as many data-parallel ranks; None if they cannot be divided so."""
        sizes = [axes.inner * factor for axes in (self.dense, self.experts)]
        if any(size < 1 or size != int(size) for size in sizes):
            return None
        dense, experts = (
            replace(axes, inner=int(size)) for axes, size in zip((self.dense, self.experts), sizes, strict=True)
        )
        return replace(self, dense=dense, experts=experts)


@dataclass(frozen=True)
class Suggestion:
    """A change after which the model fits.

    Attributes:
        change: Flags to add or to replace.
        total: Bytes at the peak of a step with it.
    """

    change: str
    total: int


@dataclass(frozen=True)
class Verdict:
    """Whether a stage fits.

    Attributes:
        memory: Its memory.
        capacity: Bytes of the device.
        suggestions: Changes after which it fits, if it does not.
        fewest_ranks: The smallest number of ranks on which it fits, out of powers of two times or parts of the
            present one; None if there is none.
    """

    memory: Memory
    capacity: int
    suggestions: tuple[Suggestion, ...]
    fewest_ranks: int | None

    @property
    def fits(self) -> bool:
        """Whether the estimate is at most the device's memory."""
        return self.memory.total <= self.capacity

    @property
    def text(self) -> str:
        """One line."""
        total, capacity = self.memory.total / GIB, self.capacity / GIB
        if self.fits:
            return f"fits: {total:.1f} of {capacity:.1f} GiB at the peak ({capacity - total:.1f} GiB free)"
        return f"does not fit by {total - capacity:.1f} GiB: {total:.1f} of {capacity:.1f} GiB at the peak"

    def as_dict(self) -> dict[str, Any]:
        """The verdict for programs."""
        found = dataclasses.asdict(self)
        found["memory"]["total"] = self.memory.total
        return {"fits": self.fits, "missing": max(self.memory.total - self.capacity, 0), **found}


def verdict(situation: Situation, capacity: int, world_size: int) -> Verdict:
    """Compare a stage with a device, and look for changes if it does not fit."""
    found = situation.memory()
    suggestions = () if found.total <= capacity else tuple(_suggestions(situation, capacity, world_size))
    return Verdict(found, capacity, suggestions, _fewest_ranks(situation, capacity, world_size))


def _fewest_ranks(situation: Situation, capacity: int, world_size: int) -> int | None:
    exponents = range(-world_size.bit_length(), MOST_RANKS.bit_length())
    for factor in (2.0**exponent for exponent in exponents):
        other = situation.on(factor)
        if other is not None and world_size * factor <= MOST_RANKS and other.memory().total <= capacity:
            return int(world_size * factor)
    return None


def _suggestions(situation: Situation, capacity: int, world_size: int) -> Iterator[Suggestion]:
    """Single changes that suffice; if there is none, the first few changes that suffice together."""
    single = list(_changes(situation, world_size))
    enough = [Suggestion(text, total) for text, other in single if (total := other.memory().total) <= capacity]
    if enough:
        yield from enough
        return
    applied: list[str] = []
    current = situation
    for step in _STEPS:
        best = min(step(current), key=lambda change: change[1].memory().total, default=None)
        if best is None or best[1].memory().total >= current.memory().total:
            continue
        applied.append(best[0])
        current = best[1]
        if (total := current.memory().total) <= capacity:
            yield Suggestion(" ".join(applied), total)
            return
    for ranks, other in _more_ranks(current, world_size):
        if (total := other.memory().total) <= capacity:
            yield Suggestion(" ".join([*applied, f"on {ranks}"]), total)
            return


Changes = Iterator[tuple[str, Situation]]


def _changes(situation: Situation, world_size: int) -> Changes:
    for step in _STEPS:
        yield from step(situation)
    yield from _more_ranks(situation, world_size)


def _more_ranks(situation: Situation, world_size: int) -> Changes:
    for doublings in itertools.count(1):
        ranks = world_size << doublings
        other = situation.on(2.0**doublings)
        if other is None or ranks > MOST_RANKS:
            return
        yield f"{ranks} ranks", other


def _stronger_strategies(situation: Situation) -> Changes:
    names = list(INNER)
    for name in names[names.index(str(situation.config.zero_dp_strategy)) + 1 :]:
        yield (
            f"--data-parallel-sharding-strategy {name}",
            replace(situation, config=replace(situation.config, zero_dp_strategy=name)),
        )


def _outer_strategy(situation: Situation) -> Changes:
    config, sharding = situation.config, situation.config.sharding
    if situation.dense.outer > 1 and sharding.inner.shards_optimizer and not sharding.outer.shards_optimizer:
        yield (
            "--outer-dp-sharding-strategy optim",
            replace(situation, config=replace(config, outer_dp_sharding_strategy="optim")),
        )


def _smaller_micro_batches(situation: Situation) -> Changes:
    w = situation.workload
    size = w.micro_batch if w else 1
    while w is not None and size > 1:
        size //= 2
        more = w.micro_batches * w.micro_batch // size
        yield (
            f"--micro-batch-size {size}",
            replace(situation, workload=replace(w, micro_batch=size, micro_batches=more)),
        )


def _sequence_parallel(situation: Situation) -> Changes:
    w = situation.workload
    if w is not None and w.config.tensor_model_parallel_size > 1 and not w.sequence_parallel:
        yield "--sequence-parallel", replace(situation, workload=replace(w, sequence_parallel=True))


def _recomputation(situation: Situation) -> Changes:
    w = situation.workload
    if w is None or w.recompute == "full":
        return
    if w.scores and "core_attn" not in (w.modules if w.recompute else ()):
        selective = replace(w, recompute="selective", modules=w.modules | {"core_attn"})
        yield "--recompute-granularity selective --recompute-modules core_attn", replace(situation, workload=selective)
    yield (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        replace(situation, workload=replace(w, recompute="full")),
    )


def _offloading(situation: Situation) -> Changes:
    if not situation.config.offload_optimizer and not situation.muon:
        flags = "--optimizer-cpu-offload --use-precision-aware-optimizer"
        yield flags, replace(situation, config=replace(situation.config, offload_optimizer=True))


# In the order of what they cost.
_STEPS: tuple[Callable[[Situation], Changes], ...] = (
    _stronger_strategies,
    _outer_strategy,
    _sequence_parallel,
    _smaller_micro_batches,
    _recomputation,
    _offloading,
)
