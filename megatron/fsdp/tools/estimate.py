"""Estimates units, collectives and bytes per rank of a sharded model from its shapes. Allocates no memory."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatron.fsdp.buffers.parameter import GroupKey, ShardedParameter
from megatron.fsdp.buffers.parameter_group import layout_of
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.quantized.storage import Direction, WeightStorage, storage_of
from megatron.fsdp.runtime.partition import UnitChoice, UnitPart, offloaded_units, parameters_of, partition
from megatron.fsdp.sharding.strategy import UNSHARDED, Sharding
from megatron.fsdp.tools.recipes import Recipe

# Bytes of fp32 moments per element: Adam has two, and Muon has one of each matrix.
ADAM, MUON = 8, 4


@dataclass(frozen=True)
class AxisSizes:
    """Sizes of the data-parallel axes of one kind of parameters.

    Attributes:
        inner: Ranks of the inner axis.
        outer: Ranks of the outer axis; 1 if there is none.
    """

    inner: int
    outer: int = 1


@dataclass
class Bytes:
    """Bytes of a unit or a model on one rank.

    Attributes:
        elements: Number of elements of all parameters.
        padding: Number of padding elements.
        compute: Compute weights that stay allocated, and scales of quantized ones that every rank holds.
        main: Main weights, if they are not the compute weights.
        optimizer: Moments of the optimizer.
        host: Main weights and moments in host memory, which the other numbers do not contain.
        gradients: Gradients that are kept until the optimizer's step: reduced ones, or full sums of micro-batches.
        unsharded: All compute weights while the unit is unsharded.
        forward: Those of them that forward reads. Quantized weights may have bytes that only one pass reads.
        backward: Those of them that backward reads.
        derived: Copies of quantized weights that Transformer Engine makes for backward, while the unit is in use.
        produced: Gradients of compute weights, until they are copied into the buffer that is reduced.
        reducing: Gradients while they are reduced.
        gathered: Compute weights that are all-gathered in a step with one micro-batch, at most.
    """

    elements: int = 0
    padding: int = 0
    compute: int = 0
    main: int = 0
    optimizer: int = 0
    host: int = 0
    gradients: int = 0
    unsharded: int = 0
    forward: int = 0
    backward: int = 0
    derived: int = 0
    produced: int = 0
    reducing: int = 0
    gathered: int = 0

    def add(self, other: "Bytes") -> None:
        """Add the bytes of another unit."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def resting(self) -> int:
        """Bytes between steps."""
        return self.compute + self.main + self.optimizer


@dataclass(frozen=True)
class UnitEstimate:
    """The estimate of one unit.

    Attributes:
        name: Name of its module; empty for the root.
        kind: Class of its module.
        groups: Number of parameter groups: one collective each per all-gather or reduction of the unit.
        bytes: Its bytes on one rank.
    """

    name: str
    kind: str
    groups: int
    bytes: Bytes


@dataclass(frozen=True)
class Estimate:
    """The estimate of one model chunk.

    Attributes:
        units: All units, root first.
        dtypes: Descriptions of the combinations of dtypes that occur.
    """

    units: tuple[UnitEstimate, ...]
    dtypes: tuple[str, ...]

    @property
    def total(self) -> Bytes:
        """The sum over all units."""
        total = Bytes()
        for unit in self.units:
            total.add(unit.bytes)
        return total

    @property
    def kinds(self) -> dict[str, int]:
        """Number of units of each class."""
        return dict(Counter(unit.kind for unit in self.units[1:]))

    def peak(self, config: FSDPConfig) -> int:
        """Peak bytes during a step on a GPU, without activations, by the formula of docs/memory.md.

        Without recomputation in backward, which may need the bytes of both passes.
        """
        root, others = self.units[0].bytes, [unit.bytes for unit in self.units[1:]]
        passes = 2 if config.interleaves_micro_batches else 1
        sizes, number = [max(b.forward, b.backward) for b in others], config.max_unsharded_units
        # Units run in the order of registration, and the next ones are unsharded meanwhile.
        unsharded = max((sum(sizes[i : i + number]) for i in range(len(sizes))), default=0) * passes
        unsharded += max((b.produced + b.derived for b in others), default=0)
        reducing = max((b.reducing for b in others), default=0) * config.max_reducing_units
        total = self.total
        return total.resting + total.gradients + root.unsharded + root.derived + root.reducing + unsharded + reducing


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank at the peak of a step, without activations.

    Attributes:
        weights: Compute and main weights.
        gradients: Gradients that are kept until the optimizer's step.
        optimizer: Moments of the optimizer.
        buffers: Unsharded units and gradients in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(asdict(self).values())


