"""Saves ``fsdp_dtensor`` checkpoints for Megatron's training loop."""

from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp

from megatron.core import parallel_state
from megatron.fsdp.checkpoint.backend import Planner, Writer, save_with
from megatron.fsdp.mcore.checkpoint_state import CheckpointState, preprocess_fsdp_dtensor_state_dict
from megatron.fsdp.mcore.replicas import check_replicas


def generate_state_dict(original: Callable[..., Any], args: Any, model: list[Any], *rest: Any, **kwargs: Any) -> Any:
    """Collect a checkpoint's state, and remember the model chunks that it belongs to.

    Megatron passes only the first chunk to :func:`preprocess`, which needs all of them.
    """
    state = original(args, model, *rest, **kwargs)
    if args.ckpt_format != "fsdp_dtensor":
        return state
    loading = bool((kwargs.get("optim_sd_kwargs") or {}).get("is_loading"))
    found = CheckpointState(state, list(model), loading=loading)
    if "optimizer" in found:
        found.add_scalers(rest[0] if rest else kwargs["optimizer"])
    return found


def preprocess(original: Any, args: Any, raw_state_dict: dict[str, Any], model: Any) -> CheckpointState:
    """Prepare a state dict for saving or loading; before saving, check that tensor-parallel ranks agree."""
    if not isinstance(raw_state_dict, CheckpointState):
        return preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model)
    chunks, saving = raw_state_dict.chunks, not raw_state_dict.loading
    if saving:
        check_replicas(chunks, "before a checkpoint is saved")
    return preprocess_fsdp_dtensor_state_dict(args, raw_state_dict, model, chunks, saving)


def saves_objects() -> bool:
    """Whether this rank saves what is not a tensor: one rank of each data-parallel group does."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        or parallel_state.get_expert_data_parallel_rank() == 0
    )


def save(state_dict: dict[str, Any], *, storage_writer: Any = None, **options: Any) -> Any:
    """Save as ``torch.distributed.checkpoint.save`` does, with our planner and our writer's error handling."""
    planner = Planner(saves_objects()) if isinstance(state_dict, CheckpointState) else None
    options = {"planner": planner, **options}
    if isinstance(storage_writer, Writer):
        return save_with(storage_writer, state_dict, **options)
    return dcp.save(state_dict, storage_writer=storage_writer, **options)
