"""Collectives by the classes that torch's FSDP2 has for them: ``AllGather`` and ``ReduceScatter``.

An object of these allocates the memory that it communicates in (``allocate``), which may be registered with a network,
and is called with it. Shards are copied into that memory and results out of it, as torch does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.collectives import AllGather, ReduceOp, ReduceScatter


def all_gather_by(comm: Any) -> AllGather:
    """Make an all-gather for :class:`megatron.fsdp.comm.collectives.Collectives` of torch's ``AllGather``."""
    _check("set_custom_all_gather", comm)

    def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        memory = comm.allocate((output.numel(),), dtype=output.dtype, device=output.device)
        own = memory.view(group.size(), -1)[group.rank()].copy_(shard)
        _finish(comm(output_tensor=memory, input_tensor=own, group=group, async_op=False))
        output.copy_(memory)

    return all_gather


def reduce_scatter_by(comm: Any) -> ReduceScatter:
    """Make a reduce-scatter for :class:`megatron.fsdp.comm.collectives.Collectives` of torch's ``ReduceScatter``.

    As torch does, it asks for averages where sums cannot overflow. The engine needs sums, so the shard is multiplied.
    """
    _check("set_custom_reduce_scatter", comm)

    def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup) -> None:
        sent, reduced = (
            comm.allocate((numel,), dtype=flat.dtype, device=flat.device) for numel in (flat.numel(), shard.numel())
        )
        sent.copy_(flat)
        averages = op == dist.ReduceOp.SUM and flat.dtype in (torch.float32, torch.bfloat16) and group.size() > 1
        asked = dist.ReduceOp.AVG if averages else op
        _finish(comm(output_tensor=reduced, input_tensor=sent, group=group, op=asked, async_op=False))
        shard.copy_(reduced)
        if averages:
            shard.mul_(group.size())

    return reduce_scatter


def hook_in(stream: torch.cuda.Stream, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Make ``hook`` run in a stream between what the current stream has done and what it does next."""

    def call(flat: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            hook(flat)
        current.wait_stream(stream)

    return call


def _check(method: str, comm: Any) -> None:
    if not callable(comm) or not hasattr(comm, "allocate"):
        raise ValueError(f"{method}: expected an object with allocate() that can be called; got {comm!r}.")


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
