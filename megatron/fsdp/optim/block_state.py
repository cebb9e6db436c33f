"""State of torchao's low-bit Adam, in which blocks of consecutive elements of a parameter share a scale.

A shard has the state of unsharded training if it consists of whole blocks, and if the full parameter decides whether
its state is quantized at all: torchao leaves the state of small parameters, and of those that are not divided into
whole blocks, in high precision.

State dicts have codes and scales as two DTensors, so that checkpoints load on any number of ranks.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.backends import HOST
from megatron.fsdp.dtensor.placements import RaggedShard
from megatron.fsdp.dtensor.ragged_dtensor import is_sharded, local_shard, make_dtensor, make_like

# torchao leaves the state of parameters with fewer elements in high precision.
_LEAST = 4096
_CODES, _SCALES = ".codes", ".scales"


def is_quantized(optimizer: torch.optim.Optimizer, main: torch.Tensor) -> bool:
    """Whether unsharded training would have quantized state of this parameter."""
    size = _block_size(optimizer)
    return main.numel() >= _LEAST and main.numel() % size == 0


def check_blocks(optimizer: torch.optim.Optimizer, params: Iterable[ShardedParameter]) -> None:
    """Check that no block of the state of these parameters is split between ranks.

    Raises:
        ValueError: One is. The message says how to shard the model.
    """
    size = _block_size(optimizer)
    params = [p for p in params if is_quantized(optimizer, p.main)]
    divided = [p.name for p in params if any(cut % size for cut in _cuts(p))]
    if divided:
        rows = math.lcm(*(size // math.gcd(size, math.prod(p.local_shape[1:])) for p in params))
        raise ValueError(
            f"{type(optimizer).__name__} has one scale for each block of {size} elements of a parameter, and blocks of "
            f"{len(divided)} parameters are split between ranks: {', '.join(divided[:3])}"
            f"{', ...' if len(divided) > 3 else ''}. Shard the model with shard_granularity='block({rows})' "
            "(and without tensor parallelism, which splits parameters as well)."
        )


def initial_state(optimizer: torch.optim.Optimizer, options: dict, main: torch.Tensor) -> dict[str, Any]:
    """The state before the first step."""
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])):
        state[name] = make_like(_zeros(optimizer, main, name), main)
    return state


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make missing state: torchao would decide by the size of a shard, not of the parameter, what to quantize."""
    for options in optimizer.param_groups:
        for main in options["params"]:
            if isinstance(main, DTensor) and main.requires_grad and not optimizer.state.get(main):
                optimizer.state[main] = initial_state(optimizer, options, main)


def split_state(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
    """Put codes and scales in place of quantized state into a state dict, without copying."""
    for number, main in _quantized(optimizer, state_dict):
        state: dict[str, Any] = {}
        for name, value in state_dict["state"][number].items():
            state |= {name: value} if name == "step" else _parts(optimizer, main, name, local_shard(value))
        state_dict["state"][number] = state


def join_state(optimizer: torch.optim.Optimizer, state_dict: dict) -> dict:
    """The inverse of :func:`split_state`.

    Raises:
        ValueError: The state of a parameter is not quantized, or not of this format.
    """
    state_dict = {**state_dict, "state": dict(state_dict["state"])}
    for number, main in _quantized(optimizer, state_dict):
        loaded = state_dict["state"][number]
        state = {"step": loaded["step"]}
        for name in dict.fromkeys(name.removesuffix(_CODES).removesuffix(_SCALES) for name in loaded if name != "step"):
            local = _zeros(optimizer, main, name)
            for part, memory in _parts(optimizer, main, name, local).items():
                value = loaded.get(part)
                if value is None or value.numel() != memory.numel():
                    raise ValueError(
                        f"{type(optimizer).__name__}.load_state_dict: expected {part} with {memory.numel()} elements "
                        f"for parameter {number}, as in state dicts of this class with sharded parameters; got "
                        + (", ".join(loaded) if value is None else f"{value.numel()} elements.")
                    )
                _fill(memory, value)
            state[name] = make_like(local, main)
        state_dict["state"][number] = state
    return state_dict


def _block_size(optimizer: Any) -> Any:
    return optimizer.block_size


def _cuts(param: ShardedParameter) -> list[int]:
    """Where ranks split a parameter, in elements of it; 1, which divides a block, if it is tensor-parallel."""
    spec: Any = param.main._spec  # type: ignore[attr-defined]
    parallel = param.tensor_parallel
    if parallel is not None and not all(placement.is_replicate() for placement in parallel[1]):
        return [1]
    return [cut for placement in spec.placements if isinstance(placement, RaggedShard) for cut in placement.cuts]


def _quantized(optimizer: torch.optim.Optimizer, state_dict: dict) -> list[tuple[Any, torch.Tensor]]:
    """Main weights with quantized state in a state dict, and what stands for them in it: a number or a name."""
    keys = [key for options in state_dict["param_groups"] for key in options["params"]]
    mains = [main for options in optimizer.param_groups for main in options["params"]]
    return [
        (key, main)
        for key, main in zip(keys, mains, strict=False)  # torch reports different lengths
        if isinstance(main, DTensor) and key in state_dict["state"] and is_quantized(optimizer, main)
    ]


def _zeros(optimizer: Any, main: torch.Tensor, name: str) -> torch.Tensor:
    """State of this rank's shard. torchao's classes cannot be empty."""
    local = local_shard(main).detach()
    if not is_quantized(optimizer, main) or not local.numel():
        return torch.zeros_like(local)
    zeros: torch.Tensor = optimizer._subclass_zeros(local, name == "exp_avg", optimizer.block_size)
    return zeros


def _parts(optimizer: Any, main: torch.Tensor, name: str, local: Any) -> dict[str, DTensor]:
    """Codes and scales of a shard's state as flat DTensors that share its memory."""
    block = optimizer._subclass_zeros(main.new_empty(optimizer.block_size, device=HOST), True, optimizer.block_size)
    values_per_byte = optimizer.block_size // block.codes.numel()
    empty = torch.empty(0, device=main.device)
    codes, scales = (local.codes, local.scale) if local.numel() else (empty.to(torch.uint8), empty)
    return {
        name + _CODES: _flat(codes.view(torch.uint8), main, values_per_byte),
        name + _SCALES: _flat(scales, main, optimizer.block_size),
    }


def _flat(local: torch.Tensor, main: Any, each: int) -> DTensor:
    """A DTensor that has one value for every ``each`` elements of a main weight, flattened."""
    placements = [p.scaled(each, 1) if isinstance(p, RaggedShard) else p for p in main._spec.placements]
    return make_dtensor(local.view(-1), main.device_mesh, (main.numel() // each,), placements)


def _fill(memory: DTensor, value: torch.Tensor) -> None:
    """Copy a DTensor, or a full tensor, into this rank's part of it."""
    if is_sharded(memory):
        memory.copy_(value)
    else:
        local_shard(memory).copy_(local_shard(value) if isinstance(value, DTensor) else value)
