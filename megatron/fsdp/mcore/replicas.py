"""Checks that ranks agree on parameters that they all have, or whose shards they have.

A checkpoint stores a parameter once for all tensor-parallel ranks, unless it is split among them. Whether it is
divided is decided by the layer's class and the parameter's attributes (``topology.divided_dim``). A parameter that is
divided without saying so cannot be noticed when the model is wrapped, because ranks may have equal initial values, or
none yet. It is noticed here, before its values are lost.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.collectives import collectives_of
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import FullyShardedDataParallel, ShardedModule
from megatron.fsdp.runtime.agreement import hash_of
from megatron.fsdp.state.consistency import inconsistent_weights

logger = logging.getLogger(__name__)

# Environment variable: the difference between ranks, relative to a parameter's norm, above which an error is raised.
TOLERANCE = "MEGATRON_FSDP_REPLICA_TOLERANCE"
# Copies drift apart slowly if kernels round differently on different ranks.
_ROUNDING = 1e-4


def check_param_hashes(original: Callable[..., bool], model: list[Any], cross_check: bool = False) -> bool:
    """Check that compute weights are those of the main weights, and equal on data-parallel ranks. A collective.

    It takes the place of Megatron's comparison of parameters, which are different shards here.

    Returns:
        False if some differ; their names are logged.
    """
    ours = [chunk for chunk in model if isinstance(chunk, FullyShardedDataParallel)]
    if not ours:
        return original(model, cross_check)
    stale = [name for chunk in ours for name in inconsistent_weights(chunk.module.engine)]
    if stale:
        logger.error("compute weights differ from main weights, or among ranks: %s", ", ".join(stale))
    return not stale


def check_replicas(chunks: Sequence[ShardedModule], when: str) -> None:
    """Raise an error if tensor-parallel ranks have different values of a parameter that is not split among them.

    A small difference is logged instead. Ranks exchange 8 bytes per parameter, and the values of those that differ.
    A collective of all ranks of the chunks.

    Args:
        chunks: Model chunks whose units are sharded.
        when: When the check is made, for the message, such as "before a checkpoint is saved".

    Raises:
        RuntimeError: Values differ by more than rounding; the message names the parameters.
    """
    allowed = float(os.environ.get(TOLERANCE, _ROUNDING))
    found = [pair for chunk in chunks for expert in (False, True) for pair in _differences(chunk, expert)]
    apart = [f"{name} ({difference:.0e})" for name, difference in found if not difference <= allowed]
    if apart:
        raise RuntimeError(
            f"{when}: tensor-parallel ranks differ in parameters that a checkpoint stores once for all of them: "
            f"{', '.join(apart[:8])}{' and others' if len(apart) > 8 else ''} (differences relative to the norm). If "
            "each rank has its own slice, mark the parameter before the model is wrapped, as Megatron's layers do: "
            "parameter.tensor_model_parallel = True, parameter.partition_dim = the dimension that is split. If all "
            "ranks should have the same values, initialize them equally, and have Megatron sum their gradients "
            f"(parameter.sequence_parallel = True). {TOLERANCE}=X allows a relative difference of X."
        )
    for name, difference in found:
        if difference:
            logger.warning(
                "%s: tensor-parallel ranks differ in %s by %.0e of its norm; the checkpoint has one rank's values.",
                when,
                name,
                difference,
            )


def _differences(chunk: ShardedModule, expert: bool) -> list[tuple[str, float]]:
    """Parameters that differ among tensor-parallel ranks, with their relative difference."""
    index = chunk.index
    apart = index.expt_device_mesh is not None
    group = index.tensor_parallel_mesh(expert).get_group()
    params = [e for e in chunk.engine.params() if e.tensor_parallel is None and (e.key.expert and apart) == expert]
    if group.size() == 1 or not params:
        return []
    hashes = torch.stack([hash_of(local_shard(param.main)) for param in params]).to(chunk.device)
    gathered = hashes.new_empty(group.size() * len(params))
    collectives_of(group, hashes.device).all_gather(gathered, hashes, group)
    differs = (gathered.view(group.size(), -1) != hashes).any(0).int()
    # Data-parallel ranks have other shards of the same parameters: a difference in one of them counts for all.
    axis = (index.experts if expert else index.dense).dp_group
    dist.all_reduce(differs, dist.ReduceOp.MAX, axis)
    return [(e.name, _distance(e, group, axis)) for e, flag in zip(params, differs.tolist(), strict=True) if flag]


def _distance(param: ShardedParameter, group: Any, axis: Any) -> float:
    """The largest distance of a copy from the first rank's, relative to the largest norm of a copy."""
    mine = local_shard(param.main).detach().reshape(-1)
    copies = mine.new_empty(group.size() * mine.numel())
    if mine.numel():
        collectives_of(group, mine.device).all_gather(copies, mine, group)
    rows = copies.view(group.size(), mine.numel()).double()
    squares = torch.stack([(rows - rows[0]).square().sum(1).max(), rows.square().sum(1).max()])
    dist.all_reduce(squares, group=axis)
    difference, norm = squares.sqrt().tolist()
    return difference / norm if norm else math.inf if difference else 0.0
