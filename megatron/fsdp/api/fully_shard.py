"""The public functions: shard a model, an optimizer, or both."""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.helpers.arguments import check_arguments, check_type
from megatron.fsdp.optim.classes import require_known
from megatron.fsdp.optim.hooks import ZeroGrad, attach_at_first_use, attach_optimizer, wrapped_by
from megatron.fsdp.runtime.partition import UnitClasses
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

P = ParamSpec("P")
R = TypeVar("R")


@check_arguments
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
    zero_unused_gradients: bool = False,
    fused_weight_gradients: bool = False,
    max_unsharded_units: int = 2,
    max_reducing_units: int = 1,
    fsdp_manual_registration: bool = False,
    offload_fraction: float = 1.0,
    sync_module_states: bool | None = None,
    expert_zero_dp_strategy: str | int | None = None,
    expert_outer_dp_sharding_strategy: str | int | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    replicated_params: Collection[nn.Parameter] = (),
    reshard_after_forward: int | None = None,
    synchronous: bool = False,
    init_per_shard: bool = False,
    interleaves_micro_batches: bool = False,
) -> MegatronFSDP:
    """Shard a model's parameters, gradients and optimizer state over the data-parallel ranks.

    Each unit of the model is unsharded (all-gathered) before its forward and backward and resharded afterwards; its
    gradients are reduce-scattered during backward. Outside of forward and backward, the model's parameters are the
    main weights: DTensors, of which each rank holds its shard, in the dtype that the optimizer updates.

    All ranks must build the same model and pass the same arguments; otherwise an error names the difference. If an
    argument is wrong, the model is left unchanged.

    Example::

        model = fully_shard_model(model, fsdp_unit_modules=[TransformerLayer])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    Args:
        module: The model. It stays accessible as ``.module`` of the result.
        device_mesh: Mesh that contains this rank. None: a one-dimensional mesh of all ranks.
        dp_shard_dim: Name of the mesh dimension to shard over; it may be a flattened one, such as the product of data
            and context parallelism. None: the only dimension of the mesh. More ranks have smaller shards and longer
            collectives.
        dp_outer_dim: Name of the dimension that the sharding is replicated over (HSDP) or extended to (hybrid FSDP).
            All-gathers stay inside of ``dp_shard_dim``.
        tp_dim: Name of the tensor-parallel dimension, if the mesh has one.
        hybrid_fsdp_group: Process group of all ranks of ``dp_outer_dim`` and ``dp_shard_dim``. None: created if needed.
        hybrid_fsdp_expt_group: The same for ``expt_device_mesh``.
        expt_device_mesh: Mesh of experts, with dimensions of the same names: of parameters whose ``allreduce``
            attribute is False, or that lack it and have ``.experts.`` in their names.
        fsdp_group_ag: A second process group with the ranks of ``dp_shard_dim``, for all-gathers, which can then
            overlap with reduce-scatters. NCCL allocates buffers for one more communicator.
        expt_fsdp_group_ag: The same for ``expt_device_mesh``.
        fsdp_unit_modules: Module classes, class names, import paths, or modules of the model. Each module of such a
            class becomes a unit, whose parameters are unsharded and resharded together; the rest of the model is the
            root unit. An empty list makes the whole model one unit. None: compute weights stay full on every rank, as
            with DDP. The peak has two of the largest unit; small units take many collectives.
        zero_dp_strategy: What is sharded over the ranks of ``dp_shard_dim``: 0 or ``"no_shard"`` shards nothing, 1 or
            ``"optim"`` the main weights and the optimizer's state, 2 or ``"optim_grads"`` also the gradients, 3 or
            ``"optim_grads_params"`` also the compute weights. Reads as the name. Weights are unsharded twice per
            micro-batch with 3, once per step with 1 and 2, and never with 0.
        outer_dp_sharding_strategy: What is sharded over the ranks of ``dp_outer_dim``: 0 or ``"no_shard"`` replicates
            the shards of the inner axis (HSDP), 1 or ``"optim"`` shards main weights and optimizer state again (hybrid
            FSDP). Reads as the name. ``"optim"`` takes one more all-gather per step.
        device: Device to compute on. None: that of the parameters, or the current CUDA device if there is one.
        init_model_with_meta_device: Accept parameters on the meta device and initialize them unit by unit: as recorded
            by :func:`megatron_fsdp.deferred_init`, or by their modules' ``reset_parameters`` or ``_reset_parameters``.
            At most one full unit is in memory at a time.
        mixed_precision_policy: Dtypes of main weights, gradients and communication. A narrow ``grad_comm_dtype`` has
            less to send.
        overlap_grad_reduce: Reduce a unit's gradients while backward continues. If False, backward waits for each
            reduction; gradients that are not sharded are then reduced together after the last micro-batch. That saves
            the gradients of one unit.
        overlap_param_gather: Unshard the next unit while the current one computes. If False, a unit is unsharded when
            it is needed. That saves one unsharded unit, and compute waits for every all-gather.
        sync_model_each_microbatch: End every backward with reduced gradients in ``.grad``. If False, the optimizer's
            step (or ``finish_grad_sync``) does that. Where ``is_last_microbatch`` is False, gradients that are not
            sharded and the outer axis are then reduced once per step: less communication, and full gradients in ZeRO-1.
        preproc_state_dict_for_dcp_ckpt: No effect: state dicts always work with torch.distributed.checkpoint.
        report_nan_in_param_grad: Raise at the first gradient that is not finite, before it is reduced, and name its
            parameter. The host then waits for every gradient.
        average_in_collective: Let the collective divide by the number of ranks. NCCL only; the result is the same. It
            saves a pass over the shard.
        disable_bucketing: No effect: a unit is one bucket per dtype.
        calculate_per_token_loss: Sum gradients over ranks without dividing; the caller scales them. It saves a pass
            over the shard.
        keep_fp8_transpose_cache: Keep the transposed copies that Transformer Engine makes of 8-bit weights for
            backward, instead of making them again at each unshard: full weights in 8 bits, on every rank.
        nccl_ub: Register the communication buffers with NCCL. Needs CUDA; implies ``fsdp_double_buffer``. Communication
            then needs fewer SMs and copies.
        fsdp_double_buffer: Unshard into ``max_unsharded_units`` fixed buffers that units use in turn, so that nothing
            is allocated after the first step. These buffers are never freed.
        fsdp_db_use_persist_buf_on_alloc_fail: Give a unit inside another unit its own fixed buffer, instead of one that
            it would have to share with that unit.
        disable_symmetric_registration: With ``nccl_ub``, register local buffers instead of symmetric memory windows.
            NCCL then has no symmetric kernels.
        enable_fine_grained_param_gather: Make every module that directly owns parameters a unit. The peak has two
            modules in place of two units; collectives are more and smaller.
        use_decoupled_grad: Put gradients into ``.decoupled_grad`` of the main weights instead of ``.grad``, for
            optimizers that accept gradients of a different dtype than the weights.
        cuda_graph_mode: Keep all buffers and gradients at fixed addresses, so that a CUDA graph of a whole iteration
            can be captured, whose replay has no launch overhead. ``zero_grad`` then fills gradients with zeros. Needs
            CUDA; implies ``fsdp_double_buffer`` and ``zero_unused_gradients``.
        maxpool_double_buffer: The same as ``fsdp_double_buffer``, whose buffers already fit units of any size.
        offload_optimizer: Keep main weights, their gradients and the optimizer's state in host memory: copies cross
            PCIe, and the host updates. With ``overlap_param_gather``, the units that forward needs first are updated
            first and unsharded during the step. With ``use_decoupled_grad``, gradients stay on the device.
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
        offload_fraction: With ``offload_optimizer``, offload whole units with at most this fraction of the parameters,
            the first units first. Units are then unsharded after the step, unless it is 1.
        sync_module_states: Whether the first data-parallel rank gives its initial weights and buffers to the others.
            None: only if they differ, with a warning. True: always; the others may have them on the meta device. False:
            every rank keeps its shards of its own model.
        expert_zero_dp_strategy: ``zero_dp_strategy`` of experts (see ``expt_device_mesh``). None: the same. Weights of
            few experts per rank may stay unsharded while dense weights are sharded.
        expert_outer_dp_sharding_strategy: ``outer_dp_sharding_strategy`` of experts. None: the same.
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
        init_per_shard: With ``init_model_with_meta_device``, draw random numbers for this rank's shards only, as FSDP2
            does: at once on many ranks. The values then depend on the number of ranks. Tensors that are not initialized
            element by element, such as orthogonal ones, are still computed in full.
        interleaves_micro_batches: The caller runs the forward of one micro-batch during the backward of another, as
            ``overlap_moe_expert_parallel_comm`` of Megatron does: ``fsdp_double_buffer`` then has twice as many
            buffers, because the two passes use units in opposite orders.

    Returns:
        The sharded model. Its ``parameters()`` are the main weights, for the optimizer.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or an argument cannot be used as given.
        NotImplementedError: An argument requests a feature that is not supported.
    """
    arguments = dict(locals())
    arguments["mixed_precision_policy"] = arguments["mixed_precision_policy"] or MixedPrecisionPolicy()
    arguments["fsdp_double_buffer"] |= maxpool_double_buffer
    config = FSDPConfig(**{field.name: arguments[field.name] for field in dataclasses.fields(FSDPConfig) if field.init})
    index = None
    if device_mesh is not None:
        names = inspect.signature(FSDPDistributedIndex).parameters.keys() - {"hsdp_outer_dp_shard"}
        axes = {name: arguments[name] for name in names}
        index = FSDPDistributedIndex(**axes, hsdp_outer_dp_shard=config.sharding.outer.shards_optimizer)
    elif (dp_shard_dim, dp_outer_dim, tp_dim) != (None, None, None):
        raise ValueError(
            "device_mesh: got None, but dp_shard_dim, dp_outer_dim or tp_dim names an axis of it. Give it too."
        )
    model = MegatronFSDP(module, index, fsdp_unit_modules=fsdp_unit_modules, device=device, config=config)
    attach_at_first_use(model.engine)
    return model


