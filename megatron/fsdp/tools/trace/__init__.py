"""Timelines of a training step: what each rank computes and communicates, and what the computation has to wait for.

    from megatron.fsdp.tools.trace import trace_step

    with trace_step(model) as timeline:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
    timeline.print()
    timeline.save("trace.json")
    timeline.plot("trace.png")

All ranks enter and leave the context together. docs/trace.md says what there is to see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from megatron.fsdp.module import MegatronFSDP
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.tools.trace.clock import Meeting, clock_of, meet, offset
from megatron.fsdp.tools.trace.recorder import Recorder
from megatron.fsdp.tools.trace.timeline import Kind, RankTrace, Row, Span, Timeline, UnitTimes, note_latecomers

__all__ = ["Kind", "RankTrace", "Row", "Span", "Timeline", "UnitTimes", "trace_step"]


@contextmanager
def trace_step(model: nn.Module | Engine, all_ranks: bool = True) -> Iterator[Timeline]:
    """Record what runs in the context.

    Before it, the ranks meet a few times to compare their clocks; after it, the first of them collects what all have
    recorded. Within it nothing is communicated that would not be otherwise.

    Args:
        model: A sharded model, a module that has one inside, or the engine of one.
        all_ranks: All ranks that the model is sharded over enter the context, and the first gets every recording. If
            False, each rank that enters it keeps its own, and their clocks are not compared.

    Yields:
        A timeline that is filled when the context ends, and stays empty if an exception ends it.

    Raises:
        ValueError: There is no sharded model, or more than one.
    """
    engine = _engine_of(model)
    group = engine.index.dense.dp_group
    if dist.get_backend(group) == "fake":
        all_ranks = False
    meetings = meet(group, engine.device) if all_ranks else []
    recorder = Recorder(engine, clock_of(engine.device))
    timeline = Timeline()
    recorder.start()
    try:
        yield timeline
    finally:
        recorder.stop()
    mine = recorder.trace(dist.get_rank())
    timeline.ranks = _collect(mine, meetings, group) if all_ranks else [mine]


def _engine_of(model: nn.Module | Engine) -> Engine:
    if isinstance(model, Engine):
        return model
    wrappers = [module.engine for module in model.modules() if isinstance(module, MegatronFSDP)]
    found = wrappers or engines_of(model.parameters())
    if len(found) != 1:
        raise ValueError(f"trace_step: expected one sharded model; got {len(found)} in {type(model).__name__}.")
    return found[0]


def _collect(mine: RankTrace, meetings: list[Meeting], group: dist.ProcessGroup) -> list[RankTrace]:
    """All ranks' recordings on the clock of the first rank, which gets them; others get nothing."""
    first = dist.get_rank(group) == 0
    parts: list[tuple[RankTrace, list[Meeting]]] | None = [(mine, meetings)] * group.size() if first else None
    dist.gather_object((mine, meetings), parts, group=group, group_dst=0)
    if parts is None:
        return []
    moved = [trace.moved(*offset(parts[0][1], met)) if i else trace for i, (trace, met) in enumerate(parts)]
    return note_latecomers(moved)
