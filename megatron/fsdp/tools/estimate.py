"""Estimates units, collectives and bytes per rank of a sharded model from its shapes. Allocates no memory."""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.runtime.partition import partition
from megatron.fsdp.sharding.layout import parse_granularity, plan_layout
from megatron.fsdp.sharding.strategy import UNSHARDED

# Bytes of Adam's two fp32 moments per element.
ADAM = 8


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
        compute: Compute weights that stay allocated.
        main: Main weights, if they are not the compute weights.
        optimizer: Adam's moments.
        gradients: Reduced gradients, until the optimizer's step.
        unsharded: Compute weights while the unit is unsharded.
        reducing: Gradients while they are reduced.
    """

    elements: int = 0
    padding: int = 0
    compute: int = 0
    main: int = 0
    optimizer: int = 0
    gradients: int = 0
    unsharded: int = 0
    reducing: int = 0

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
        """Peak bytes during a step on a GPU, without activations, by the formula of docs/memory.md."""
        root, others = self.units[0].bytes, [unit.bytes for unit in self.units[1:]]
        # One more for the gradients of the unit that computes, which are as large as its weights.
        unsharded = max((b.unsharded for b in others), default=0) * (config.max_unsharded_units + 1)
        reducing = max((b.reducing for b in others), default=0) * config.max_reducing_units
        total = self.total
        return total.resting + total.gradients + root.unsharded + root.reducing + unsharded + reducing


def estimate(
    module: nn.Module, classes: tuple[type[nn.Module], ...], config: FSDPConfig, dense: AxisSizes, experts: AxisSizes
) -> Estimate:
    """Plan a model's units and layouts as the engine does.

    Args:
        module: The model, which may be on the meta device.
        classes: Classes whose modules become units.
        config: Settings of the engine.
        dense: Axes of dense parameters.
        experts: Axes of experts.
    """
    dtypes: dict[str, None] = {}
    units = []
    for part in partition(module, classes, config.enable_fine_grained_param_gather).walk():
        total = Bytes()
        for params in part.groups:
            found, text = _group(params, config, experts if params[0].key.expert else dense)
            total.add(found)
            dtypes[text] = None
        units.append(UnitEstimate(part.name, type(part.module).__name__, len(part.groups), total))
    return Estimate(tuple(units), tuple(dtypes))


def _group(params: list[ShardedParameter], config: FSDPConfig, axes: AxisSizes) -> tuple[Bytes, str]:
    key = params[0].key
    sharding = config.sharding if key.divisible else UNSHARDED
    inner = axes.inner if sharding.inner.shards_optimizer else 1
    shards = inner * (axes.outer if sharding.outer.shards_optimizer else 1)
    layout = plan_layout([param.local_shape for param in params], shards, parse_granularity(config.shard_granularity))
    dtypes = config.mixed_precision_policy.resolve(key.dtype, params[0].name)
    elements = sum(slot.numel for slot in layout.slots)
    owned = layout.numel // shards
    temporary = sharding.inner.shards_parameters
    whole = layout.numel * dtypes.compute.itemsize
    apart = temporary or dtypes.main_params != dtypes.compute
    return Bytes(
        elements=elements,
        padding=layout.numel - elements,
        compute=(whole // inner if sharding.keeps_shard else 0) if temporary else whole,
        main=owned * dtypes.main_params.itemsize if apart else 0,
        optimizer=owned * ADAM if key.requires_grad else 0,
        gradients=owned * dtypes.main_params.itemsize if key.requires_grad else 0,
        unsharded=whole if temporary else 0,
        reducing=layout.numel * dtypes.grad_comm.itemsize if key.requires_grad else 0,
    ), f"{_name(dtypes.compute)} compute, {_name(dtypes.main_params)} main weights, {_name(dtypes.grad_comm)} reduction"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
