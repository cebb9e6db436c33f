"""Answers whether a model fits into a device's memory and, if it does not, which changes would make it fit.

Layouts say what weights, gradients, the optimizer and buffers take. A predicted step says what the rest takes.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.estimate import AxisSizes, Memory, Outline, estimate_outline, usage

# What no tensor shows is assumed: the CUDA context with the kernels of libraries, NCCL's channels, and the fraction of
# memory that the allocator cannot use.
CONTEXT, NCCL, FRAGMENTATION = GIB * 3 // 4, GIB, 0.05
MOST_RANKS = 1 << 16


def with_overhead(tensors: int) -> int:
    """Bytes of a device that so many bytes of tensors take, with the assumed overhead."""
    return int(tensors * (1 + FRAGMENTATION)) + CONTEXT + NCCL


def comparison(total: int, capacity: int) -> str:
    """Whether so many bytes fit into a device, and how many are left or missing."""
    left = capacity - total
    if left < 0:
        return f"does not fit by {-left / GIB:.2f} GiB"
    return f"fits{', with less than 10 % left' if left < 0.1 * capacity else ''}: {left / GIB:.2f} GiB free"


@dataclass(frozen=True)
class Situation:
    """The properties that determine the memory of a pipeline stage.

    Attributes:
        outlines: Its model chunks.
        config: Settings of the engine.
        dense: Axes of dense parameters.
        experts: Axes of experts.
        muon: Whether the optimizer is Megatron's Muon.
        context: Context-parallel ranks, which the dense axes contain.
        micro_batches: Those of a step on all ranks; 0 if they are more with more ranks.
        rest: Bytes at the peak of a predicted step in addition to those of layouts: activations, logits and temporary
            tensors. None: no step was predicted.
    """

    outlines: Sequence[Outline]
    config: FSDPConfig
    dense: AxisSizes
    experts: AxisSizes
    muon: bool = False
    context: int = 1
    micro_batches: int = 0
    rest: int | None = None

    @property
    def of_layouts(self) -> Memory:
        """Bytes at the peak of a step by the layouts, without activations."""
        chunks = [estimate_outline(chunk, self.config, self.dense, self.experts, self.muon) for chunk in self.outlines]
        return usage(chunks, self.config)

    @property
    def total(self) -> int:
        """Bytes of the device at the peak of a step, with assumed overhead."""
        return with_overhead(self.of_layouts.total + (self.rest or 0))

    def on(self, factor: float) -> "Situation | None":
        """The same on ``factor`` times as many data-parallel ranks; None if they cannot be divided so."""
        sizes = [axes.inner * factor for axes in (self.dense, self.experts)]
        data = sizes[0] * self.dense.outer / self.context
        if any(size < 1 or size != int(size) for size in (*sizes, data)) or self.micro_batches % int(data):
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
        total: Its bytes at the peak of a step, with assumed overhead.
        capacity: Bytes of the device.
        suggestions: Changes after which it fits, if it does not.
        fewest_ranks: The smallest number of ranks on which it fits, out of powers of two times or parts of the
            present one; None if there is none.
        predicted: Whether activations count.
    """

    total: int
    capacity: int
    suggestions: tuple[Suggestion, ...]
    fewest_ranks: int | None
    predicted: bool

    @property
    def fits(self) -> bool:
        """Whether the bytes are at most the device's memory."""
        return self.total <= self.capacity

    @property
    def text(self) -> str:
        """One line."""
        label = "" if self.predicted else "without activations, "
        return f"{label}{comparison(self.total, self.capacity)}, {self.total / GIB:.2f} GiB at the peak"

    def as_dict(self) -> dict[str, Any]:
        """The verdict for programs."""
        return {"fits": self.fits, "missing": max(self.total - self.capacity, 0), **asdict(self)}


# Flags, and bytes as ``Situation.rest`` with them.
Predicted = Iterator[tuple[str, int]]


def verdict(
    situation: Situation, capacity: int, world_size: int, predicted: Callable[[], Predicted] | None = None
) -> Verdict:
    """Compare a stage with a device, and look for changes if it does not fit.

    Args:
        situation: The stage.
        capacity: Bytes of the device.
        world_size: Number of ranks.
        predicted: Predicts steps with changes that need fewer activations, the last one with all of them.
    """
    suggestions: tuple[Suggestion, ...] = ()
    if situation.total > capacity:
        fewer = [(flags, replace(situation, rest=rest)) for flags, rest in predicted()] if predicted else []
        suggestions = tuple(_suggestions(situation, fewer, capacity, world_size))
    fewest = _fewest_ranks(situation, capacity, world_size)
    return Verdict(situation.total, capacity, suggestions, fewest, situation.rest is not None)


def _fewest_ranks(situation: Situation, capacity: int, world_size: int) -> int | None:
    exponents = range(-world_size.bit_length(), MOST_RANKS.bit_length())
    for factor in (2.0**exponent for exponent in exponents):
        other = situation.on(factor)
        if other is not None and world_size * factor <= MOST_RANKS and other.total <= capacity:
            return int(world_size * factor)
    return None


def _suggestions(
    situation: Situation, fewer: list[tuple[str, Situation]], capacity: int, world_size: int
) -> Iterator[Suggestion]:
    """Single changes that suffice; if there is none, the first few changes that suffice together."""

    def fewer_activations(now: Situation) -> Changes:
        return ((flags, replace(now, rest=other.rest)) for flags, other in fewer)

    # In the order of what they cost.
    steps = (_stronger_strategies, _outer_strategy, fewer_activations, _offloading)
    single: list[tuple[str, Situation]] = [change for step in steps for change in step(situation)]
    single += itertools.islice((each for each in _more_ranks(situation, world_size) if each[1].total <= capacity), 1)
    enough = [Suggestion(text, other.total) for text, other in single if other.total <= capacity]
    if enough:
        yield from enough
        return
    applied: list[str] = []
    current = situation
    for step in steps:
        best = min(step(current), key=lambda change: change[1].total, default=None)
        if best is None or best[1].total >= current.total:
            continue
        applied.append(best[0])
        current = best[1]
        if current.total <= capacity:
            yield Suggestion(" ".join(applied), current.total)
            return
    for ranks, other in _more_ranks(current, world_size):
        if other.total <= capacity:
            yield Suggestion(" ".join([*applied, f"on {ranks}"]), other.total)
            return


Changes = Iterator[tuple[str, Situation]]


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


def _offloading(situation: Situation) -> Changes:
    if not situation.config.offload_optimizer and not situation.muon:
        flags = "--optimizer-cpu-offload --use-precision-aware-optimizer"
        yield flags, replace(situation, config=replace(situation.config, offload_optimizer=True))
