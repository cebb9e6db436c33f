"""The memory of one model with every sharding strategy."""

from dataclasses import dataclass

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools.estimate import AxisSizes, Outline, Usage, estimate_outline, usage


@dataclass(frozen=True)
class Bar:
    """The memory of one strategy.

    Attributes:
        strategy: Name of the strategy.
        ranks: Number of ranks.
        usage: Its bytes on a rank at the peak of a step, without activations.
    """

    strategy: str
    ranks: int
    usage: Usage


def bars(model: Outline, ranks: int, policy: MixedPrecisionPolicy, inner: int = 8) -> list[Bar]:
    """The memory with every strategy.

    Args:
        model: The units of a model, from :func:`~megatron.fsdp.tools.estimate.outline`.
        ranks: Number of data-parallel ranks.
        policy: Dtypes of main weights and gradients.
        inner: Ranks of the inner axis of HSDP and hybrid FSDP, which are left out unless ``ranks`` is a multiple.
    """
    cases = [(name, FSDPConfig(name, 0, policy), AxisSizes(ranks)) for name in INNER]
    if ranks > inner and ranks % inner == 0:
        axes = AxisSizes(inner, ranks // inner)
        for title, outer in ((f"HSDP {ranks // inner} x {inner}", "no_shard"), ("hybrid FSDP", "optim")):
            cases.append((title, FSDPConfig(3, outer, policy), axes))
    return [
        Bar(name, ranks, usage([estimate_outline(model, config, axes, axes)], config)) for name, config, axes in cases
    ]
