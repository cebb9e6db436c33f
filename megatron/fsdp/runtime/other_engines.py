"""Raises an error if another data-parallel engine has wrapped a model that is to be sharded.

Two engines on one model would reduce gradients twice. Another engine around a sharded model fails at its parameters.
"""

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY

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
