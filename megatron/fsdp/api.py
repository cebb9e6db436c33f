"""The functions of the public API: shard a model, shard an optimizer, or both."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.module import MegatronFSDP
from megatron.fsdp.optim.classes import require_known
from megatron.fsdp.optim.hooks import attach_at_first_use, attach_optimizer, require_attachment
from megatron.fsdp.runtime.partition import UnitClasses
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: UnitClasses | None = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    *,
    offload_optimizer: bool = False,
    shard_granularity: str = "row",
    exchange_gradients: bool = False,
    preserve_fp32_weights: bool | None = None,
    grad_reduce_in_fp32: bool | None = None,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool | None = None,
) -> MegatronFSDP:
    """Shard a model's parameters, gradients and main weights over data-parallel ranks.

    Args:
        module: The model; all ranks must build it alike. It stays reachable as ``.module`` of the result.
        device_mesh: Mesh that this rank is part of. None: one axis over all ranks.
        dp_shard_dim: Name of the mesh's axis to shard over, which may be a flattened one. None: its only axis.
        dp_outer_dim: Name of the axis that the sharding is repeated over, or extended to (HSDP, hybrid FSDP).
        tp_dim: Name of the mesh's tensor-parallel axis, if it has one.
        hybrid_fsdp_group: Group of all ranks of the outer and the inner axis. None: made where it is needed.
        hybrid_fsdp_expt_group: The same for ``expt_device_mesh``.
        expt_device_mesh: Mesh, with axes of the same names, for parameters whose ``allreduce`` is False (experts);
            ignored if there are none.
        fsdp_group_ag: Another group with the ranks of ``dp_shard_dim``, for gathers: they then run beside reductions.
        expt_fsdp_group_ag: The same for ``expt_device_mesh``.
        fsdp_unit_modules: Module classes, or their names or import paths, whose modules are gathered and released one
            by one; with none in the list, the whole model is. None: every rank keeps whole weights, as with DDP.
        zero_dp_strategy: What is sharded: 0 or ``"no_shard"``, 1 or ``"optim"``, 2 or ``"optim_grads"``,
            3 or ``"optim_grads_params"``.
        outer_dp_sharding_strategy: The same for the outer axis: 0 or ``"no_shard"``, 1 or ``"optim"``.
        device: Where to compute. None: where the parameters are, or the current CUDA device if there is one.
        init_model_with_meta_device: Materialize parameters on the meta device, unit by unit: as recorded by
            :func:`megatron.fsdp.deferred_init`, or with their modules' ``reset_parameters`` or ``_reset_parameters``.
        mixed_precision_policy: Dtypes of main weights and gradients. None: ``MixedPrecisionPolicy()``.
        overlap_grad_reduce: Reduce a unit's gradients while backward goes on.
        overlap_param_gather: Gather the next unit's weights while the current unit computes.
        sync_model_each_microbatch: Every backward ends with reduced gradients in ``.grad``. If False, the
            optimizer's step does that, and the outer axis takes part in it only once per step.
        preproc_state_dict_for_dcp_ckpt: Accepted. State dicts always fit torch.distributed.checkpoint.
        report_nan_in_param_grad: Raise at the first gradient that is not finite, and name its parameter. Costs time.
        average_in_collective: Let the collective divide by the number of ranks.
        disable_bucketing: Accepted. A unit is what is communicated together, in one collective per dtype.
        calculate_per_token_loss: Sum gradients over ranks and divide by nothing.
        keep_fp8_transpose_cache: Needs FP8 weights, which are not supported yet.
        nccl_ub: Register communication buffers with NCCL. Needs CUDA; implies ``fsdp_double_buffer``.
        fsdp_double_buffer: Gather into two fixed buffers that units take in turn: no allocation after the first step.
        fsdp_db_use_persist_buf_on_alloc_fail: Give a unit that finds no fixed buffer free one of its own.
        disable_symmetric_registration: With ``nccl_ub``, register each rank's memory for itself.
        enable_fine_grained_param_gather: Gather every module inside a unit that has parameters on its own.
        use_decoupled_grad: Put gradients into ``.decoupled_grad`` of the main weights instead of ``.grad``.
        cuda_graph_mode: Keep all buffers where they are, so that CUDA graphs can be captured. Needs CUDA.
        maxpool_double_buffer: Accepted. Fixed buffers have the size of the largest unit.
        offload_optimizer: Keep main weights, gradients of the step, and so the optimizer's state, in host memory. What
            forward needs first is updated first, and gathered while the step goes on.
        shard_granularity: What is not divided between ranks: ``"row"`` (of dimension 0, unless that would waste too
            much memory), ``"whole_row"``, ``"tensor"`` (whole matrices, for optimizers such as Muon),
            ``"parameter"`` (each as a whole, for Adafactor or 8-bit Adam),
            ``"block(N)"`` (of N rows), or ``"element"``.
        exchange_gradients: Send gradients in the compute dtype and sum them in ``grad_comm_dtype`` where they arrive:
            half the bytes for bf16, no more rounding. For ranks that are all joined by fast links.
        preserve_fp32_weights: Deprecated: ``MixedPrecisionPolicy(main_params_dtype=torch.float32)``, or None.
        grad_reduce_in_fp32: Deprecated: ``main_grads_dtype`` and ``grad_comm_dtype`` of the policy.
        keep_fp8_transpose_cache_when_using_custom_fsdp: Deprecated name of ``keep_fp8_transpose_cache``.

    Returns:
        The wrapped model. Its ``parameters()`` are the main weights, for the optimizer.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or an argument is not fit; nothing has been changed then.
        NotImplementedError: An argument asks for what is not supported yet.
    """
    require_process_group()
    if keep_fp8_transpose_cache_when_using_custom_fsdp is not None:
        _deprecated("keep_fp8_transpose_cache_when_using_custom_fsdp", "keep_fp8_transpose_cache")
        keep_fp8_transpose_cache |= keep_fp8_transpose_cache_when_using_custom_fsdp
    if keep_fp8_transpose_cache:
        raise NotImplementedError("keep_fp8_transpose_cache: weights in FP8 are not supported yet. Leave it off.")
    config = FSDPConfig(
        zero_dp_strategy=zero_dp_strategy,
        outer_dp_sharding_strategy=outer_dp_sharding_strategy,
        mixed_precision_policy=_policy(mixed_precision_policy, preserve_fp32_weights, grad_reduce_in_fp32),
        shard_granularity=shard_granularity,
        exchange_gradients=exchange_gradients,
        init_model_with_meta_device=init_model_with_meta_device,
        offload_optimizer=offload_optimizer,
        overlap_param_gather=overlap_param_gather,
        overlap_grad_reduce=overlap_grad_reduce,
        sync_model_each_microbatch=sync_model_each_microbatch,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        calculate_per_token_loss=calculate_per_token_loss,
        fsdp_double_buffer=fsdp_double_buffer or nccl_ub or cuda_graph_mode,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        nccl_ub=nccl_ub,
        symmetric_registration=not disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
    )
    if device_mesh is None and (dp_shard_dim, dp_outer_dim, tp_dim) != (None, None, None):
        raise ValueError("dp_shard_dim, dp_outer_dim and tp_dim name axes of a mesh: give device_mesh too.")
    index = None
    if device_mesh is not None:
        index = FSDPDistributedIndex(
            device_mesh,
            dp_shard_dim,
            dp_outer_dim,
            tp_dim,
            hybrid_fsdp_group,
            hybrid_fsdp_expt_group,
            config.sharding.outer.shards_optimizer,
            expt_device_mesh,
            fsdp_group_ag,
            expt_fsdp_group_ag,
        )
    model = MegatronFSDP(module, config, index, fsdp_unit_modules, device)
    attach_at_first_use(model.engine, require_attachment)
    return model


def _policy(
    policy: MixedPrecisionPolicy | None, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None
) -> MixedPrecisionPolicy:
    """The policy, from arguments of which some are older names of its fields."""
    if preserve_fp32_weights is None and grad_reduce_in_fp32 is None:
        return MixedPrecisionPolicy() if policy is None else policy
    if policy is not None:
        raise ValueError(
            "mixed_precision_policy says what preserve_fp32_weights and grad_reduce_in_fp32 said: give one."
        )
    fp32 = torch.float32
    if preserve_fp32_weights is not None:
        _deprecated("preserve_fp32_weights", "mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=...)")
    if grad_reduce_in_fp32 is not None:
        _deprecated("grad_reduce_in_fp32", "mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=...)")
    grads = fp32 if grad_reduce_in_fp32 else None
    return MixedPrecisionPolicy(
        main_params_dtype=None if preserve_fp32_weights is False else fp32,
        main_grads_dtype=grads,
        grad_comm_dtype=grads,
    )


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; use {instead}.", DeprecationWarning, stacklevel=4)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Make an optimizer update the main weights of a sharded model.

    It may have been given the model's parameters before the model was sharded, or those of the sharded model.
    Parameter groups keep their options. No step is taken to create state: the first update is what it would be
    without sharding.

    Args:
        optimizer: Any optimizer of ``torch.optim`` that updates parameters element by element; with
            ``shard_granularity="tensor"`` also one that looks at whole matrices, and with ``"parameter"`` one that
            looks at whole parameters. Classes that are not known have to be registered
            (:func:`megatron.fsdp.register_optimizer`). State that it has for whole parameters is sharded along.
        preproc_state_dict_for_dcp_ckpt: Accepted. State dicts always fit torch.distributed.checkpoint.

    Returns:
        The same object. ``step`` synchronizes what is left to synchronize before it updates.

    Raises:
        ValueError: No parameter belongs to a sharded model, there is state of another shape than its parameter, or
            the optimizer looks at whole matrices or parameters, and one is divided between ranks.
        NotImplementedError: The optimizer's class does not work on parts of parameters, or nobody has said that it
            does. Nothing has been changed then.
    """
    attach_optimizer(optimizer)
    return optimizer


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, **model_arguments: object
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and its optimizer: :func:`fully_shard_model`, then :func:`fully_shard_optimizer`.

    Args:
        module: The model.
        optimizer: An optimizer of its parameters.
        model_arguments: Further arguments of :func:`fully_shard_model`.

    Returns:
        The wrapped model, and the same optimizer.
    """
    require_known(optimizer)
    model = fully_shard_model(module, **model_arguments)  # type: ignore[arg-type]
    return model, fully_shard_optimizer(optimizer)