def usage(chunks: Sequence[Estimate], config: FSDPConfig) -> Memory:
    """The memory of a rank with some model chunks, of which only one is active at a time, without activations."""
    totals = [chunk.total for chunk in chunks]
    kept = (sum(t.compute + t.main for t in totals), sum(t.gradients for t in totals), sum(t.optimizer for t in totals))
    return Memory(*kept, max(c.peak(config) - c.total.resting - c.total.gradients for c in chunks))


class GroupShape(NamedTuple):
    """The properties that determine the bytes of a parameter group. Layers with equal groups are planned once.

    Attributes:
        key: What its parameters have in common.
        shapes: Shape of each parameter on this tensor-parallel rank.
        storage: How quantized parameters are stored; None for others.
        matrices: Elements that Muon updates.
        is_root: Whether it belongs to the root unit.
    """

    key: GroupKey
    shapes: tuple[tuple[int, ...], ...]
    storage: WeightStorage | None
    matrices: int
    is_root: bool


class Outline(NamedTuple):
    """A model chunk's units with the shapes of their groups.

    Attributes:
        root: The root unit.
        units: Name, class and groups of every unit, root first.
    """

    root: UnitPart
    units: tuple[tuple[str, str, tuple[GroupShape, ...]], ...]


def outline(
    module: nn.Module, classes: UnitChoice, config: FSDPConfig, times: Mapping[nn.Module, int] | None = None
) -> Outline:
    """Find the units of a model, which may be on the meta device. Some occur several ``times`` in a row."""
    root = partition(module, parameters_of(module, config), classes, config.enable_fine_grained_param_gather)
    for part in list(root.walk()):
        part.children = [child for child in part.children for _ in range((times or {}).get(child.module, 1))]
    units = tuple(
        (part.name, type(part.module).__name__, tuple(_shape(params, part is root) for params in part.groups))
        for part in root.walk()
    )
    return Outline(root, units)


def _shape(params: list[ShardedParameter], is_root: bool) -> GroupShape:
    shapes = tuple(tuple(param.local_shape) for param in params)
    matrices = sum(
        math.prod(shape)
        for param, shape in zip(params, shapes, strict=True)
        if len(shape) == 2 and not getattr(param.original, "is_embedding_or_output_parameter", False)
    )
    return GroupShape(params[0].key, shapes, storage_of(params[0].compute), matrices, is_root)


def estimate_outline(
    found: Outline, config: FSDPConfig, dense: AxisSizes, experts: AxisSizes, muon: bool = False
) -> Estimate:
    """Plan the layouts of a model as the engine does.

    Args:
        found: Its units.
        config: Settings of the engine.
        dense: Axes of dense parameters.
        experts: Axes of experts.
        muon: Whether the optimizer is Megatron's Muon and not Adam.
    """
    dtypes: dict[str, None] = {}
    units = []
    offloaded = offloaded_units(found.root, config.offload_fraction if config.offload_optimizer else 0.0)
    for place, (name, kind, groups) in enumerate(found.units):
        total = Bytes()
        for group in groups:
            of_group, text = _group(group, config, experts if group.key.expert else dense, place in offloaded, muon)
            total.add(of_group)
            dtypes[text] = None
        units.append(UnitEstimate(name, kind, len(groups), total))
    return Estimate(tuple(units), tuple(dtypes))


