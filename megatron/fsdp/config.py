"""The settings of a sharded model, in one value that validates itself."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron.fsdp.sharding.layout import Granularity, parse_granularity
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER, OUTER, Sharding, resolve_strategy


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of :class:`megatron.fsdp.MegatronFSDP`.

    Attributes:
        zero_dp_strategy: Sharding strategy of the inner axis: a name or a stage of ZeRO (see ``strategy.INNER``).
        outer_dp_sharding_strategy: Strategy of the outer axis, if the mesh has one: 0 or ``"no_shard"`` repeats what
            the inner axis shards (HSDP), 1 or ``"optim"`` shards main weights and optimizer state over it too (hybrid
            FSDP).
        mixed_precision_policy: Dtypes of main weights and gradients.
        shard_granularity: What is not divided between ranks: ``"row"``, ``"tensor"``, ``"parameter"``, ``"block(N)"``
            or ``"element"``.
        init_model_with_meta_device: Parameters may be on the meta device; they are materialized unit by unit.
        offload_optimizer: Keep main weights, their gradients and so the optimizer's state in host memory.
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
        report_nan_in_param_grad: Raise at the first gradient that is not finite, before it is reduced, naming its
            parameter.
        use_decoupled_grad: Put gradients into ``.decoupled_grad`` of the main weights instead of ``.grad``.
        fused_weight_gradients: Let kernels that can (Transformer Engine's, Megatron-Core's) write weight gradients
            into a buffer of ``main_grads_dtype`` by themselves.
        exchange_gradients: Reduce-scatter gradients by an all-to-all in the dtype that they are computed in, and sum
            them in ``grad_comm_dtype`` where they arrive. That sends half as much if one is bf16 and the other fp32,
            and rounds no more. It suits ranks that are all joined by fast links: rings of NCCL's reduce-scatter cross
            slower ones, between nodes, less often. For sharded gradients; over gloo it is always so.
        enable_fine_grained_param_gather: Inside a unit, gather every module that has parameters of its own by itself.
        fsdp_double_buffer: Gather into ``max_unsharded_units`` fixed buffers, which units take in turn.
        fsdp_db_use_persist_buf_on_alloc_fail: Give a unit that would share its fixed buffer with a unit around it one
            of its own.
        nccl_ub: Register fixed buffers with NCCL.
        symmetric_registration: Register them as windows of symmetric memory.
        cuda_graph_mode: Keep all buffers where they are, for capture in CUDA graphs.
        max_unsharded_units: How many units, the root aside, may have gathered weights at a time.
        max_reducing_units: How many units' gradients may be on their way through a reduction at a time.
        whole_weights: Every rank keeps whole compute weights, whatever the strategy says. Set by the engine for a model
            without units.
        sharding: Where parameters, gradients and optimizer state live, by the strategies.

    Raises:
        ValueError: A setting is unknown, or two do not fit together.
        NotImplementedError: A setting is not supported yet.
    """

    zero_dp_strategy: str | int = "optim_grads_params"
    outer_dp_sharding_strategy: str | int = "no_shard"
    mixed_precision_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    shard_granularity: str = "row"
    init_model_with_meta_device: bool = False
    offload_optimizer: bool = False
    overlap_param_gather: bool = True
    overlap_grad_reduce: bool = True
    sync_model_each_microbatch: bool = True
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    zero_unused_gradients: bool = False
    report_nan_in_param_grad: bool = False
    use_decoupled_grad: bool = False
    fused_weight_gradients: bool = False
    exchange_gradients: bool = False
    enable_fine_grained_param_gather: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    nccl_ub: bool = False
    symmetric_registration: bool = True
    cuda_graph_mode: bool = False
    max_unsharded_units: int = 2
    max_reducing_units: int = 1
    whole_weights: bool = field(default=False, repr=False)
    sharding: Sharding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "zero_dp_strategy", resolve_strategy(self.zero_dp_strategy))
        object.__setattr__(self, "outer_dp_sharding_strategy", resolve_strategy(self.outer_dp_sharding_strategy, OUTER))
        sharding = Sharding(INNER[str(self.zero_dp_strategy)], OUTER[str(self.outer_dp_sharding_strategy)])
        object.__setattr__(self, "sharding", sharding.with_whole_parameters if self.whole_weights else sharding)
        parse_granularity(self.shard_granularity)
        if not isinstance(self.mixed_precision_policy, MixedPrecisionPolicy):
            raise ValueError(f"mixed_precision: expected a MixedPrecisionPolicy; got {self.mixed_precision_policy!r}.")
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError("average_in_collective divides gradients by the ranks; calculate_per_token_loss must not.")
        for name in ("max_unsharded_units", "max_reducing_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}.")
        self._check_device()
        if self.cuda_graph_mode:  # ranks cannot ask each other in a graph which gradients there are
            object.__setattr__(self, "zero_unused_gradients", True)

    @cached_property
    def granularity(self) -> Granularity:
        """``shard_granularity`` as a value."""
        return parse_granularity(self.shard_granularity)

    @property
    def grad_attribute(self) -> str:
        """Where main weights get their gradients."""
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    @property
    def gather_during_step(self) -> bool:
        """Whether the optimizer's step is taken unit by unit, and what is updated is gathered meanwhile."""
        return self.offload_optimizer and self.overlap_param_gather

    def _check_device(self) -> None:
        for name, flag in (
            ("register_with_nccl (nccl_ub)", self.nccl_ub),
            ("cuda_graphs (cuda_graph_mode)", self.cuda_graph_mode),
        ):
            if flag and not torch.cuda.is_available():
                raise ValueError(f"{name}: expected a CUDA device; there is none. Leave it off on a CPU.")
