"""Sharding strategies: one table from a strategy's name to where parameters, gradients and optimizer state live.

The four inner strategies are the stages of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", arXiv:1910.02054). No other file compares a strategy's name.
"""

from dataclasses import dataclass, replace
from enum import Enum

from megatron.fsdp.helpers.spelling import did_you_mean


class Distribution(Enum):
    """How one kind of tensor lies on the ranks of a data-parallel axis."""

    REPLICATE = "every rank holds the whole tensor, equal everywhere"
    PARTIAL = "every rank holds the whole tensor; the value is the sum over ranks"
    SHARD = "every rank holds its own part"


@dataclass(frozen=True)
class AxisStrategy:
    """Where parameters, gradients (between micro-batches) and optimizer state live on one data-parallel axis."""

    parameters: Distribution
    gradients: Distribution
    optimizer: Distribution

    @property
    def shards_parameters(self) -> bool:
        """True if compute weights exist whole only while a unit uses them."""
        return self.parameters is Distribution.SHARD

    @property
    def shards_gradients(self) -> bool:
        """True if gradients are reduced after every micro-batch, so that a rank keeps only its shard of them."""
        return self.gradients is Distribution.SHARD

    @property
    def shards_optimizer(self) -> bool:
        """True if a rank updates only its shard of the main weights."""
        return self.optimizer is Distribution.SHARD


_R, _P, _S = Distribution.REPLICATE, Distribution.PARTIAL, Distribution.SHARD

# Strategy of the inner axis (dp_shard). The position in the table is the stage of ZeRO.
INNER: dict[str, AxisStrategy] = {
    "no_shard": AxisStrategy(parameters=_R, gradients=_P, optimizer=_R),
    "optim": AxisStrategy(parameters=_R, gradients=_P, optimizer=_S),
    "optim_grads": AxisStrategy(parameters=_R, gradients=_S, optimizer=_S),
    "optim_grads_params": AxisStrategy(parameters=_S, gradients=_S, optimizer=_S),
}

# Strategy of the outer axis (dp_outer), where there is one: HSDP, and hybrid FSDP.
OUTER: dict[str, AxisStrategy] = {
    "no_shard": AxisStrategy(parameters=_R, gradients=_P, optimizer=_R),
    "optim": AxisStrategy(parameters=_R, gradients=_P, optimizer=_S),
}


@dataclass(frozen=True)
class Sharding:
    """Placements on both data-parallel axes.

    Attributes:
        inner: On the inner axis.
        outer: On the outer axis; those of ``no_shard`` if there is none.

    Raises:
        ValueError: The combination is not defined.
    """

    inner: AxisStrategy
    outer: AxisStrategy = OUTER["no_shard"]

    def __post_init__(self) -> None:
        if self.outer.shards_optimizer and not self.inner.shards_optimizer:
            raise ValueError(
                "Optimizer state that is sharded over the outer axis is a part of each inner rank's part; with the "
                "inner strategy 'no_shard' there is none. Use 'optim' or a later one as the inner strategy."
            )

    @property
    def axes(self) -> tuple[AxisStrategy, AxisStrategy]:
        """Placements on each axis, from the inner to the outer."""
        return self.inner, self.outer

    @property
    def with_whole_parameters(self) -> "Sharding":
        """The same, but that every rank keeps whole compute weights."""
        return Sharding(replace(self.inner, parameters=Distribution.REPLICATE), self.outer)

    @property
    def keeps_shard(self) -> bool:
        """True if a rank keeps a shard of compute weights, since its main weights are only a part of it."""
        return self.inner.shards_parameters and self.outer.shards_optimizer


UNSHARDED = Sharding(INNER["no_shard"])


def resolve_strategy(strategy: str | int, table: dict[str, AxisStrategy] | None = None) -> str:
    """The canonical name of ``strategy``, which is a name or a stage of ZeRO (its position in the table).

    Raises:
        ValueError: ``strategy`` is not in the table; the message names the choices and the nearest one.
    """
    table = INNER if table is None else table
    names = list(table)
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(names):
        return names[strategy]
    if isinstance(strategy, str) and strategy in table:
        return strategy
    hint = did_you_mean(strategy, names, cutoff=0.4)
    choices = ", ".join(f"{stage} or {name!r}" for stage, name in enumerate(names))
    raise ValueError(f"Unknown sharding strategy: expected {choices}; got {strategy!r}.{hint}")
