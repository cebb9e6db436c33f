"""Finds accesses to the same bytes that no wait puts in an order, as :mod:`torch.cuda._sanitizer` does for pointers.

torch's checker compares addresses of tensors for equality, so a write to a flat buffer and a read of a view at an
offset are different memory to it. This one compares ranges of bytes. It also remembers accesses when memory is freed:
the next owner's first write must come after them. What happens before what is decided by torch's own class.
"""

import bisect
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

from torch.cuda._sanitizer import StreamSynchronizations

# The program itself: what it does before it launches a kernel happens before that kernel.
HOST = -1
_HOST_EVENT = -1
_FRAMES = 12
_SKIPPED = ("/torch/", "/tests/simulated/", "<frozen", "/contextlib.py", "/_pytest/", "/pluggy/", "/multiprocessing/")


class Range(NamedTuple):
    """Bytes ``start`` to ``end`` of an address space. Every stream allocates from its own."""

    space: int
    start: int
    end: int


class Access(NamedTuple):
    """One kernel's access to memory."""

    stream: int
    number: int
    kernel: str
    writes: bool
    stack: tuple[tuple[CodeType, int], ...]

    def __str__(self) -> str:
        where = "the host" if self.stream == HOST else f"stream {self.stream}"
        stack = "\n    ".join(f"{code.co_filename}:{line} {code.co_name}" for code, line in self.stack)
        return f"{self.kernel} {'writes' if self.writes else 'reads'} on {where}, launched at\n    {stack}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, of which at least one writes, that may happen in either order."""

    memory: Range
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"unordered accesses to {self.memory}:\n  {self.earlier}\n  {self.later}"


@dataclass
class _Piece:
    """Bytes that all kernels so far have accessed together."""

    start: int
    end: int
    write: Access | None = None
    # Of each stream, the latest read since the write: it implies the earlier ones.
    reads: dict[int, Access] = field(default_factory=dict)


class _Space:
    """The latest accesses to each byte of one address space, as pieces that neither overlap nor leave gaps."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = [_Piece(0, 1 << 62)]
        self._starts = [0]

    def pieces(self, start: int, end: int) -> list[_Piece]:
        """The pieces of a range, after splitting those that reach beyond it."""
        return self._pieces[self._split(start) : self._split(end)]

    def merge(self, start: int, end: int, write: Access | None) -> None:
        """Replace the pieces of a range by one."""
        merged = slice(self._split(start), self._split(end))
        self._pieces[merged], self._starts[merged] = [_Piece(start, end, write)], [start]

    def _split(self, at: int) -> int:
        """The number of the piece that starts at an address."""
        number = bisect.bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            piece = self._pieces[number - 1]
            self._pieces.insert(number, _Piece(at, piece.end, piece.write, dict(piece.reads)))
            self._starts.insert(number, at)
            piece.end = at
        return number


class Checker:
    """Records kernels and waits, and collects races.

    Attributes:
        races: Each pair of places in the program once.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._order = StreamSynchronizations()
        self._order.create_stream(HOST)
        self._order.create_event(_HOST_EVENT)
        self._number = 0
        self._spaces: defaultdict[int, _Space] = defaultdict(_Space)
        self._reported: set[tuple] = set()

    # Order -----------------------------------------------------------------------------------------------------

    def create_stream(self, stream: int) -> None:
        """Announce a stream."""
        self._order.create_stream(stream)

    def record(self, event: int, stream: int) -> None:
        """An event stands for all kernels that a stream has so far, and for what these come after."""
        self._order.create_event(event)
        self._order.record_state(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Later kernels of a stream, or later actions of the host, come after an event."""
        self._order.stream_wait_for_event(stream, event)

    # Accesses --------------------------------------------------------------------------------------------------

    def launch(self, stream: int, kernel: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """Record a kernel, or an action of the host, and compare it with the accesses before it."""
        self._number += 1
        if stream != HOST:
            self._order.record_state(_HOST_EVENT, HOST)
            self._order.stream_wait_for_event(stream, _HOST_EVENT)
        self._order.update_seq_num(stream, self._number)
        stack = tuple(_stack())
        read = Access(stream, self._number, kernel, False, stack)
        for memory in reads:
            for piece in self._pieces(memory):
                self._compare(memory, read, [piece.write])
                piece.reads[stream] = read
        write = read._replace(writes=True)
        for memory in writes:
            for piece in self._pieces(memory):
                self._compare(memory, write, [piece.write, *piece.reads.values()])
            self._spaces[memory.space].merge(memory.start, memory.end, write)

    def free(self, memory: Range, owner: int, recorded: set[int]) -> None:
        """Report accesses to memory that is freed by kernels that nothing has waited for.

        Kernels of the owner come before those of its next use, and before the allocator unmaps the memory. It must have
        waited for all others, or they are recorded.
        """
        freed = Access(owner, self._number, "free", True, tuple(_stack()))
        for piece in self._pieces(memory):
            for earlier in [piece.write, *piece.reads.values()]:
                if earlier is not None and earlier.stream not in (HOST, owner, *recorded):
                    ordered = any(
                        self._order.is_ordered_after(after, earlier.number, earlier.stream) for after in (owner, HOST)
                    )
                    self._compare(memory, freed, [] if ordered else [earlier])

    def forget(self, memory: Range, streams: set[int]) -> None:
        """Drop the accesses of some streams: the allocator has made sure that they have ended."""
        for piece in self._pieces(memory):
            if piece.write is not None and piece.write.stream in streams:
                piece.write = None
            for stream in streams:
                piece.reads.pop(stream, None)

    def _pieces(self, memory: Range) -> list[_Piece]:
        return self._spaces[memory.space].pieces(memory.start, memory.end)

    def _compare(self, memory: Range, later: Access, accesses: list[Access | None]) -> None:
        for earlier in accesses:
            if earlier is None or self._order.is_ordered_after(later.stream, earlier.number, earlier.stream):
                continue
            pair = (earlier.kernel, earlier.stack, later.kernel, later.stack)
            if pair not in self._reported:
                self._reported.add(pair)
                self.races.append(Race(memory, earlier, later))


def _stack() -> Iterator[tuple[CodeType, int]]:
    """The frames of the program and the engine that lead to a kernel, innermost first."""
    frame, count = sys._getframe(2), 0
    while frame is not None and count < _FRAMES:
        if _is_told(frame.f_code.co_filename):
            yield frame.f_code, frame.f_lineno
            count += 1
        frame = frame.f_back  # type: ignore[assignment]


@functools.cache
def _is_told(name: str) -> bool:
    return not any(part in name for part in _SKIPPED)
