"""What sharding a model will take: units, collectives and bytes per rank, from shapes alone. Allocates nothing."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.runtime.partition import UnitPart, partition
from megatron.fsdp.sharding.layout import parse_granularity, plan_layout
from megatron.fsdp.sharding.strategy import UNSHARDED

# Bytes of Adam's two moments per element, in fp32.
ADAM = 8


@dataclass(frozen=True)
class AxisSizes:
    """Ranks of the data-parallel axes of one kind of parameters.

    Attributes:
        inner: What parameters are sharded over.
        outer: What that is repeated over, or extended to; 1 if there is no such axis.
    """

    inner: int
    outer: int = 1


@dataclass
class Bytes:
    """Bytes on one rank; what one unit takes, or a whole model.

    Attributes:
        elements: Of all parameters.
        padding: Elements that belong to none.
        compute: Compute weights that stay.
        main: Main weights apart from those.
        optimizer: Adam's moments.
        gradients: Reduced gradients, until the optimizer's step.
        gathered: Compute weights while the unit is in use.
        reducing: Gradients on their way.
    """

    elements: int = 0
    padding: int = 0
    compute: int = 0
    main: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    reducing: int = 0

    def add(self, other: "Bytes") -> None:
        """Add up."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def resting(self) -> int:
        """Between steps."""
        return self.compute + self.main + self.optimizer


@dataclass(frozen=True)
class UnitEstimate:
    """One unit.

    Attributes:
        name: Of its module; empty for the root.
        kind: Class of its module.
        groups: Collectives for each gather or reduction.
        bytes: What it takes.
    """

    name: str
    kind: str
    groups: int
    bytes: Bytes


@dataclass(frozen=True)
class Estimate:
    """One model chunk.

    Attributes:
        units: The root first.
        dtypes: Compute, main and gradient dtypes that occur.
    """

    units: tuple[UnitEstimate, ...]
    dtypes: tuple[str, ...]

    @property
    def total(self) -> Bytes:
        """Of all units."""
        total = Bytes()
        for unit in self.units:
            total.add(unit.bytes)
        return total

    @property
    def kinds(self) -> dict[str, int]:
        """How many units there are of each class."""
        return dict(Counter(unit.kind for unit in self.units[1:]))

    def peak(self, config: FSDPConfig) -> int:
        """The most within a step, without activations: the formula of docs/memory.md."""
        root, others = self.units[0].bytes, [unit.bytes for unit in self.units[1:]]
        gathered = max((b.gathered for b in others), default=0) * config.max_unsharded_units
        reducing = max((b.reducing for b in others), default=0) * config.max_reducing_units
        total = self.total
        return total.resting + total.gradients + root.gathered + root.reducing + gathered + reducing


def estimate(
    module: nn.Module, classes: tuple[type[nn.Module], ...], config: FSDPConfig, dense: AxisSizes, experts: AxisSizes
) -> Estimate:
    """Plan a model's units and layouts as the engine does.

    Args:
        module: The model; its parameters may be on the meta device.
        classes: A module of one of these is a unit.
        config: Settings.
        dense: Axes of parameters that are no experts.
        experts: Axes of experts.
    """
    dtypes: dict[str, None] = {}
    units = []
    for part in _parts(partition(module, classes, config.enable_fine_grained_param_gather)):
        total = Bytes()
        for params in part.groups:
            found, text = _group(params, config, experts if params[0].key.expert else dense)
            total.add(found)
            dtypes[text] = None
        units.append(UnitEstimate(part.name, type(part.module).__name__, len(part.groups), total))
    return Estimate(tuple(units), tuple(dtypes))


def _parts(part: UnitPart) -> Iterator[UnitPart]:
    yield part
    for child in part.children:
        yield from _parts(child)


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
        gathered=whole if temporary else 0,
        reducing=layout.numel * dtypes.grad_comm.itemsize if key.requires_grad else 0,
    ), f"{_name(dtypes.compute)} compute, {_name(dtypes.main_params)} main weights, {_name(dtypes.grad_comm)} reduction"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
