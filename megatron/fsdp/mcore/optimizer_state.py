"""The state of Megatron's distributed optimizer where it updates the main weights of sharded models."""

from collections.abc import Callable
from typing import Any

import torch

from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_like
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel
from megatron.fsdp.mcore.checkpoint_state import optimizer_names
from megatron.fsdp.mcore.resuming import megatron_arguments


def _updates_ours(optimizer: Any) -> bool:
    chunks = getattr(optimizer, "model_chunks", [])
    return bool(chunks) and all(isinstance(chunk, FullyShardedDataParallel) for chunk in chunks)


def param_name(original: Callable[..., str], optimizer: Any, param: Any) -> str:
    """The parameter's name in a checkpoint, which no other pipeline stage or expert-parallel rank uses."""
    if not _updates_ours(optimizer):
        return original(optimizer, param)
    if not hasattr(optimizer, "global_names"):
        optimizer.global_names = optimizer_names(optimizer.model_chunks)
    return optimizer.global_names[param]


def copy_model_params_to_main_params(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing for sharded models: their main weights are what was loaded."""
    if not _updates_ours(optimizer):
        original(optimizer, *args, **kwargs)


# Settings of a group that Megatron's schedules read: the options that set them, besides --lr's.
_SCHEDULED = {
    "max_lr": "--lr, --decoupled-lr",
    "min_lr": "--min-lr, --decoupled-min-lr",
    "wd_mult": "parameters without weight decay",
    "lr_mult": "multipliers of the learning rate",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
}


def groups_to_load(
    original: Callable[..., Any], optimizer: Any, saved: dict[str, Any], own: list[dict[str, Any]], strict: bool = True
) -> Any:
    """A checkpoint's settings of this run's groups. Groups without parameters on this rank keep their own.

    Raises:
        ValueError: Rates or decay are those of another run, and no option says which to take.
    """
    found = original(optimizer, saved, own, strict)
    if not _updates_ours(optimizer):
        return found
    counts = [{"step": group["step"]} for group in found if group["params"] and "step" in group]
    args = megatron_arguments()
    for group, run in zip(found, own, strict=True):
        if not group["params"]:
            group |= {name: value for name, value in run.items() if name != "params"} | (counts[0] if counts else {})
        for name in [name for name in _SCHEDULED if name in group and name in run]:
            if group[name] == run[name] or getattr(args, "use_checkpoint_opt_param_scheduler", True):
                continue
            if not args.override_opt_param_scheduler:
                raise ValueError(
                    f"{_SCHEDULED[name]}: {group['params'][0]}: expected {name} {group[name]}, as in the checkpoint; "
                    f"got {run[name]}. Give --override-opt_param-scheduler to take this run's values, or "
                    "--use-checkpoint-opt_param-scheduler to keep the checkpoint's."
                )
            group[name] = run[name]
    return found


def state_to_save(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """State for a checkpoint, with moments in fp16 and FP8 as the float32 values that the optimizer loads.

    Megatron-Core gives the tensors as they are. Transformer Engine's Adam has their scales elsewhere.
    """
    found = original(optimizer, *args, **kwargs)
    inner = optimizer.optimizer
    dtypes = getattr(inner, "name_to_dtype_map", {})
    scaled = {name for name, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)}
    for main, state in inner.state.items() if scaled and _updates_ours(optimizer) else ():
        wide = {name: make_like(inner.get_unscaled_state(main, name), main) for name in scaled & state.keys()}
        found["state"][optimizer._param_name(main)] = {**state, **wide}
    return found


def gradients_to_unscale(original: Callable[..., Any], optimizer: Any) -> list[torch.Tensor]:
    """The gradients that fp16 unscales. The adapter has dropped those of empty shards if the optimizer is fused."""
    if not _updates_ours(optimizer):
        found: list[torch.Tensor] = original(optimizer)
        return found
    name = "decoupled_grad" if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    params = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    grads = [grad.data for param in params if (grad := getattr(param, name)) is not None]
    # torch's kernel takes no empty list.
    return grads or [torch.zeros_like(optimizer.found_inf)]


def initialize(original: Callable[..., None], optimizer: Any) -> None:
    """Create state to load into, and leave weights and step counts as they are.

    Megatron-Core takes a step with zero gradients. That decays the weights and counts as a step. If ``--load`` names a
    folder without a checkpoint, as in a run's first start, nothing is loaded over it, and Adam's bias correction would
    begin with the second step.
    """
    if not _updates_ours(optimizer):
        original(optimizer)
        return
    inner = optimizer.optimizer
    rates = [group["lr"] for group in inner.param_groups]
    counts = [(counter, counter["step"] * 1) for counter in _step_counters(inner)]
    for group in inner.param_groups:
        group["lr"] = 0.0
    # Such an optimizer reads decoupled_grad, which Megatron-Core does not set here.
    decoupled = _local_parameters(inner) if getattr(inner, "use_decoupled_grad", False) else []
    for parameter in decoupled:
        parameter.decoupled_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    original(optimizer)
    for parameter in decoupled:
        parameter.decoupled_grad = None  # type: ignore[attr-defined]
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    for counter in _step_counters(inner):
        counter["step"] = counter["step"] * 0
    for counter, count in counts:
        counter["step"] = count


def _local_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters of which this rank has a shard that is not empty."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in found if local_shard(parameter).numel()]


def _step_counters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The dicts in which an optimizer counts steps: PyTorch's per parameter, fused optimizers' per group."""
    return [counter for counter in (*optimizer.param_groups, *optimizer.state.values()) if "step" in counter]
