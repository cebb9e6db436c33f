"""Loading a state dict of whole or sharded tensors into a sharded model."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.parameter import ParameterEntry
from megatron.fsdp.partition import public_name
from megatron.fsdp.uneven_dtensor import is_sharded, local_part


def own_part(entry: ParameterEntry, value: torch.Tensor, key: str) -> torch.Tensor:
    """This rank's part of a parameter's value, without copying it.

    Args:
        entry: The parameter.
        value: The whole tensor, on any device and in any dtype, or a DTensor sharded as the parameter is.
        key: Name of the value, for messages.

    Raises:
        ValueError: The shape differs.
    """
    local = local_part(entry.main)
    if value.shape != entry.main.shape:
        raise ValueError(f"{key}: expected shape {tuple(entry.main.shape)}; got {tuple(value.shape)}.")
    if not is_sharded(value):
        value = local_part(value) if isinstance(value, DTensor) else value
        if entry.tensor_parallel is not None:
            begin, size = entry.offset, entry.local_shape
            value = value[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        return value.reshape(-1)[entry.piece.start : entry.piece.stop].view(local.shape)
    part = local_part(value)
    if part.shape != local.shape:
        raise ValueError(f"{key}: expected a part of shape {tuple(local.shape)} on this rank; got {tuple(part.shape)}.")
    return part


def copy_part(entry: ParameterEntry, part: torch.Tensor) -> None:
    """Make ``part`` the value of this rank's part of a parameter."""
    local = local_part(entry.main)
    # A checkpoint that was loaded in place comes back as the very memory it was loaded into.
    if part.data_ptr() != local.data_ptr() or part.dtype != local.dtype:
        local.copy_(part)


def unsharded_state(module: nn.Module) -> dict[str, torch.Tensor | nn.Module]:
    """What a module's state dict has besides parameters, by name: buffers, and modules that keep extra state."""
    state: dict[str, torch.Tensor | nn.Module] = {}
    for path, part in module.named_modules():
        prefix = public_name(f"{path}." if path else "")
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                state[prefix + name] = buffer
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            state[f"{prefix}_extra_state"] = part
    return state


def match_keys(wanted: Mapping[str, object], given: Mapping[str, object], strict: bool) -> list[str]:
    """The keys to load.

    Raises:
        RuntimeError: ``strict``, and keys are missing or unexpected; the message names all of them.
    """
    # What layers keep beside their tensors comes and goes with versions and settings of theirs.
    missing = [key for key in wanted if key not in given and not key.endswith("_extra_state")]
    unexpected = [key for key in given if key not in wanted and not key.endswith("_extra_state")]
    if strict and (missing or unexpected):
        raise RuntimeError(f"state_dict does not fit the model. Missing: {missing}. Unexpected: {unexpected}.")
    return [key for key in wanted if key in given]
