"""The settings of a sharded model: one frozen dataclass, validated when it is created."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megatron.fsdp.helpers.arguments import check_type, described
from megatron.fsdp.sharding.layout import Granularity, parse_granularity
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER, OUTER, Sharding, resolve_strategy

# The strategies of experts, and the tables of their values.
OF_EXPERTS = {"expert_zero_dp_strategy": INNER, "expert_outer_dp_sharding_strategy": OUTER}
# What the bools of FSDP2's argument mean as a number of ranks.
_RESHARD = {"True": None, "False": 1}
# Environment variable: "1" for ``synchronous`` in all models of the process.
SYNCHRONOUS = "MEGATRON_FSDP_SYNCHRONOUS"
_ASYNCHRONOUS = (
    "overlap_param_gather",
    "overlap_grad_reduce",
    "fsdp_double_buffer",
    "nccl_ub",
    "fsdp_manual_registration",
    "cuda_graph_mode",
)


def _is_on(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1; got {value!r}.")
    return value == "1"


def parameter_set(name: str, given: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    """The parameters that an argument was given; none if it is None.

    Raises:
        TypeError: It is no collection, or contains something else.
    """
    if isinstance(given, (Tensor, nn.Module, str)):
        raise TypeError(f"{name}: expected a list or set of parameters; got {described(given)} alone.")
    found = list(() if given is None else given)
    for each in found:
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"{name}: expected parameters of the model; got {described(each)}.")
    return frozenset(found)


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of a sharded model.

    A setting has one name everywhere: it is a field here, a keyword argument of :func:`megatron_fsdp.fully_shard` and
    :func:`megatron_fsdp.fully_shard_model`, and the attribute that the engine reads. To add one, add the field and its
    description here, read it where it takes effect, and run ``python scripts/argument_table.py --write``, which copies
    both into the signatures and the documentation.

    Attributes:
        zero_dp_strategy: What is sharded over the ranks of ``dp_shard_dim``: 0 or ``"no_shard"`` shards nothing, 1 or
            ``"optim"`` the main weights and the optimizer's state, 2 or ``"optim_grads"`` also the gradients, 3 or
            ``"optim_grads_params"`` also the compute weights. Reads as the name. Weights are unsharded twice per
            micro-batch with 3, once per step with 1 and 2, and never with 0.
        outer_dp_sharding_strategy: What is sharded over the ranks of ``dp_outer_dim``: 0 or ``"no_shard"`` replicates
            the shards of the inner axis (HSDP), 1 or ``"optim"`` shards main weights and optimizer state again (hybrid
            FSDP). Reads as the name. ``"optim"`` takes one more all-gather per step.
        expert_zero_dp_strategy: ``zero_dp_strategy`` of experts (see ``expt_device_mesh``). None: the same. Weights of
            few experts per rank may stay unsharded while dense weights are sharded.
        expert_outer_dp_sharding_strategy: ``outer_dp_sharding_strategy`` of experts. None: the same.
        mixed_precision_policy: Dtypes of main weights, gradients and communication. A narrow ``grad_comm_dtype`` has
            less to send.
        init_model_with_meta_device: Accept parameters on the meta device and initialize them unit by unit: as recorded
            by :func:`megatron_fsdp.deferred_init`, or by their modules' ``reset_parameters`` or ``_reset_parameters``.
            At most one full unit is in memory at a time.
        init_per_shard: With ``init_model_with_meta_device``, draw random numbers for this rank's shards only, as FSDP2
            does: at once on many ranks. The values then depend on the number of ranks. Tensors that are not initialized
            element by element, such as orthogonal ones, are still computed in full.
        overlap_grad_reduce: Reduce a unit's gradients while backward continues. If False, backward waits for each
            reduction; gradients that are not sharded are then reduced together after the last micro-batch. That saves
            the gradients of one unit.
        overlap_param_gather: Unshard the next unit while the current one computes. If False, a unit is unsharded when
            it is needed. That saves one unsharded unit, and compute waits for every all-gather.
        sync_model_each_microbatch: End every backward with reduced gradients in ``.grad``. If False, the optimizer's
            step (or ``finish_grad_sync``) does that. Where ``is_last_microbatch`` is False, gradients that are not
            sharded and the outer axis are then reduced once per step: less communication, and full gradients in ZeRO-1.
        report_nan_in_param_grad: Raise at the first gradient that is not finite, before it is reduced, and name its
            parameter. The host then waits for every gradient.
        average_in_collective: Let the collective divide by the number of ranks. NCCL only; the result is the same. It
            saves a pass over the shard.
        calculate_per_token_loss: Sum gradients over ranks without dividing; the caller scales them. It saves a pass
            over the shard.
        keep_fp8_transpose_cache: Keep the transposed copies that Transformer Engine makes of 8-bit weights for
            backward, instead of making them again at each unshard: full weights in 8 bits, on every rank.
        nccl_ub: Register the communication buffers with NCCL. Needs CUDA; implies ``fsdp_double_buffer``. Communication
            then needs fewer SMs and copies.
        fsdp_double_buffer: Unshard into ``max_unsharded_units`` fixed buffers that units use in turn, so that nothing
            is allocated after the first step. These buffers are never freed.
        fsdp_db_use_persist_buf_on_alloc_fail: Give a unit inside another unit its own fixed buffer, instead of one
            that it would have to share with that unit.
        disable_symmetric_registration: With ``nccl_ub``, register local buffers instead of symmetric memory windows.
            NCCL then has no symmetric kernels.
        enable_fine_grained_param_gather: Make every module that directly owns parameters a unit. The peak has two
            modules in place of two units; collectives are more and smaller.
        use_decoupled_grad: Put gradients into ``.decoupled_grad`` of the main weights instead of ``.grad``, for
            optimizers that accept gradients of a different dtype than the weights.
        cuda_graph_mode: Keep all buffers and gradients at fixed addresses, so that a CUDA graph of a whole iteration
            can be captured, whose replay has no launch overhead. ``zero_grad`` then fills gradients with zeros. Needs
            CUDA; implies ``fsdp_double_buffer`` and ``zero_unused_gradients``.
        offload_optimizer: Keep main weights, their gradients and the optimizer's state in host memory: copies cross
            PCIe, and the host updates. With ``overlap_param_gather``, the units that forward needs first are updated
            first and unsharded during the step. With ``use_decoupled_grad``, gradients stay on the device.
        offload_fraction: With ``offload_optimizer``, offload whole units with at most this fraction of the parameters,
            the first units first. Units are then unsharded after the step, unless it is 1.
        shard_granularity: Smallest unit of a parameter that is never split between ranks: ``"row"`` (of dimension 0,
            unless padding would waste too much memory), ``"whole_row"``, ``"block(N)"`` (N rows), ``"element"``,
            ``"tensor"`` (a full matrix, for optimizers such as Muon) or ``"parameter"`` (for Adafactor or 8-bit Adam).
            ``"tensor"`` pads each shard to the largest matrix.
        exchange_gradients: Send sharded gradients with an all-to-all in the dtype they were computed in, and sum them
            in ``grad_comm_dtype`` on the receiving rank. Halves the traffic of bf16 gradients that are reduced in fp32,
            and the buffer to send, without rounding more. Suits ranks joined by fast links: between nodes, a
            reduce-scatter crosses the slow links less often. gloo always works this way.
        zero_unused_gradients: Give a parameter that no rank used a gradient of zeros. If False it gets None, as without
            sharding; ranks then compare one flag per parameter at each synchronization.
        fused_weight_gradients: Let kernels that can (Transformer Engine's, Megatron-Core's) write weight gradients
            directly into the buffer that is reduced, in ``main_grads_dtype``. Autograd then makes no weight gradients,
            and nothing is cast or copied.
        max_unsharded_units: Number of units, besides the root, that may be unsharded at the same time. Each takes the
            memory of the largest unit; more are prefetched further ahead.
        max_reducing_units: Number of units whose gradients may be in a reduction at the same time. Each takes the
            memory of the largest unit; with more, backward waits less.
        fsdp_manual_registration: With ``nccl_ub``, register buffers only when ``register_buffers()`` is called, and not
            at the end of the first step and of later steps that have added buffers. Ranks then compare no lists of
            buffers after a step.
        sync_module_states: Whether the first data-parallel rank gives its initial weights and buffers to the others.
            None: only if they differ, with a warning. True: always; the others may have them on the meta device. False:
            every rank keeps its shards of its own model.
        ignored_params: Parameters that stay as they are, as in FSDP2: neither moved nor sharded, and their gradients
            are those of each rank. State dicts contain them.
        replicated_params: Parameters that every rank keeps in full, such as small adapters: not sharded, and their
            gradients are averaged as with DDP. That saves their all-gathers.
        reshard_after_forward: With ZeRO-3, how many neighbouring ranks of ``dp_shard_dim`` hold a unit's weights
            together from its forward to its backward, such as the GPUs of a node. The all-gather of backward then stays
            among them, and each of *n* ranks keeps 1 / *n* of the compute weights. None or True: all ranks; 1 or False:
            every rank keeps them in full.
        synchronous: Look for the cause of a wrong result: turn off ``overlap_param_gather``, ``overlap_grad_reduce``,
            ``fsdp_double_buffer``, ``nccl_ub`` and ``cuda_graph_mode`` at once. Compute then waits for every
            collective, and no buffer is used twice. If the result stays wrong, look at the model first. So does the
            environment variable ``MEGATRON_FSDP_SYNCHRONOUS=1``.
        interleaves_micro_batches: The caller runs the forward of one micro-batch during the backward of another, as
            ``overlap_moe_expert_parallel_comm`` of Megatron does: ``fsdp_double_buffer`` then has twice as many
            buffers, because the two passes use units in opposite orders.
        sharding: Where parameters, gradients and optimizer state live. Derived from the two strategies.
        expert_sharding: The same of experts.

    Raises:
        ValueError: A value is unknown, or two settings exclude each other.
    """

    zero_dp_strategy: str | int = 3
    outer_dp_sharding_strategy: str | int = 0
    mixed_precision_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    init_model_with_meta_device: bool = False
    init_per_shard: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    offload_optimizer: bool = False
    offload_fraction: float = 1.0
    shard_granularity: str = "row"
    exchange_gradients: bool = False
    zero_unused_gradients: bool = False
    fused_weight_gradients: bool = False
    max_unsharded_units: int = 2
    max_reducing_units: int = 1
    fsdp_manual_registration: bool = False
    sync_module_states: bool | None = None
    expert_zero_dp_strategy: str | int | None = None
    expert_outer_dp_sharding_strategy: str | int | None = None
    ignored_params: Collection[nn.Parameter] = field(default=(), repr=False)
    replicated_params: Collection[nn.Parameter] = field(default=(), repr=False)
    reshard_after_forward: int | None = None
    synchronous: bool = False
    interleaves_micro_batches: bool = False
    sharding: Sharding = field(init=False, repr=False)
    expert_sharding: Sharding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        inner = resolve_strategy(self.zero_dp_strategy)
        outer = resolve_strategy(self.outer_dp_sharding_strategy, OUTER, "outer_dp_sharding_strategy")
        given = {name: value for name in OF_EXPERTS if (value := getattr(self, name)) is not None}
        experts = {name: resolve_strategy(value, OF_EXPERTS[name], name) for name, value in given.items()}
        derived = {
            **experts,
            "zero_dp_strategy": inner,
            "outer_dp_sharding_strategy": outer,
            "sharding": Sharding(INNER[inner], OUTER[outer]),
            "expert_sharding": Sharding(
                INNER[experts.get("expert_zero_dp_strategy", inner)],
                OUTER[experts.get("expert_outer_dp_sharding_strategy", outer)],
            ),
            # Registered and captured memory must stay where it is.
            "fsdp_double_buffer": self.fsdp_double_buffer or self.nccl_ub or self.cuda_graph_mode,
            # Ranks cannot compare flags inside a graph.
            "zero_unused_gradients": self.zero_unused_gradients or self.cuda_graph_mode,
            **{name: parameter_set(name, getattr(self, name)) for name in ("ignored_params", "replicated_params")},
            "reshard_after_forward": _RESHARD.get(str(self.reshard_after_forward), self.reshard_after_forward),
        }
        if self.synchronous or _is_on(SYNCHRONOUS):
            derived |= {"synchronous": self.synchronous or True, **dict.fromkeys(_ASYNCHRONOUS, False)}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        parse_granularity(self.shard_granularity)
        self._check_types()
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError("average_in_collective divides gradients by the ranks; calculate_per_token_loss must not.")
        for name in ("max_unsharded_units", "max_reducing_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}.")
        for name in ("offload_optimizer", "report_nan_in_param_grad"):
            if self.cuda_graph_mode and getattr(self, name):
                raise ValueError(f"{name}: it needs a host-device sync, which a CUDA graph (cuda_graph_mode) cannot.")
        if not 0 <= self.offload_fraction <= 1:
            raise ValueError(f"offload_fraction: expected a number from 0 to 1; got {self.offload_fraction}.")
        self._check_initialization()
        self._check_resharding()
        self._check_devices()

    def _check_initialization(self) -> None:
        if self.sync_module_states and self.init_model_with_meta_device:
            raise ValueError("sync_module_states=True takes values, and init_model_with_meta_device makes new ones.")
        if self.init_per_shard and not self.init_model_with_meta_device:
            raise ValueError("init_per_shard: expected init_model_with_meta_device=True; other models have values.")

    def _check_resharding(self) -> None:
        number = self.reshard_after_forward
        if number is None:
            return
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"reshard_after_forward: expected a number of ranks, or None; got {number!r}.")
        if number > 1 and not self.sharding.inner.shards_parameters:
            raise ValueError(
                f"reshard_after_forward={number}: expected zero_dp_strategy=3; got {self.zero_dp_strategy!r}, with "
                "which weights stay unsharded. Leave it out."
            )
        if number > 1 and self.fsdp_double_buffer:
            raise ValueError(
                f"reshard_after_forward={number} allocates memory in every forward, and the fixed buffers of "
                "fsdp_double_buffer, nccl_ub and cuda_graph_mode are to avoid that. Leave one of them out."
            )

    def _check_types(self) -> None:
        check_type(
            "mixed_precision_policy",
            self.mixed_precision_policy,
            MixedPrecisionPolicy,
            "It has compute_dtype for the param_dtype of torch's policy, and grad_comm_dtype for its reduce_dtype.",
        )
        kinds: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float)}
        for each in fields(self):
            # Annotations are classes, or their names where evaluation is postponed. Flags from Megatron may be None.
            kind = each.type if isinstance(each.type, str) else getattr(each.type, "__name__", "")
            value = getattr(self, each.name, None)
            if kind in kinds and value is not None and not isinstance(value, kinds[kind]):
                raise TypeError(f"{each.name}: expected {kind}; got {value!r}.")

    def _check_devices(self) -> None:
        for name in ("nccl_ub", "cuda_graph_mode"):
            if getattr(self, name) and not torch.cuda.is_available():
                raise ValueError(f"{name}: expected a CUDA device; there is none. Leave it off on a CPU.")

    def with_full_weights(self) -> "FSDPConfig":
        """The same settings for a model without units: every rank keeps full compute weights."""
        copy = replace(self)
        for name in ("sharding", "expert_sharding"):
            object.__setattr__(copy, name, getattr(self, name).with_full_parameters)
        return copy

    def sharding_of(self, expert: bool) -> Sharding:
        """Where parameters, gradients and optimizer state of experts, or of dense parameters, live."""
        return self.expert_sharding if expert else self.sharding

    @cached_property
    def granularity(self) -> Granularity:
        """``shard_granularity`` as a value."""
        return parse_granularity(self.shard_granularity)

    @property
    def grad_attribute(self) -> str:
        """Name of the attribute of main weights that gradients are put into."""
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    @property
    def gather_during_step(self) -> bool:
        """Whether the optimizer updates unit by unit, and updated units are unsharded during its step."""
        # A main weight on the device may be part of the memory that an all-gather writes.
        return self.offload_optimizer and self.offload_fraction == 1 and self.overlap_param_gather

    @property
    def offloads_gradients(self) -> bool:
        """Whether gradients of offloaded main weights are copied to host memory."""
        return self.offload_optimizer and not self.use_decoupled_grad
