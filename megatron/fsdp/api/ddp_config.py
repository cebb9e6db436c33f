"""Settings of data parallelism as Megatron names them, and the settings of this engine that they become."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER, resolve_strategy

NOTHING_SHARDED = (
    "data_parallel_sharding_strategy is no_shard: every rank keeps full weights, gradients and optimizer state, as "
    "with DDP. Set it to optim_grads_params to shard them (ZeRO-3)."
)
# The settings that Megatron's configs have under another name. All others have one name.
FLAGS = {
    "zero_dp_strategy": "data_parallel_sharding_strategy",
    "expert_zero_dp_strategy": "expert_data_parallel_sharding_strategy",
    "max_unsharded_units": "fsdp_buffer_count",
    "interleaves_micro_batches": "overlap_moe_expert_parallel_comm",
    "enable_fine_grained_param_gather": "megatron_fsdp_enable_fine_grained_param_gather",
    "use_decoupled_grad": "megatron_fsdp_use_decoupled_grad",
    "cuda_graph_mode": "megatron_fsdp_cuda_graph_mode",
    "offload_optimizer": "optimizer_cpu_offload",
    "offload_fraction": "optimizer_offload_fraction",
    "exchange_gradients": "reduce_scatter_with_fp32_accumulation",
    "fused_weight_gradients": "gradient_accumulation_fusion",
    # Of the mixed-precision policy.
    "main_params_dtype": "megatron_fsdp_main_params_dtype",
    "main_grads_dtype": "megatron_fsdp_main_grads_dtype",
    "grad_comm_dtype": "megatron_fsdp_grad_comm_dtype",
}


@dataclass
class DistributedDataParallelConfig:
    """Settings of data parallelism, for :class:`megatron_fsdp.MegatronFSDP` without Megatron-Core.

    Megatron-Core's class of the same name works as well. Each field means what the setting of
    :class:`megatron_fsdp.FSDPConfig` with this name means, or with its name in ``FLAGS``. The others:

    Attributes:
        check_for_nan_in_grad: The same as ``report_nan_in_param_grad``.
        bucket_size: No effect: a unit is one bucket per dtype.
        fp8_param_gather: No effect: the model's parameters are sharded as they are, quantized or not.
        gradient_reduce_div_fusion: No effect: each rank divides its shard after the reduction.
        suggested_communication_unit_size: Read by Megatron-Core's wrapper only.
        fsdp_all_gather_in_start_param_sync: Read by Megatron-Core's wrapper only.
        megatron_fsdp_max_pool_double_buffer: Implies ``fsdp_double_buffer``, whose buffers fit units of any size.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        if self.megatron_fsdp_max_pool_double_buffer:
            self.fsdp_double_buffer = True


def from_megatron(*configs: Any, **settings: Any) -> FSDPConfig:
    """The engine's settings for Megatron's.

    Overlap that sharding needs is switched on: of parameters if they are sharded, of gradients if those are.

    Args:
        configs: Objects with Megatron's settings as attributes. The first one that has a setting decides.
        settings: Fields of :class:`FSDPConfig` that have other values.
    """
    found = {
        field.name: value
        for field in dataclasses.fields(FSDPConfig)
        if field.init and (value := _first(configs, FLAGS.get(field.name, field.name))) is not None
    }
    values = {"mixed_precision_policy": policy_of(configs[0]), **found, **settings}
    given = [name for name in ("zero_dp_strategy", "expert_zero_dp_strategy") if name in values]
    sharding = [INNER[resolve_strategy(values[name], argument=FLAGS[name])] for name in given]
    values["fsdp_double_buffer"] |= bool(_first(configs, "megatron_fsdp_max_pool_double_buffer"))
    values["overlap_param_gather"] |= any(each.shards_parameters for each in sharding)
    values["overlap_grad_reduce"] |= any(each.shards_gradients for each in sharding)
    return FSDPConfig(**values)


def policy_of(ddp_config: Any) -> MixedPrecisionPolicy:
    """The mixed-precision policy that a DistributedDataParallelConfig describes."""
    grads = getattr(ddp_config, FLAGS["main_grads_dtype"])
    if grads is None and getattr(ddp_config, "grad_reduce_in_fp32", False):
        # As DDP does: Megatron sets it for bf16 unless --grad-reduce-in-bf16 is given.
        grads = torch.float32
    return MixedPrecisionPolicy(
        main_params_dtype=getattr(ddp_config, FLAGS["main_params_dtype"]),
        main_grads_dtype=grads,
        grad_comm_dtype=getattr(ddp_config, FLAGS["grad_comm_dtype"]),
    )


def to_megatron(config: FSDPConfig) -> DistributedDataParallelConfig:
    """Megatron's settings for the engine's."""
    values = {**vars(config), **vars(config.mixed_precision_policy)}
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    named = {FLAGS.get(name, name): value for name, value in values.items()}
    return DistributedDataParallelConfig(**{name: value for name, value in named.items() if name in known})


def _first(configs: tuple[Any, ...], name: str) -> Any:
    return next((getattr(config, name) for config in configs if hasattr(config, name)), None)
