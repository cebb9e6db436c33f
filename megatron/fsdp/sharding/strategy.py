"""Sharding strategies: a table of names and of how each distributes parameters, gradients and optimizer state.

The four inner strategies are the stages of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", arXiv:1910.02054). No other file compares a strategy's name.
"""

from dataclasses import dataclass, replace

from megatron.fsdp.helpers.spelling import did_you_mean


@dataclass(frozen=True)
class AxisStrategy:
    """The kinds of tensors that one data-parallel axis shards. Every rank holds the others in full.

    Attributes:
        shards_parameters: Full compute weights exist only while their unit is unsharded.
        shards_gradients: Gradients are reduced after every micro-batch, so that each rank keeps only its shard. If
            not, every rank keeps full ones between micro-batches, and the gradients are their sum.
        shards_optimizer: Each rank updates only its shard of the main weights.
    """

    shards_parameters: bool
    shards_gradients: bool
    shards_optimizer: bool


# Strategies of the inner axis (dp_shard). The position in the table is the ZeRO stage.
INNER: dict[str, AxisStrategy] = {
    "no_shard": AxisStrategy(False, False, False),
    "optim": AxisStrategy(False, False, True),
    "optim_grads": AxisStrategy(False, True, True),
    "optim_grads_params": AxisStrategy(True, True, True),
}

# Strategies of the outer axis (dp_outer): HSDP ("no_shard") and hybrid FSDP ("optim").
OUTER = {name: INNER[name] for name in ("no_shard", "optim")}


@dataclass(frozen=True)
class Sharding:
    """The strategies of both data-parallel axes.

    Attributes:
        inner: Strategy of the inner axis.
        outer: Strategy of the outer axis; ``no_shard`` if there is none.

    Raises:
        ValueError: The outer axis shards the optimizer state and the inner axis does not.
    """

    inner: AxisStrategy
    outer: AxisStrategy = OUTER["no_shard"]

    def __post_init__(self) -> None:
        if self.outer.shards_optimizer and not self.inner.shards_optimizer:
            raise ValueError(
                "outer_dp_sharding_strategy='optim' splits the optimizer state that zero_dp_strategy shards, but "
                "'no_shard' does not shard it. Use zero_dp_strategy='optim', 'optim_grads' or 'optim_grads_params'. "
                "Experts inherit both, unless expert_zero_dp_strategy and expert_outer_dp_sharding_strategy are set."
            )

    @property
    def axes(self) -> tuple[AxisStrategy, AxisStrategy]:
        """The strategies, inner axis first."""
        return self.inner, self.outer

    @property
    def with_full_parameters(self) -> "Sharding":
        """The same strategies, except that every rank keeps full compute weights."""
        return Sharding(replace(self.inner, shards_parameters=False), self.outer)

    @property
    def keeps_shard(self) -> bool:
        """True if a rank keeps its shard of the compute weights, because its main weights cover only part of it."""
        return self.inner.shards_parameters and self.outer.shards_optimizer


UNSHARDED = Sharding(INNER["no_shard"])


# Values that torch's FSDP and DeepSpeed have for the same, in lower case.
_ELSEWHERE = {
    "full_shard": "optim_grads_params",
    "shard_grad_op": "optim_grads",
    "zero1": "optim",
    "zero2": "optim_grads",
    "zero3": "optim_grads_params",
    "ddp": "no_shard",
}


def resolve_strategy(
    strategy: str | int, table: dict[str, AxisStrategy] | None = None, argument: str = "zero_dp_strategy"
) -> str:
    """The canonical name of ``strategy``, which is a name or a ZeRO stage (a position in the table).

    Args:
        strategy: The name or the stage.
        table: The strategies to choose from. None: those of the inner axis.
        argument: What the setting is called in the error message.

    Raises:
        ValueError: ``strategy`` is not in the table. The message lists the choices and suggests the closest one.
    """
    table = INNER if table is None else table
    names = list(table)
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(names):
        return names[strategy]
    if isinstance(strategy, str) and strategy in table:
        return strategy
    same = _ELSEWHERE.get(str(strategy).lower().rpartition(".")[2])
    hint = f" Use {same!r}." if same in names else did_you_mean(strategy, names, cutoff=0.4)
    choices = ", ".join(f"{stage} or {name!r}" for stage, name in enumerate(names))
    raise ValueError(f"{argument}: expected {choices}; got {strategy!r}.{hint}")
