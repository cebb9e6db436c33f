"""The settings of a sharded model, in one value that validates itself."""

from dataclasses import dataclass, field

from megatron.fsdp.precision import MixedPrecisionPolicy
from megatron.fsdp.strategy import INNER, Placements, resolve_strategy


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of :class:`megatron.fsdp.MegatronFSDP`.

    Attributes:
        strategy: Sharding strategy of the inner axis: a name or a stage of ZeRO (see ``strategy.INNER``).
        mixed_precision: Dtypes of main weights and gradients.
        overlap_param_gather: Gather the next unit's weights while the current unit computes. If False, a unit's
            weights are gathered when it needs them.
        overlap_grad_reduce: Reduce a unit's gradients while backward goes on. If False, backward waits for each
            reduction or, where gradients are not sharded, all are reduced by ``finish_grad_sync``.
        sync_model_each_microbatch: Every backward ends with reduced gradients in ``.grad``. If False, this happens
            in ``finish_grad_sync``, and gradients that are not sharded are reduced after the last micro-batch only.
        average_in_collective: Let the collective divide by the number of ranks.
        calculate_per_token_loss: Sum gradients over ranks and divide by nothing: the caller scales them.
        zero_unused_gradients: Give a parameter that got no gradient on any rank a gradient of zeros. If False it
            gets None, as without sharding, for which ranks exchange one flag per parameter at each synchronization.
        fused_weight_gradients: Let kernels that can (Transformer Engine's, Megatron-Core's) write weight gradients
            into a buffer of ``main_grads_dtype`` by themselves.
        max_gathered_units: How many units, the root aside, may have gathered weights at a time.
        max_reducing_units: How many units' gradients may be on their way through a reduction at a time.
    """

    strategy: str | int = "optim_grads_params"
    mixed_precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    overlap_param_gather: bool = True
    overlap_grad_reduce: bool = True
    sync_model_each_microbatch: bool = True
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    zero_unused_gradients: bool = False
    fused_weight_gradients: bool = False
    max_gathered_units: int = 2
    max_reducing_units: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", resolve_strategy(self.strategy))
        if not isinstance(self.mixed_precision, MixedPrecisionPolicy):
            raise ValueError(f"mixed_precision: expected a MixedPrecisionPolicy; got {self.mixed_precision!r}.")
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError("average_in_collective divides gradients by the ranks; calculate_per_token_loss must not.")
        for name in ("max_gathered_units", "max_reducing_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}.")

    @property
    def placements(self) -> Placements:
        """Where parameters, gradients and optimizer state live."""
        return INNER[str(self.strategy)]
