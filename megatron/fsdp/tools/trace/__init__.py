"""Timelines of a training step: what each rank computes and communicates, and which communication is exposed.

    from megatron.fsdp.tools.trace import trace_step

    with trace_step(model) as timeline:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
    timeline.print()
    timeline.save("trace.json")

All ranks enter and leave the context together. docs/trace.md explains how to read the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from megatron.fsdp.comm.backends import moves_data
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.tools.trace.clock import SyncPoint, clock_of, offset, synchronize
from megatron.fsdp.tools.trace.recorder import StepRecorder
from megatron.fsdp.tools.trace.spans import Kind, RankTrace, Row, Span, UnitTimes, mark_late_ranks
from megatron.fsdp.tools.trace.timeline import Timeline

__all__ = ["Kind", "RankTrace", "Row", "Span", "Timeline", "UnitTimes", "trace_step"]


@contextmanager
def trace_step(model: nn.Module | Engine, all_ranks: bool = True) -> Iterator[Timeline]:
    """Record everything that runs in the context.

    The ranks synchronize a few times on entry, to compare their clocks. On exit, the first rank collects the recordings
    of all ranks. The context itself does not add communication.

    Args:
        model: A sharded model, a module that contains one, or the engine of one.
        all_ranks: Whether all ranks that the model is sharded over enter the context, so that the first rank collects
            all recordings. If False, every rank that enters it keeps its own recording, and clocks are not compared.

    Yields:
        A timeline that is filled when the context ends. It stays empty if an exception ends the context.

    Raises:
        ValueError: The module does not contain exactly one sharded model.
    """
    engine = _engine_of(model)
    group = engine.index.dense.dp_group
    if not moves_data(group):
        all_ranks = False
    sync_points = synchronize(group, engine.device) if all_ranks else []
    recorder = StepRecorder(engine, clock_of(engine.device))
    timeline = Timeline()
    recorder.start()
    try:
        yield timeline
    finally:
        recorder.stop()
    mine = recorder.trace(dist.get_rank())
    timeline.ranks = _collect(mine, sync_points, group) if all_ranks else [mine]


def _engine_of(model: nn.Module | Engine) -> Engine:
    if isinstance(model, Engine):
        return model
    wrappers = [module.engine for module in model.modules() if isinstance(module, ShardedModel)]
    found = wrappers or engines_of(model.parameters())
    if len(found) != 1:
        raise ValueError(f"trace_step: expected one sharded model; got {len(found)} in {type(model).__name__}.")
    return found[0]


def _collect(mine: RankTrace, sync_points: list[SyncPoint], group: dist.ProcessGroup) -> list[RankTrace]:
    """Gather the recordings of all ranks on the first rank, with times on its clock; other ranks return nothing."""
    first = dist.get_rank(group) == 0
    gathered: list[tuple[RankTrace, list[SyncPoint]]] | None = [(mine, sync_points)] * group.size() if first else None
    dist.gather_object((mine, sync_points), gathered, group=group, group_dst=0)
    if gathered is None:
        return []
    shifted = [trace.shifted(*offset(gathered[0][1], own)) if i else trace for i, (trace, own) in enumerate(gathered)]
    return mark_late_ranks(shifted)
