"""Collectives on gloo: gathers and reductions of sends and receives between every two ranks, and a safe end of others.

gloo's reduce-scatter sends as many bytes as its all-reduce, twice what it needs, and its all-gather passes every shard
on from rank to rank in small pieces. Here every rank sends each other rank exactly what that one needs, from where it
lies: (N - 1) / N of the buffer in all. On one machine that takes about half of gloo's time. NCCL has nothing to gain.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import backend_of

# It takes microseconds, unless somebody else comes to hold a tensor meanwhile.
SETTLING_SECONDS = 0.5


@contextmanager
def ensure_released(group: dist.ProcessGroup, *tensors: torch.Tensor) -> Iterator[None]:
    """Context for a collective of ``group``: on return, gloo's threads have let go of the tensors.

    A thread of gloo's that is the last to hold a tensor needs Python to free it. If Python has ended meanwhile, as it
    may at the end of a script, that aborts the process. Other backends may hold tensors until a device has computed,
    and the host must not wait for that.
    """
    if not backend_of(group, tensors[0].device).holds_tensors:
        yield
        return
    before = [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]
    yield
    end = time.monotonic() + SETTLING_SECONDS
    while any(t._use_count() > count for t, count in zip(tensors, before, strict=True)):  # type: ignore[attr-defined]
        if time.monotonic() > end:
            return
        time.sleep(0)


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather flat shards in rank order into ``flat``; ``shard`` may be this rank's part of it."""
    rank, size = group.rank(), group.size()
    parts = _parts(flat, size)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)
    works = []
    tag = _tag(parts[rank], 0)
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        works.append(dist.irecv(parts[source], group=group, group_src=source, tag=tag))
        works.append(dist.isend(parts[rank], group=group, group_dst=target, tag=tag))
    _wait(works)


def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``flat`` over the group into this rank's ``shard``, which may be this rank's part of ``flat``.

    Sums are rounded to the dtype of ``shard``, which may be wider than that of ``flat``, which is what is sent. Shards
    of other ranks arrive two at a time: while one is added, the next is on its way.
    """
    rank, size = group.rank(), group.size()
    parts = _parts(flat, size)
    if parts[rank].data_ptr() != shard.data_ptr():
        shard.copy_(parts[rank])
    sources = [(rank - step) % size for step in range(1, size)]
    targets = [(rank + step) % size for step in range(1, size)]
    tag = _tag(parts[rank], 1)
    sent = [dist.isend(parts[target], group=group, group_dst=target, tag=tag) for target in targets]
    arriving: list[tuple[torch.Tensor, dist.Work | None]] = []
    for source in sources[:2]:
        memory = torch.empty_like(parts[source])
        arriving.append((memory, dist.irecv(memory, group=group, group_src=source, tag=tag)))
    remaining = iter(sources[2:])
    while arriving:
        memory, work = arriving.pop(0)
        _wait([work])
        shard.add_(memory)
        for source in itertools.islice(remaining, 1):
            arriving.append((memory, dist.irecv(memory, group=group, group_src=source, tag=tag)))
    _wait(sent)


def _parts(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    numel = flat.numel() // size
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(size)]


def _tag(part: torch.Tensor, kind: int) -> int:
    """A number for messages: ranks that do different things wait in vain, where gloo would end the process."""
    return (2 * part.nbytes + kind) % (1 << 30)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
