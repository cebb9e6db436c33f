"""Computes on full matrices whose shards lie on several ranks, such as the orthogonalization of Muon's updates.

Every matrix has an owner among the ranks that share it. The owner receives all shards, computes, and sends the shards
of the result back. This is done in rounds of limited size: in each round every owner takes a few of its matrices, and
while they are computed, those of the next round arrive and those of the last round leave.

Sharding full matrices (``shard_granularity="tensor"``) would need no exchange. It was rejected: a unit on many ranks
would be padded to its largest matrix times the number of ranks.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import runs_ahead
from megatron.fsdp.comm.collectives import all_to_all
from megatron.fsdp.comm.streams import Handle, Stream
from megatron.fsdp.dtensor.placements import RaggedShard
from megatron.fsdp.sharding.layout import Layout

# Elements of the matrices that an owner receives in a round, if its largest matrix is not larger.
ROUND = 1 << 24

Read = Callable[[int, torch.Tensor], None]
Compute = Callable[[int, torch.Tensor], torch.Tensor]


class Matrix(NamedTuple):
    """A matrix of which every rank has a range of the elements.

    Attributes:
        shape: Its shape.
        placement: The ranges.
    """

    shape: tuple[int, ...]
    placement: RaggedShard

    @staticmethod
    def of(layout: Layout, index: int) -> "Matrix":
        """Parameter ``index`` of a flat buffer."""
        return Matrix(layout.slots[index].shape, RaggedShard.of(layout, index))


def assign_owners(work: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: from the most work to the least, the rank with the least work so far.

    No rank has more than the mean plus the work of one matrix. If there are fewer matrices than ranks, each has an
    owner of its own, so the largest takes as long as it takes.

    Args:
        work: The work of each matrix, in any unit.
        ranks: Number of ranks.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(work)
    for i in _from_most_work(work):
        load, owners[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[i], owners[i]))
    return owners


def plan_rounds(work: Sequence[float], sizes: Sequence[int], ranks: int, limit: int) -> list[list[list[int]]]:
    """The matrices that each rank computes in each round: ``[round][owner][...]``.

    Args:
        work: The work of each matrix.
        sizes: Number of elements of each matrix.
        ranks: Number of ranks.
        limit: Number of elements that an owner receives in a round, unless one matrix has more.
    """
    owners = assign_owners(work, ranks)
    rounds: list[list[list[int]]] = []
    # For each rank, the round of its latest matrix, and the number of elements that it receives in that round.
    number, filled = [-1] * ranks, [0] * ranks
    for i in _from_most_work(work):
        owner = owners[i]
        if number[owner] < 0 or filled[owner] + sizes[i] > limit:
            number[owner], filled[owner] = number[owner] + 1, 0
        if number[owner] == len(rounds):
            rounds.append([[] for _ in range(ranks)])
        rounds[number[owner]][owner].append(i)
        filled[owner] += sizes[i]
    return rounds


def _from_most_work(work: Sequence[float]) -> list[int]:
    return sorted(range(len(work)), key=lambda i: (-work[i], i))


class MatrixExchange:
    """Applies a function to full matrices, each on its owner. Every rank of the group needs one, with equal arguments.

    Six buffers of about a round's size are allocated meanwhile: three rounds are in flight, and in each of them a rank
    has the matrices that it owns and its shards of all.

    Args:
        matrices: The matrices.
        work: The work of each matrix, in any unit.
        group: The ranks that share them.
        shards: Index of each rank's shard in the placements, by rank of the group.
        stream: Runs the communication.
        device: Where the matrices are computed.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        work: Sequence[float],
        group: dist.ProcessGroup,
        shards: Sequence[int],
        stream: Stream,
        device: torch.device,
    ) -> None:
        self._matrices, self._shards = matrices, shards
        # Ranks in the order of their ranges of a matrix.
        self._order = sorted(range(group.size()), key=shards.__getitem__)
        self._stream, self._group, self._device = stream, stream.group(group), device
        sizes = [placement.cuts[-1] for _, placement in matrices]
        self._rounds = plan_rounds(work, sizes, group.size(), limit=max([ROUND, *sizes]))

    @torch.no_grad()
    def map(self, read: Read, compute: Compute, write: Read) -> None:
        """Compute every matrix. A collective of the group.

        Args:
            read: Called with the index of a matrix and a flat fp32 tensor: copies this rank's shard into it.
            compute: Called on the owner with the index and the full matrix: returns the result, of the same shape.
            write: Called with the index and a flat fp32 tensor, which is this rank's shard of the result.
        """
        try:
            self._exchange(read, compute, write)
        except BaseException:
            if runs_ahead(self._device):
                self._stream.join()  # memory that exchanges use is freed while the exception propagates
            raise

    def _exchange(self, read: Read, compute: Compute, write: Read) -> None:
        """Gather the next round's matrices, and send back the last one's, while a round computes."""
        arriving = self._gather(0, read) if self._rounds else None
        leaving: _Round | None = None
        for number in range(len(self._rounds)):
            current, arriving = arriving, None
            if number + 1 < len(self._rounds):
                arriving = self._gather(number + 1, read)
            assert current is not None
            current.wait()
            for i, slices in current.owned:
                result = compute(i, torch.cat(slices).view(self._matrices[i].shape))
                for part, of_rank in zip(slices, result.reshape(-1).split([s.numel() for s in slices]), strict=True):
                    part.copy_(of_rank)
            current.send_back(self._stream)
            if leaving is not None:
                leaving.finish(write)
            leaving = current
        if leaving is not None:
            leaving.finish(write)

    def _gather(self, number: int, read: Read) -> "_Round":
        """Start to send the shards of a round's matrices to their owners."""
        of_owner, rank = self._rounds[number], self._group.rank()
        shared = [(i, self._numel(i, rank)) for matrices in of_owner for i in matrices]
        sent = [sum(self._numel(i, rank) for i in matrices) for matrices in of_owner]
        lengths = [[self._numel(i, source) for i in of_owner[rank]] for source in range(self._group.size())]
        received = [sum(of_source) for of_source in lengths]
        mine = torch.empty(sum(sent), dtype=torch.float32, device=self._device)
        theirs = torch.empty(sum(received), dtype=torch.float32, device=self._device)
        parts = theirs.split([numel for of_source in lengths for numel in of_source])
        count = len(of_owner[rank])
        owned = [(i, [parts[n + count * source] for source in self._order]) for n, i in enumerate(of_owner[rank])]
        shares = list(zip([i for i, _ in shared], mine.split([numel for _, numel in shared]), strict=True))
        for i, share in shares:
            read(i, share)
        gathered = self._stream.run(functools.partial(all_to_all, theirs, mine, received, sent, self._group))
        back = functools.partial(all_to_all, mine, theirs, sent, received, self._group)
        return _Round(shares, owned, gathered, back)

    def _numel(self, i: int, rank: int) -> int:
        begin, end = self._matrices[i].placement.bounds(self._shards[rank])
        return end - begin


class _Round:
    """A round in flight.

    Its buffers belong to compute. They may be dropped once compute has waited for the last task that uses them, which
    is that of :meth:`send_back`.

    Args:
        shares: This rank's shards of all matrices of the round.
        owned: For each matrix that this rank owns: its index, and its shards, in the order of the matrix's elements.
        handle: The task that gathers the matrices.
        back: The task that returns them.
    """

    def __init__(
        self,
        shares: list[tuple[int, torch.Tensor]],
        owned: list[tuple[int, list[torch.Tensor]]],
        handle: Handle,
        back: Callable[[], None],
    ) -> None:
        self.owned = owned
        self._shares, self._handle, self._back = shares, handle, back

    def wait(self) -> None:
        """Make compute wait for the matrices."""
        self._handle.wait()

    def send_back(self, stream: Stream) -> None:
        """Start to return the results, which are in the place of the matrices."""
        self._handle = stream.run(self._back)

    def finish(self, write: Read) -> None:
        """Hand the shards of the results to ``write``."""
        self._handle.wait()
        for i, share in self._shares:
            write(i, share)
