"""A model of CUDA's caching allocator: addresses, reuse, and bytes.

Memory belongs to the stream that is current when it is allocated. The host frees it while kernels may still use it, and
it may be allocated for the same stream at once: the stream's order makes that safe. If other streams were recorded on
it (``record_stream``), it becomes free when the host finds that these have run their kernels. The model reuses the
lowest free address, so that memory is reused as soon as the rules allow. What is allocated while a graph is captured
comes from a pool of that graph's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulated.checker import Range

_ALIGNMENT = 512
_MOST_STREAMS = 1000


@dataclass(eq=False)
class Block:
    """Allocated memory.

    Attributes:
        stream: The stream whose memory it is.
        pool: 0, or the number of the graph whose memory it is.
        start: Address.
        nbytes: Size.
        recorded: Streams of ``record_stream``.
    """

    stream: int
    pool: int
    start: int
    nbytes: int
    recorded: set[int] = field(default_factory=set)

    @property
    def space(self) -> int:
        """The address space: every stream has one, and another one in each pool."""
        return self.stream + self.pool * _MOST_STREAMS

    @property
    def reserved(self) -> Range:
        """The block's bytes, up to the next address at which another block may lie."""
        return Range(self.space, self.start, self.start + max(-(-self.nbytes // _ALIGNMENT), 1) * _ALIGNMENT)


class _Addresses:
    """The free addresses of one stream, as sorted ranges that do not touch."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = [(0, 1 << 62)]

    def take(self, size: int) -> int:
        number, (start, end) = next((n, r) for n, r in enumerate(self._free) if r[1] - r[0] >= size)
        self._free[number : number + 1] = [(start + size, end)] if start + size < end else []
        return start

    def give_back(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for free in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == free[0]:
                merged[-1] = (merged[-1][0], free[1])
            else:
                merged.append(free)
        self._free = merged


class Allocator:
    """Allocates blocks, and counts bytes in use: those of blocks that are allocated or not reusable yet.

    Args:
        released: Called with a block and its recorded streams when the host has found that these have ended.

    Attributes:
        allocated: Bytes that are allocated.
        active: Bytes in use.
        peak: The most bytes in use so far. Settable.
    """

    def __init__(self, released: Callable[[Block], None]) -> None:
        self.allocated = 0
        self.active = 0
        self.peak = 0
        self._released = released
        self._addresses: dict[int, _Addresses] = {}
        self._waiting: list[tuple[float, Block]] = []

    def allocate(self, stream: int, nbytes: int, now: float, pool: int = 0) -> Block:
        """Allocate memory for a stream. The host finds out which streams have ended whenever it allocates."""
        ended = [block for end, block in self._waiting if end <= now]
        self._waiting = [(end, block) for end, block in self._waiting if end > now]
        for block in ended:
            self._released(block)
            self._reuse(block)
        block = Block(stream, pool, 0, nbytes)
        memory = block.reserved
        block.start = self._addresses.setdefault(block.space, _Addresses()).take(memory.end - memory.start)
        self.allocated += nbytes
        self.active += nbytes
        self.peak = max(self.peak, self.active)
        return block

    def free(self, block: Block, end: float) -> None:
        """Free a block.

        Args:
            block: A block.
            end: When the recorded streams have run the kernels that they have now.
        """
        self.allocated -= block.nbytes
        if block.recorded - {block.stream}:
            self._waiting.append((end, block))
        else:
            self._reuse(block)

    def _reuse(self, block: Block) -> None:
        self.active -= block.nbytes
        memory = block.reserved
        self._addresses[block.space].give_back(memory.start, memory.end)
