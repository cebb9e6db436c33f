"""What Megatron's optimizer says about gradients, where they are sharded: their norm, zeros, and groups."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.fsdp.mcore.adapter import FullyShardedDataParallel, ShardedModule
from megatron.fsdp.mcore.checkpoint_state import Names
from megatron.fsdp.mcore.limits import Settings, check


def counting_once(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``get_megatron_optimizer`` whose optimizers add up over all ranks what each gradient has, and once.

    Megatron-Core adds up squares and zeros over one optimizer instance, or without sharding over tensor- and
    pipeline-parallel ranks. It misses what is sharded over instances or expert-parallel ranks, and counts more than
    once what a strategy leaves whole, and zeros that tensor-parallel ranks share. If asked for, the
    groups of parameters are saved, too. Settings of the optimizer that do not fit are refused here, where a script did
    not parse Megatron's command line.
    """

    @functools.wraps(get_optimizer)
    def get_optimizer_that_counts(config: Any, model_chunks: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        ours = [chunk for chunk in model_chunks if isinstance(chunk, FullyShardedDataParallel)]
        if ours:
            check(Settings(config))
        optimizer = get_optimizer(config, model_chunks, *args, **kwargs)
        if ours:
            mine = {id(main) for chunk in ours for main in _counted_here(chunk.module)}
            parts = getattr(optimizer, "chained_optimizers", [optimizer])
            for part in parts:
                part.grad_stats_parallel_group = dist.group.WORLD
                part._filter_grads_for_norm = functools.partial(_of_mine, part._filter_grads_for_norm, mine)
            optimizer.count_zeros = functools.partial(_count_zeros, parts, ours[0].module.device)
            if kwargs.get("dump_param_to_param_group_map") is not None:
                _dump_groups(parts, ours, kwargs["dump_param_to_param_group_map"])
        return optimizer

    return get_optimizer_that_counts


def _counted_here(model: ShardedModule) -> Iterator[nn.Parameter]:
    """Main weights whose gradients this rank counts, of all that have the same part of them."""
    for group in model.engine.groups:
        axes = zip(group.axes.groups, group.sharding.axes, strict=False)
        if all(placements.shards_optimizer or dist.get_rank(axis) == 0 for axis, placements in axes):
            yield from (param.main for param in group.params)


def _of_mine(filter_grads: Callable[..., Any], mine: set[int], params: list[Any], *args: Any, **kwargs: Any) -> Any:
    return filter_grads([param for param in params if id(param) in mine], *args, **kwargs)


def _dump_groups(parts: list[Any], chunks: list[FullyShardedDataParallel], folder: str) -> None:
    """Save the number of every parameter's group by its name, which Megatron-Core does without FSDP only."""
    groups = [group for part in parts for group in part.param_groups]
    number = {id(parameter): i for i, group in enumerate(groups) for parameter in group["params"]}
    found = {}
    for chunk in chunks:
        names = Names(chunk.module)
        params = [(name, id(param.main)) for name, param in names.params.items()]
        found.update({f"module.{names.untied(name)}": number[main] for name, main in params if main in number})
    dcp.save(found, checkpoint_id=folder)


def _count_zeros(parts: list[Any], device: torch.device) -> int:
    """Zeros in the gradients of all ranks."""
    grads = [grad for part in parts for grad in part._filter_grads_for_norm(part.get_parameters())]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for grad in grads:
        total += grad.numel() - grad.count_nonzero().to(device)
    dist.all_reduce(total)
    return int(total)
