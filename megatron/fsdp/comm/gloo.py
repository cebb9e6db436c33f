"""All-gather and reduce-scatter over gloo, made of sends between every two ranks, and a safe end of gloo's own.

gloo's reduce-scatter sends as many bytes as its all-reduce, which is twice what it needs, and its all-gather passes
every shard on from rank to rank in small pieces. Here every rank sends each other rank exactly the slice that it needs,
without a copy: (N - 1) / N of the buffer in all. On one machine that takes about half of gloo's time. NCCL's own
collectives are better on its networks.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of
from megatron.fsdp.comm.process_groups import refuse_forks

# gloo's threads need microseconds. More only passes if another thread takes a reference meanwhile.
SECONDS_TO_RELEASE = 0.5


@contextmanager
def ensure_released(group: dist.ProcessGroup, *tensors: torch.Tensor) -> Iterator[None]:
    """Context for a collective of ``group``: on return, no thread of gloo's holds a reference to the tensors.

    A thread of gloo's that holds the last reference needs Python to free the tensor. At the end of a script, Python may
    have ended by then, and the process aborts. Other backends may hold tensors until a device has computed, which the
    host must not wait for.

    Raises:
        RuntimeError: This process was forked from a rank.
    """
    refuse_forks()
    if not backend_of(group, tensors[0].device).holds_tensors:
        yield
        return
    before = [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]
    yield
    end = time.monotonic() + SECONDS_TO_RELEASE
    while any(t._use_count() > count for t, count in zip(tensors, before, strict=True)):  # type: ignore[attr-defined]
        if time.monotonic() > end:
            return
        time.sleep(0)


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather flat shards in rank order into ``flat``; ``shard`` may be this rank's slice of it."""
    rank, size = group.rank(), group.size()
    slices = _slices(flat, size)
    if slices[rank].data_ptr() != shard.data_ptr():
        slices[rank].copy_(shard)
    works = []
    tag = _tag(slices[rank], 0)
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        works.append(dist.irecv(slices[source], group=group, group_src=source, tag=tag))
        works.append(dist.isend(slices[rank], group=group, group_dst=target, tag=tag))
    _wait(works)


def reduce_scatter(
    shard: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Sum ``flat`` over the group into ``shard``, which may be this rank's slice of it.

    Slices are sent in the dtype of ``flat`` and summed in that of ``shard``, which may be wider. They arrive two at a
    time: while one is added, the next is on its way.
    """
    assert op == dist.ReduceOp.SUM, "no setting asks gloo for anything else"
    rank, size = group.rank(), group.size()
    slices = _slices(flat, size)
    if slices[rank].data_ptr() != shard.data_ptr():
        shard.copy_(slices[rank])
    sources = [(rank - step) % size for step in range(1, size)]
    targets = [(rank + step) % size for step in range(1, size)]
    tag = _tag(slices[rank], 1)
    arriving: list[tuple[torch.Tensor, dist.Work | None]] = []
    for source in sources[:2]:
        memory = torch.empty_like(slices[source])
        arriving.append((memory, dist.irecv(memory, group=group, group_src=source, tag=tag)))
    # After the receives: a pair of ranks has one connection, on which the other is told that it may send.
    sent = [dist.isend(slices[target], group=group, group_dst=target, tag=tag) for target in targets]
    remaining = iter(sources[2:])
    while arriving:
        memory, work = arriving.pop(0)
        _wait([work])
        shard.add_(memory)
        for source in itertools.islice(remaining, 1):
            arriving.append((memory, dist.irecv(memory, group=group, group_src=source, tag=tag)))
    _wait(sent)


def _slices(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    numel = flat.numel() // size
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(size)]


def _tag(sent: torch.Tensor, kind: int) -> int:
    """A number that only messages of the same collective and size have.

    Ranks that issue different collectives wait for each other, which is reported. If the messages matched, gloo would
    end the process because their sizes differ.
    """
    return (2 * sent.nbytes + kind) % (1 << 30)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
