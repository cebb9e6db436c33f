"""Loading a state dict of whole or sharded tensors into a sharded model."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.parameter_group import ParameterEntry


def load_parameter(entry: ParameterEntry, value: torch.Tensor, key: str) -> None:
    """Copy this rank's part of ``value`` into a parameter's main weights.

    Args:
        entry: The parameter.
        value: The whole tensor, on any device and in any dtype, or a DTensor sharded as the parameter is.
        key: Name of the value, for messages.

    Raises:
        ValueError: The shape differs.
    """
    local = entry.main._local_tensor
    if value.shape != entry.main.shape:
        raise ValueError(f"{key}: expected shape {tuple(entry.main.shape)}; got {tuple(value.shape)}.")
    if isinstance(value, DTensor):
        part = value._local_tensor
        if part.shape != local.shape:
            raise ValueError(f"{key}: expected this rank's part to have shape {tuple(local.shape)}; got {tuple(part.shape)}.")
    else:
        part = value.reshape(-1)[entry.piece.start : entry.piece.stop].view(local.shape)
    # A checkpoint that was loaded in place comes back as the very memory it was loaded into.
    if part.data_ptr() != local.data_ptr() or part.dtype != local.dtype:
        local.copy_(part)


def match_keys(wanted: Mapping[str, object], given: Mapping[str, object], strict: bool) -> list[str]:
    """The keys to load.

    Raises:
        RuntimeError: ``strict``, and keys are missing or unexpected; the message names all of them.
    """
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted and not key.endswith("_extra_state")]
    if strict and (missing or unexpected):
        raise RuntimeError(f"state_dict does not fit the model. Missing: {missing}. Unexpected: {unexpected}.")
    return [key for key in wanted if key in given]
