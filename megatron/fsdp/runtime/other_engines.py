"""Raises an error if another data-parallel engine wraps a model before or after it is sharded.

Two engines on one model would reduce gradients twice, or gather each other's shards.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook

_UNWRAP = "Give fully_shard the model that it wraps (its .module)."
_COMPOSED = "Leave out torch's {0}; megatron.fsdp.fsdp2.fully_shard takes the same arguments."
# Wrapper classes by module and name, because importing them takes time, and the remedy for each.
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
    """The full name of a class if it is or inherits from a known wrapper, and the remedy; else None."""
    if cls.__module__.startswith("megatron.fsdp."):
        return None
    for base in cls.__mro__:
        if (remedy := _WRAPPERS.get((base.__module__, base.__name__))) is not None:
            return f"{cls.__module__}.{cls.__name__}", remedy
    return None


def check_no_other_engine(module: nn.Module) -> None:
    """Check that no other engine has wrapped the model or one of its modules.

    Raises:
        ValueError: One has. The message names the engine and the module, and suggests a remedy.
    """
    for name, part in module.named_modules():
        found = _wrapper(type(part))
        for function in _FUNCTIONS:
            if found is None and function in (part.__dict__.get(REGISTRY_KEY) or ()):
                found = f"torch's {function}", _COMPOSED.format(function)
        if found is not None:
            where = f"its module {name}" if name else "it"
            raise ValueError(f"The model cannot be sharded: {where} is already synchronized by {found[0]}. {found[1]}")


class _GuardedRegistry(dict[str, Any]):
    """The registry of torch's composable functions in a sharded module. It raises an error for ``fully_shard``.

    torch stores the registry in the module's ``__dict__`` under a private key, and looks a function up in it before
    applying it.
    """

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(
                "torch's fully_shard was called on a model that Megatron-FSDP has sharded. Leave it out. Units are set "
                "by fsdp_unit_modules, or by megatron.fsdp.fsdp2.fully_shard."
            )
        return super().__contains__(name)


_hooks: list[object] = []


def reject_other_engines(module: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
    """Raise ValueError from now on if another engine wraps a sharded model or one of its modules.

    Args:
        module: The model that has just been sharded.
        is_sharded: Returns whether a module has parameters of a sharded model. It must be the same in every call.
    """
    for part in module.modules():
        part.__dict__[REGISTRY_KEY] = _GuardedRegistry(part.__dict__.get(REGISTRY_KEY) or {})

    def check(outer: nn.Module, name: str, inner: nn.Module) -> None:
        found = _wrapper(type(outer))
        if found is not None and is_sharded(inner):
            raise ValueError(
                f"{found[0]} cannot wrap a model that Megatron-FSDP has sharded, which synchronizes gradients already. "
                "Use the sharded model directly."
            )

    if not _hooks:
        _hooks.append(register_module_module_registration_hook(check))
