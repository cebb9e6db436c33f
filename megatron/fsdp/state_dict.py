"""Loading a state dict of whole or sharded tensors into a sharded model."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.parameter import ParameterEntry
from megatron.fsdp.partition import public_name
from megatron.fsdp.ragged import part_of
from megatron.fsdp.ragged_dtensor import is_sharded, local_part, reduced, same_layout


def check_shape(entry: ParameterEntry, value: torch.Tensor, key: str) -> None:
    """Raise ValueError if ``value``, which messages call ``key``, has another shape than the parameter."""
    if value.shape != entry.main.shape:
        raise ValueError(f"{key}: expected shape {tuple(entry.main.shape)}; got {tuple(value.shape)}.")


def own_part(entry: ParameterEntry, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter's value, in the shape of its main weight's local tensor.

    Args:
        entry: The parameter.
        value: The whole tensor on any device, or a DTensor. One that is sharded in another way than the parameter is
            gathered: all ranks must call this then.
    """
    main: DTensor = entry.main  # type: ignore[assignment]  # a Parameter that is a DTensor
    if is_sharded(value) and same_layout(value, main):
        return local_part(value)
    return part_of(main._spec).of(reduced(value))


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
