"""Whether what tensor-parallel ranks each have all of is equal among them: a checkpoint has it once.

Classes of layers, and attributes of parameters, say what is divided (``topology.divided_dim``). A parameter of which
neither says so may be divided all the same. It cannot be told when the model is wrapped: ranks may begin with equal
values, or with none.
"""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.collectives import all_gather
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.adapter import ShardedModule
from megatron.fsdp.state.consistency import hash_of

logger = logging.getLogger(__name__)

# By how much ranks may differ, relative to a parameter's norm, before that is an error.
TOLERANCE = "MEGATRON_FSDP_REPLICA_TOLERANCE"
# Copies that kernels update with other roundings drift apart slowly.
_ROUNDING = 1e-4


def check_replicas(chunks: Sequence[ShardedModule], when: str) -> None:
    """Raise if tensor-parallel ranks have different values of a parameter that none of them has a part of.

    A small difference is logged instead. Sent are 8 bytes for each parameter, and values only of those that differ.
    All ranks of the chunks must call this.

    Args:
        chunks: Model chunks at rest.
        when: What is about to happen, or has happened, for the message.

    Raises:
        RuntimeError: They differ by more than rounding does; the message names the parameters.
    """
    allowed = float(os.environ.get(TOLERANCE, _ROUNDING))
    found = [pair for chunk in chunks for expert in (False, True) for pair in _differences(chunk, expert)]
    apart = [f"{name} ({difference:.0e})" for name, difference in found if not difference <= allowed]
    if apart:
        raise RuntimeError(
            f"{when}: tensor-parallel ranks differ in parameters of which a checkpoint has one copy for all of them: "
            f"{', '.join(apart[:8])}{' and others' if len(apart) > 8 else ''} (differences relative to the norm). If "
            "each rank has a part of its own, mark the parameter before the model is wrapped, as Megatron's layers do: "
            "parameter.tensor_model_parallel = True, parameter.partition_dim = the dimension that is divided. If all "
            "should have the same, give them equal initial values, and let Megatron add up their gradients "
            f"(parameter.sequence_parallel = True). {TOLERANCE}=X allows a relative difference of X."
        )
    for name, difference in found:
        if difference:
            logger.warning(
                "%s: tensor-parallel ranks differ in %s by %.0e of its norm; a checkpoint has that of one of them.",
                when,
                name,
                difference,
            )


def _differences(chunk: ShardedModule, expert: bool) -> list[tuple[str, float]]:
    """Parameters of which tensor-parallel ranks have different copies, and how far these are apart."""
    index = chunk.index
    apart = index.expt_device_mesh is not None
    group = index.tensor_parallel_mesh(expert).get_group()
    params = [e for e in chunk.engine.params() if e.tensor_parallel is None and (e.key.expert and apart) == expert]
    if group.size() == 1 or not params:
        return []
    hashes = torch.stack([hash_of(local_shard(param.main)) for param in params]).to(chunk.device)
    everyone = hashes.new_empty(group.size() * len(params))
    all_gather(everyone, hashes, group)
    differs = (everyone.view(group.size(), -1) != hashes).any(0).int()
    # Ranks of the data-parallel axes have other parts of the same parameters.
    axis = (index.experts if expert else index.dense).dp_group
    dist.all_reduce(differs, dist.ReduceOp.MAX, axis)
    return [(e.name, _distance(e, group, axis)) for e, flag in zip(params, differs.tolist(), strict=True) if flag]


def _distance(param: ShardedParameter, group: Any, axis: Any) -> float:
    """How far copies are from the first rank's, relative to the largest norm of one."""
    mine = local_shard(param.main).detach().reshape(-1)
    copies = mine.new_empty(group.size() * mine.numel())
    if mine.numel():
        all_gather(copies, mine, group)
    rows = copies.view(group.size(), mine.numel()).double()
    squares = torch.stack([(rows - rows[0]).square().sum(1).max(), rows.square().sum(1).max()])
    dist.all_reduce(squares, group=axis)
    difference, norm = squares.sqrt().tolist()
    return difference / norm if norm else math.inf if difference else 0.0
