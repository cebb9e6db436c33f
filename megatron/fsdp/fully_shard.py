"""The functions of the public API: shard a model, shard an optimizer, or both."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.megatron_fsdp import MegatronFSDP
from megatron.fsdp.mesh import FSDPDistributedIndex, require_process_group
from megatron.fsdp.optimizer import attach_optimizer
from megatron.fsdp.partition import UnitClasses
from megatron.fsdp.precision import MixedPrecisionPolicy


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    tp_dim: str | None = None,
    fsdp_unit_modules: UnitClasses | None = None,
    zero_dp_strategy: str | int = 3,
    device: torch.device | str | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    average_in_collective: bool = False,
    calculate_per_token_loss: bool = False,
) -> MegatronFSDP:
    """Shard a model's parameters, gradients and main weights over data-parallel ranks.

    Args:
        module: The model; all ranks must build it alike. It stays reachable as ``.module`` of the result.
        device_mesh: Mesh that this rank is part of. None: one axis over all ranks.
        dp_shard_dim: Name of the mesh's axis to shard over. None: its only axis.
        tp_dim: Name of the mesh's tensor-parallel axis, if it has one.
        fsdp_unit_modules: Module classes, or import paths of such, whose modules are gathered and released one by
            one. None: the whole model is one unit.
        zero_dp_strategy: What is sharded: 0 or ``"no_shard"``, 1 or ``"optim"``, 2 or ``"optim_grads"``,
            3 or ``"optim_grads_params"``.
        device: Where to compute. None: where the parameters are, or the current CUDA device if there is one.
        mixed_precision_policy: Dtypes of main weights and gradients. None: ``MixedPrecisionPolicy()``.
        overlap_grad_reduce: Reduce a unit's gradients while backward goes on.
        overlap_param_gather: Gather the next unit's weights while the current unit computes.
        sync_model_each_microbatch: Every backward ends with reduced gradients in ``.grad``. If False, the
            optimizer's step does that.
        average_in_collective: Let the collective divide by the number of ranks.
        calculate_per_token_loss: Sum gradients over ranks and divide by nothing.

    Returns:
        The wrapped model. Its ``parameters()`` are the main weights, for the optimizer.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: The model or an argument is not fit; nothing has been changed then.
    """
    require_process_group()
    config = FSDPConfig(
        strategy=zero_dp_strategy,
        mixed_precision=MixedPrecisionPolicy() if mixed_precision_policy is None else mixed_precision_policy,
        overlap_param_gather=overlap_param_gather,
        overlap_grad_reduce=overlap_grad_reduce,
        sync_model_each_microbatch=sync_model_each_microbatch,
        average_in_collective=average_in_collective,
        calculate_per_token_loss=calculate_per_token_loss,
    )
    if device_mesh is None and (dp_shard_dim is not None or tp_dim is not None):
        raise ValueError("dp_shard_dim and tp_dim name axes of a mesh: give device_mesh too.")
    index = None if device_mesh is None else FSDPDistributedIndex(device_mesh, dp_shard_dim, tp_dim)
    return MegatronFSDP(module, config, index, fsdp_unit_modules, device)


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer update the main weights of a sharded model.

    It may have been given the model's parameters before the model was sharded, or those of the sharded model.
    Parameter groups keep their options. No step is taken to create state: the first update is what it would be
    without sharding.

    Args:
        optimizer: Any optimizer of ``torch.optim`` that updates parameters element by element. State that it has for
            whole parameters is sharded along.

    Returns:
        The same object. ``step`` synchronizes what is left to synchronize before it updates.

    Raises:
        ValueError: No parameter belongs to a sharded model, or there is state of another shape than its parameter.
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
    model = fully_shard_model(module, **model_arguments)  # type: ignore[arg-type]
    return model, fully_shard_optimizer(optimizer)
