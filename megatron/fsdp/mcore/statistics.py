"""The norms of gradients and weights and the number of zeros that Megatron reports, for sharded parameters.

Megatron-Core reduces those of gradients over one optimizer instance, or without the distributed optimizer over tensor-
and pipeline-parallel ranks. That misses gradients that are sharded over instances or expert-parallel ranks, and counts
gradients several times that a strategy does not shard. Here every rank counts what no other rank counts, and the sum
is that over all ranks.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel, ShardedModule
from megatron.fsdp.mcore.checkpoint_state import Names
from megatron.fsdp.mcore.limits import Settings, adjust, check


def get_megatron_optimizer(
    original: Callable[..., Any], config: Any, model_chunks: list[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    """Build Megatron's optimizer, and have its statistics summed over all ranks.

    The optimizer's settings are checked and adjusted here for scripts that do not parse Megatron's command line.
    Megatron saves the map of parameters to groups only without FSDP, so it is saved here if it is asked for.
    """
    ours = [chunk for chunk in model_chunks if isinstance(chunk, FullyShardedDataParallel)]
    if not ours:
        return original(config, model_chunks, *args, **kwargs)
    settings = Settings(config, ours[0].ddp_config)
    check(settings)
    adjust(settings)
    optimizer = original(config, model_chunks, *args, **kwargs)
    if not isinstance(optimizer, ChainedOptimizer):
        # As for DDP: norms are reduced by ranks without parameters, too, and only this class skips large ones.
        optimizer = ChainedOptimizer([optimizer])
    optimizer.sharded_chunks = [chunk.module for chunk in ours]
    for part in _parts(optimizer):
        part.grad_stats_parallel_group = dist.group.WORLD
        part.sharded_chunks = optimizer.sharded_chunks
    if kwargs.get("dump_param_to_param_group_map") is not None:
        _dump_groups(_parts(optimizer), ours, kwargs["dump_param_to_param_group_map"])
    return optimizer


def filter_grads_for_norm(
    original: Callable[..., Any], optimizer: Any, params: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Select the gradients that this rank counts."""
    return original(optimizer, _counted(optimizer, params), *args, **kwargs)


def main_grads_for_norm(original: Callable[..., Any], optimizer: Any) -> Any:
    """Select the gradients that this rank counts: Megatron-Core 0.18 has no method that is given parameters."""
    params = _counted(optimizer, optimizer.get_parameters())
    tp_group = getattr(optimizer, "tp_group", None)
    return original(SimpleNamespace(get_parameters=lambda: params, config=optimizer.config, tp_group=tp_group))


def _counted(optimizer: Any, params: list[Any]) -> list[Any]:
    chunks = getattr(optimizer, "sharded_chunks", None)
    if chunks is None:
        return params
    counted = {id(main) for chunk in chunks for main in _counted_here(chunk)}
    return [param for param in params if id(param) in counted]


def count_zeros(original: Callable[..., Any], optimizer: Any) -> Any:
    """Count the zeros in the gradients of all ranks. A collective."""
    chunks = getattr(optimizer, "sharded_chunks", None)
    if chunks is None:
        return original(optimizer)
    total = torch.zeros((), dtype=torch.int64, device=chunks[0].device)
    for grad in (grad for part in _parts(optimizer) for grad in _grads_for_norm(part)):
        total += grad.numel() - grad.count_nonzero().to(total.device)
    dist.all_reduce(total)
    return int(total)


def _grads_for_norm(optimizer: Any) -> list[torch.Tensor]:
    if hasattr(optimizer, "_filter_grads_for_norm"):
        return list(optimizer._filter_grads_for_norm(optimizer.get_parameters()))
    return list(optimizer.get_main_grads_for_grad_norm())


@torch.no_grad()
def params_l2_norm(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the norm of the weights of all ranks, for ``--log-params-norm``. A collective."""
    chunks = model if isinstance(model, list) else [model]
    ours = [chunk for chunk in chunks if isinstance(chunk, FullyShardedDataParallel)]
    if not ours:
        return original(model, *args, **kwargs)
    total = torch.zeros((), device=ours[0].module.device)
    for chunk in ours:
        chunk.stop_communication()
        for main in _counted_here(chunk.module):
            if param_is_not_shared(main) and param_is_not_tensor_parallel_duplicate(main):
                total += torch.linalg.vector_norm(local_shard(main), dtype=torch.float32).square()
    dist.all_reduce(total)
    return total.sqrt().item()


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one consists of: one of dense parameters, and one of experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _counted_here(model: ShardedModule) -> Iterator[nn.Parameter]:
    """Main weights whose gradients this rank counts; ranks with the same shard of a gradient count it once."""
    for group in model.engine.groups:
        axes = zip(group.axes.groups, group.sharding.axes, strict=False)
        if all(placements.shards_optimizer or dist.get_rank(axis) == 0 for axis, placements in axes):
            yield from (param.main for param in group.params)


def _dump_groups(parts: list[Any], chunks: list[FullyShardedDataParallel], folder: str) -> None:
    """Save the number of every parameter's group, by the parameter's name."""
    groups = [group for part in parts for group in part.param_groups]
    number = {id(parameter): i for i, group in enumerate(groups) for parameter in group["params"]}
    found = {}
    for chunk in chunks:
        names = Names(chunk.module)
        params = [(name, id(param.main)) for name, param in names.params.items()]
        found.update({f"module.{names.untied(name)}": number[main] for name, main in params if main in number})
    dcp.save(found, checkpoint_id=folder)
