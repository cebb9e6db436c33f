"""Prepares model and optimizer state for an ``fsdp_dtensor`` checkpoint, without any communication."""

import argparse
import math
import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.layout import Piece
from megatron.fsdp.mcore.adapter import ShardedModule, bare_name
from megatron.fsdp.uneven_dtensor import describe_part, is_sharded, local_part, make_dtensor

# Weights of the first linear layer of an MLP, whose rows are [gate | up] where the activation is gated.
GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.local_experts\.\d+\.|experts\.)?linear_fc1\.(?:weight|bias)\d*$"
)


def preprocess_fsdp_dtensor_state_dict(
    args: argparse.Namespace, raw_state_dict: dict[str, Any], model: ShardedModule
) -> dict[str, Any]:
    """A state dict ready for torch.distributed.checkpoint, for saving or for loading in place.

    Fused gate and up projections become two keys, ``_w`` and ``_v``, so that each can be cut anywhere; every DTensor
    is told which part of the whole this rank holds. Tensors keep their memory.

    Args:
        args: Megatron's arguments.
        raw_state_dict: With ``model`` (by parameter name) and maybe ``optimizer`` (``state`` by parameter name).
        model: The sharded module.
    """
    state_dict = dict(raw_state_dict)
    pieces = {bare_name(name): entry.piece for entry in model.entries() for name in entry.names}
    gated = _gated_layers(model)
    state_dict["model"] = _prepare(
        {k: v for k, v in state_dict["model"].items() if not k.endswith("._extra_state")}, pieces, gated
    )
    if "optimizer" in state_dict:
        optimizer = dict(state_dict["optimizer"])
        optimizer["state"] = _prepare(optimizer["state"], pieces, gated)
        state_dict["optimizer"] = optimizer
    return state_dict


def _gated_layers(model: ShardedModule) -> list[str]:
    """Names of the modules whose MLPs have a gated activation, by their own configs."""
    names = []
    for name, module in model.module.named_modules():
        if getattr(getattr(module, "config", None), "gated_linear_unit", False):
            names.append(bare_name(f"{name}."))
    return names


def _prepare(tensors: dict[str, Any], pieces: dict[str, Piece], gated: list[str]) -> dict[str, Any]:
    """Describe each parameter's tensors and split fused ones. A value is a tensor, or a dict of an optimizer's."""
    prepared: dict[str, Any] = {}
    for key, value in tensors.items():
        name = bare_name(key)
        piece = pieces.get(name)
        if piece is None:
            prepared[key] = value
        elif GATED.search(name) and any(name.startswith(prefix) for prefix in gated):
            prepared[f"{key}_w"] = _on_tensors(value, piece, 0)
            prepared[f"{key}_v"] = _on_tensors(value, piece, 1)
        else:
            prepared[key] = _on_tensors(value, piece, None)
    return prepared


def _on_tensors(value: Any, piece: Piece, half: int | None) -> Any:
    if isinstance(value, dict):
        return {k: _on_tensors(v, piece, half) for k, v in value.items()}
    if not isinstance(value, DTensor):
        return value
    if half is not None:
        return _half(value, piece, half)
    if is_sharded(value):
        describe_part(value, piece.start, piece.stop)
    return value


def _half(tensor: DTensor, piece: Piece, half: int) -> DTensor:
    """The first or second half of a tensor's rows, as a DTensor on the same memory."""
    rows = tensor.shape[0] // 2
    shape = (rows, *tensor.shape[1:])
    numel = math.prod(shape)
    first = half * numel
    # This rank's part of the half, counted within the flattened half.
    start = min(max(piece.start - first, 0), numel)
    stop = min(max(piece.stop - first, start), numel)
    local = local_part(tensor)
    begin = max(first - piece.start, 0)
    part_local: torch.Tensor = local.reshape(-1)[begin : begin + stop - start]
    if piece.whole_rows:
        part_local = part_local.view(-1, *tensor.shape[1:])
    part = make_dtensor(part_local, tensor.device_mesh, shape, tensor.placements)
    if is_sharded(part):
        describe_part(part, start, stop)
    return part
