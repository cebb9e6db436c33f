"""Meshes, and helpers that scripts import from here."""

import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.api.megatron_fsdp import MegatronFSDP

__all__ = [
    "FSDPDistributedIndex",
    "contains_submesh",
    "find_megatron_fsdp",
    "get_mesh_names",
    "is_submodule",
    "is_torch_min_version",
    "log_single_rank",
    "safe_get_rank",
    "using_tensor_parallel",
]

_MISSING = {
    "GlobalMemoryBuffer": "communication buffers belong to each model, not to the process",
    "get_global_memory_buffer": "communication buffers belong to each model, not to the process",
    "create_updated_function_signature": "the optimizer's methods are hooked, not replaced",
    "get_cuda_rng_tracker": "use megatron.core.tensor_parallel.get_cuda_rng_tracker",
    "initialize_rng_tracker": "use megatron.core.tensor_parallel.random.initialize_rng_tracker",
    "get_mcore_tensor_parallel_partition_dim": "use megatron.fsdp.mcore.topology.divided_dim",
    "is_mcore_tensor_model_parallel": "use megatron.fsdp.mcore.topology.divided_dim",
    "is_mcore_tensor_parallel_duplicated": "use megatron.fsdp.mcore.topology.divided_dim",
    "get_te_version": "use megatron.core.utils.get_te_version",
    "is_te_min_version": "use megatron.core.utils.is_te_min_version",
}


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Names of a mesh's dimensions, then of its flattened ones.

    Args:
        device_mesh: The mesh; None has no names.
        only_submesh_dims: Leave out flattened dimensions.
    """
    if device_mesh is None:
        return []
    flattened = {} if only_submesh_dims else getattr(device_mesh._get_root_mesh(), "_flatten_mapping", {})
    return [*(device_mesh.mesh_dim_names or ()), *flattened]


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Whether a mesh has all the named dimensions, which may be flattened ones."""
    if device_mesh is None or submesh_names is None:
        return False
    names = [submesh_names] if isinstance(submesh_names, str) else submesh_names
    return set(names) <= set(get_mesh_names(device_mesh))


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Whether the tensor-parallel dimension has more than one rank."""
    return dist_index.get_submesh(str(dist_index.tp_dim), is_expert_parallel).size() > 1


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """Whether a module is inside another; with ``strict``, a module is not inside itself."""
    return any(m is module for m in parent_module.modules()) and not (strict and module is parent_module)


def find_megatron_fsdp(model: nn.Module | None) -> MegatronFSDP | None:
    """The sharded model in a chain of wrappers, each of which has the next one as ``module``; None without any."""
    while model is not None and not isinstance(model, MegatronFSDP):
        model = getattr(model, "module", None)
    return model


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch is at least of this version; without ``check_equality``, whether it is later."""
    return torch.__version__ >= version if check_equality else torch.__version__ > version


def safe_get_rank() -> int:
    """This process's rank; before torch.distributed is initialized, the environment's, or 0."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def log_single_rank(logger_: logging.Logger, level: int, msg: str, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank only."""
    if safe_get_rank() == rank:
        logger_.log(level, msg, *args, **kwargs)


def __getattr__(name: str) -> NoReturn:
    if name in _MISSING:
        # An ImportError, so that "from megatron_fsdp.utils import ..." shows the reason.
        raise ImportError(f"megatron_fsdp.utils.{name} does not exist here: {_MISSING[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
