"""Loading a state dict of whole or sharded tensors into a sharded model."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.dtensor.placements import local_slice
from megatron.fsdp.dtensor.ragged_dtensor import is_sharded, local_shard, reduced, same_layout
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.runtime.partition import public_name


def check_shape(param: ShardedParameter, value: torch.Tensor, key: str) -> None:
    """Raise ValueError if ``value``, which messages call ``key``, has another shape than the parameter."""
    if value.shape != param.main.shape:
        raise ValueError(f"{key}: expected shape {tuple(param.main.shape)}; got {tuple(value.shape)}.")


def own_shard(param: ShardedParameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter's value, in the shape of its main weight's local tensor.

    Args:
        param: The parameter.
        value: The whole tensor on any device, or a DTensor. One that is sharded in another way than the parameter is
            gathered: all ranks must call this then.
    """
    main: DTensor = param.main  # type: ignore[assignment]  # a Parameter that is a DTensor
    if is_sharded(value) and same_layout(value, main):
        return local_shard(value)
    return local_slice(main._spec).take_from(reduced(value))


def copy_shard(param: ShardedParameter, part: torch.Tensor) -> None:
    """Make ``part`` the value of this rank's part of a parameter."""
    local = local_shard(param.main)
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


def with_prefix(state_dict: Mapping[str, Any], prefix: str, params: Iterable[ShardedParameter]) -> dict[str, Any]:
    """The state dict by names that begin with ``prefix``, of one by these or by those of the model itself.

    ``torch.distributed.checkpoint.state_dict.set_model_state_dict`` gives both: the values that are to be loaded by the
    model's names, and the present weights by the wrapper's.

    Raises:
        ValueError: There is a value by either name, and neither is the present weight.
    """
    result = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    present = {prefix + name: local_shard(param.main) for param in params for name in param.names}
    for key, value in state_dict.items():
        other = result.get(prefix + key)
        if key in result:
            continue
        if isinstance(other, DTensor) and local_shard(other).data_ptr() != present[prefix + key].data_ptr():
            raise ValueError(f"load_state_dict: both {key} and {prefix + key} are given; expected one of them.")
        result[prefix + key] = value
    return result


def hook_state_dict(engine: Engine, modules: Iterable[nn.Module]) -> None:
    """Make ``state_dict`` of the modules contain main weights, and compute weights follow what is loaded into them."""

    def show_main(*unused: Any) -> None:
        if (engine := reference()) is not None:
            engine.show_main()

    def invalidate(*unused: Any) -> None:
        if (engine := reference()) is not None:
            engine.invalidate_weights()

    reference = weakref.ref(engine)
    for module in modules:
        module.register_state_dict_pre_hook(show_main)
        module.register_load_state_dict_post_hook(invalidate)


@torch.no_grad()
def load(engine: Engine, module: nn.Module, prefix: str, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load main weights and buffers; compute weights follow.

    Args:
        engine: The engine of the model.
        module: Has the buffers, by the names that ``state_dict`` uses.
        prefix: Stands before the names of parameters in ``state_dict``.
        state_dict: Whole tensors or DTensors.
        strict: Every parameter and buffer must be present, and nothing else.
    """
    names = {id(param): [prefix + name for name in param.names] for param in engine.params()}
    wanted: dict[str, Any] = {name: param for param in engine.params() for name in names[id(param)]}
    wanted |= unsharded_state(module)
    # A tied parameter whose value is given under one of its names needs no other.
    tied = {name for names_ in names.values() if any(n in state_dict for n in names_) for name in names_}
    keys = match_keys({k: v for k, v in wanted.items() if k in state_dict or k not in tied}, state_dict, strict)
    # Check every shape before any value changes.
    for key in keys:
        if isinstance(wanted[key], ShardedParameter):
            check_shape(wanted[key], state_dict[key], key)
    for key in keys:
        target = wanted[key]
        if isinstance(target, ShardedParameter):
            copy_shard(target, own_shard(target, state_dict[key]))
        elif isinstance(target, nn.Module):
            target.set_extra_state(state_dict[key])
        else:
            target.copy_(state_dict[key])
    engine.invalidate_weights()
    return _IncompatibleKeys([k for k in wanted if k not in keys], [k for k in state_dict if k not in keys])


def refuse_conversion(params: Iterable[ShardedParameter], fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise NotImplementedError if ``fn``, of ``to()`` or ``float()``, would move or convert the parameters."""
    for dtype, device in {(local_shard(e.main).dtype, local_shard(e.main).device): None for e in params}:
        changed = fn(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            raise NotImplementedError(
                f"The model is sharded: its parameters stay {dtype} on {device}, and cannot become {changed.dtype} on "
                f"{changed.device}. Convert or move it before it is sharded; the mixed precision policy sets dtypes."
            )


NO_COPY = (
    "A sharded model cannot be copied. For averaged weights, copy its state: {name: value.clone() for name, value in "
    "model.state_dict().items()}. For a second model, build and shard one, and load that state into it."
)
NO_PICKLE = (
    "A sharded model cannot be pickled. Save its state: torch.distributed.checkpoint.save, or "
    "torch.save(model.state_dict()) on every rank, which a run with as many ranks can load."
)