@check_arguments
def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Make an optimizer update the main weights of a sharded model.

    The optimizer may have been created with the parameters of the model before or after it was sharded. Its parameter
    groups keep their options, and state that it already has is sharded. No step is taken to create state, so the first
    update is the same as without sharding.

    Args:
        optimizer: Any element-wise optimizer of ``torch.optim``. Optimizers that use full matrices need
            ``shard_granularity="tensor"``; those that use full parameters need ``"parameter"``. Other classes have to
            be registered first: :func:`megatron_fsdp.register_optimizer`.
        preproc_state_dict_for_dcp_ckpt: No effect: state dicts always work with torch.distributed.checkpoint.

    Returns:
        The same optimizer. ``step`` finishes the synchronization of gradients first, unless called with
        ``sync_grad_before_optimizer_step=False``, and has the compute weights updated before their next use, unless
        called with ``install_optimized_model_weights=False``. ``zero_grad`` also drops gradients that are not
        synchronized yet, unless called with ``zero_grad_buffer=False``.

    Raises:
        ValueError: No parameter belongs to a sharded model, existing state has a different shape than its parameter, or
            the optimizer uses full matrices or parameters that are split between ranks.
        NotImplementedError: The optimizer's class does not work on shards of parameters, or is not registered.
    """
    check_type("optimizer", optimizer, torch.optim.Optimizer)
    attach_optimizer(optimizer)
    optimizer.zero_grad = ZeroGrad(optimizer)  # type: ignore[method-assign]
    return optimizer


def _before_optimizer(
    other: Callable[Concatenate[nn.Module, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[nn.Module, torch.optim.Optimizer, P], R]]:
    """Decorate a function of a module and an optimizer: its other arguments are those of ``other``, behind these."""

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[nn.Module, torch.optim.Optimizer, P], R]:
        own, settings = inspect.signature(function), [*inspect.signature(other).parameters.values()][1:]
        first = [own.parameters["module"], own.parameters["optimizer"]]
        function.__signature__ = own.replace(parameters=[*first, *settings])  # type: ignore[attr-defined]
        return check_arguments(function)

    return decorate


@_before_optimizer(fully_shard_model)
def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *arguments: Any, **settings: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and its optimizer: :func:`fully_shard_model`, then :func:`fully_shard_optimizer`.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[TransformerLayer])

    Args:
        module: The model.
        optimizer: An optimizer of its parameters.

    The other arguments are those of :func:`fully_shard_model`, in the same order.

    Returns:
        The sharded model, and the same optimizer.
    """
    check_type("optimizer", optimizer, torch.optim.Optimizer)
    require_known(wrapped_by(optimizer) or optimizer)
    model = fully_shard_model(module, *arguments, **settings)
    return model, fully_shard_optimizer(optimizer)
