"""Other engines that synchronize a model, before it is sharded or after: recognized, and refused.

Two engines on one model would reduce gradients twice, or gather each other's shards.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook

_UNWRAP = "Give fully_shard the model that it wraps (its .module)."
_COMPOSED = "Leave out torch's {0}; megatron.fsdp.fsdp2.interface.fully_shard takes the same arguments."
# Wrappers by module and name, since importing them takes time, and what to do instead.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _UNWRAP,
    ("torch.nn.parallel.data_parallel", "DataParallel"): _UNWRAP,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): _UNWRAP,
    ("torch.distributed.fsdp", "FSDPModule"): _COMPOSED.format("fully_shard"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): _UNWRAP,
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"): _UNWRAP,
}
_FUNCTIONS = ("fully_shard", "replicate")


def _wrapper(cls: type) -> tuple[str, str] | None:
    """The wrapper that a class is, or inherits from, and what to do instead."""
    if cls.__module__.startswith("megatron.fsdp."):
        return None
    for base in cls.__mro__:
        if (remedy := _WRAPPERS.get((base.__module__, base.__name__))) is not None:
            return f"{cls.__module__}.{cls.__name__}", remedy
    return None


def check_no_other_engine(module: nn.Module) -> None:
    """Raise if another engine has wrapped the model or a part of it.

    Raises:
        ValueError: It has; the message says which, where, and what to do.
    """
    for name, part in module.named_modules():
        found = _wrapper(type(part))
        for function in _FUNCTIONS:
            if found is None and function in (part.__dict__.get(REGISTRY_KEY) or ()):
                found = f"torch's {function}", _COMPOSED.format(function)
        if found is not None:
            where = f"its part {name}" if name else "it"
            raise ValueError(f"The model cannot be sharded: {where} is already synchronized by {found[0]}. {found[1]}")


class _Claim(dict[str, Any]):
    """What torch's composable functions look into, of a module that is sharded here: it refuses ``fully_shard``."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(
                "torch's fully_shard was called on a model that Megatron-FSDP has sharded. Leave it out: its layers "
                "are named by fsdp_unit_modules, or marked by megatron.fsdp.fsdp2.interface.fully_shard."
            )
        return super().__contains__(name)


_watches: list[object] = []


def refuse_others(module: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
    """See to it that wrapping a model that is sharded, or a part of it, raises ValueError.

    Args:
        module: A model that is sharded now.
        is_sharded: Whether a module has parameters of a sharded model. The same function each time.
    """
    for part in module.modules():
        part.__dict__[REGISTRY_KEY] = _Claim(part.__dict__.get(REGISTRY_KEY) or {})

    def refuse(outer: nn.Module, name: str, inner: nn.Module) -> None:
        found = _wrapper(type(outer))
        if found is not None and is_sharded(inner):
            raise ValueError(
                f"{found[0]} is to wrap a model that Megatron-FSDP has sharded, which synchronizes gradients itself. "
                "Use the sharded model as it is."
            )

    if not _watches:
        _watches.append(register_module_module_registration_hook(refuse))