@functools.lru_cache(maxsize=1024)
def _group(group: GroupShape, config: FSDPConfig, axes: AxisSizes, on_host: bool, muon: bool) -> tuple[Bytes, str]:
    """The bytes of a group, which callers must not change, and a description of its dtypes."""
    key, storage = group.key, group.storage
    sharding = config.sharding_of(key.expert) if key.divisible else UNSHARDED
    shards = axes.inner if sharding.inner.shards_optimizer else 1
    shards *= axes.outer if sharding.outer.shards_optimizer else 1
    layout = layout_of(group.shapes, shards, config.granularity, storage)
    dtypes = config.mixed_precision_policy.resolve(key.dtype, "of the model", key.codes)
    elements = sum(slot.numel for slot in layout.slots)
    owned = layout.numel // shards
    apart = sharding.inner.shards_parameters or storage is not None or dtypes.main_params != dtypes.compute
    found = Bytes(
        elements=elements,
        padding=layout.numel - elements,
        main=owned * dtypes.main_params.itemsize if apart or on_host else 0,
    )
    if key.requires_grad:
        found.optimizer = owned * ADAM
        if muon:  # as if every rank had the same share of each matrix
            found.optimizer -= found.optimizer * group.matrices // elements * (ADAM - MUON) // ADAM
        between = layout.numel // (axes.inner if sharding.inner.shards_gradients else 1)
        found.gradients = max(owned * dtypes.main_params.itemsize, between * dtypes.main_grads.itemsize)
        found.produced = layout.numel * dtypes.compute.itemsize
        # A sum of full gradients is reduced where it is, unless that takes a different dtype.
        if sharding.inner.shards_gradients or dtypes.grad_comm != dtypes.main_grads:
            found.reducing = layout.numel * dtypes.grad_comm.itemsize
    if on_host:
        found.host, found.main, found.optimizer = found.main + found.optimizer, 0, 0
    _add_compute(found, layout.numel, dtypes.compute, storage, sharding, axes, group.is_root)
    if config.keep_fp8_transpose_cache:
        found.compute, found.derived = found.compute + found.derived, 0
    stored = _name(dtypes.compute) if storage is None else f"{_format(storage)} (as {_name(dtypes.compute)})"
    return found, f"{stored} compute, {_name(dtypes.main_params)} main weights, {_name(dtypes.grad_comm)} reduction"


def _add_compute(
    found: Bytes,
    numel: int,
    dtype: torch.dtype,
    storage: WeightStorage | None,
    sharding: Sharding,
    axes: AxisSizes,
    is_root: bool,
) -> None:
    """Add the bytes of the compute weights of a group."""
    if storage is None:
        whole = forward = backward = numel * dtype.itemsize
    else:
        sizes = [(plane.directions, numel // plane.values_per_byte) for plane in storage.planes]
        whole = sum(size for _, size in sizes)
        forward = sum(size for directions, size in sizes if Direction.FORWARD in directions)
        backward = sum(size for directions, size in sizes if Direction.BACKWARD in directions)
    found.compute = whole
    if sharding.inner.shards_parameters:
        # Quantized weights keep the inner rank's shard of every plane.
        found.compute = whole // axes.inner if sharding.keeps_shard or storage is not None else 0
        found.unsharded, found.forward, found.backward = whole, forward, backward
        found.gathered = whole if is_root else forward + backward
    elif sharding.inner.shards_optimizer:
        found.gathered = whole
    if sharding.outer.shards_optimizer:
        found.gathered += whole // axes.inner  # over the outer axis, once per step
    if isinstance(storage, Recipe):
        found.compute += storage.scale_bytes(numel)
        found.derived = storage.transposed_bytes(numel)


def _format(storage: WeightStorage) -> str:
    return storage.key if isinstance(storage, Recipe) else "quantized"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
