"""Simulates when a recorded computation and its streams would do what they do."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron.fsdp.tools.predict.ghosts import Cost, Memory
from megatron.fsdp.tools.predict.machine import Device, Link
from megatron.fsdp.tools.predict.record import Busy, Change, Mark, Message, Wait, Work

LinkOf = Callable[[Message], Link]
# How often each byte of the full buffer is sent, before the factor (N - 1) / N.
_TRIPS = {"allreduce_": 2.0}
_ALL_TO_ALL = {"alltoall_", "alltoall_base_"}


class Allocation(NamedTuple):
    """Memory that changes at a moment.

    Attributes:
        seconds: The moment.
        memory: The storage.
        bytes: The change.
        label: What computes.
    """

    seconds: float
    memory: Memory
    bytes: int
    label: str


class _Activity:
    """An operator or a message that runs: seconds that remain, and the part of each resource that it takes."""

    __slots__ = ("remaining", "needs", "rate")

    def __init__(self, seconds: float, needs: dict[Any, float]) -> None:
        self.remaining, self.needs, self.rate = seconds, needs, 1.0


class _Executor:
    """The computation, or a stream: what it has to do, in order; and its messages: see ``Simulation``."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self.entries = deque(entries)
        self.activity: _Activity | None = None
        self.begun: float | None = None
        self.messages: list[tuple[float, float]] = []


class Simulation:
    """Plays a program.

    Args:
        device: What it runs on.
        link_of: The link of a message.
        per_host: Ranks that share the cores of a host.

    Attributes:
        now: Seconds since the start.
        messages: When the computation came to each of its own messages, and how many seconds it did nothing else.
        allocations: Every change of memory, in the order of time. How late other ranks take part in a collective is
            not known: what a stream frees after its last message counts until that work is waited for.
    """

    def __init__(self, device: Device, link_of: LinkOf, per_host: int) -> None:
        self._device, self._link_of = device, link_of
        self._cores = None if device.cores is None else device.cores / per_host
        self.now = 0.0
        self.messages: list[tuple[float, float]] = []
        self.allocations: list[Allocation] = []
        self._label = ""
        self._done: set[int] = set()
        self._freed: dict[int, list[Change]] = {}  # by work that is not waited for yet
        self._streams: dict[str, _Executor] = {}
        # Messages of one group run in the order in which they were issued, whatever their streams.
        self._order: dict[Any, deque[int]] = {}

    def play(self, program: list[Any]) -> None:
        """Simulate a program from the start to the end of all streams."""
        main = _Executor(program)
        self.messages = main.messages
        for message in _messages(program):
            self._order.setdefault((message.ranks, message.step), deque()).append(id(message))
        while True:
            executors = [main, *self._streams.values()]
            while any([self._begin(executor) for executor in executors]):
                executors = [main, *self._streams.values()]
            active = [e.activity for e in executors if e.activity is not None]
            if not active:
                for work in [*self._freed]:
                    self._free(work)
                return
            self._share(active)
            seconds = min(a.remaining / a.rate for a in active)
            self.now += seconds
            for executor in executors:
                if (activity := executor.activity) is not None:
                    activity.remaining -= seconds * activity.rate
                    if activity.remaining <= 1e-12:
                        executor.activity = None

    def _begin(self, executor: _Executor) -> bool:
        """Advance to the next activity; whether anything was done."""
        advanced = False
        while executor.activity is None and executor.entries:
            entry = executor.entries[0]
            if isinstance(entry, Wait) and id(entry.work) not in self._done:
                break
            if isinstance(entry, Message):
                executor.begun = self.now if executor.begun is None else executor.begun
                if not self._is_next(entry):
                    break
            executor.entries.popleft()
            advanced = True
            self._do(executor, entry)
        return advanced

    def _is_next(self, message: Message) -> bool:
        return self._order[message.ranks, message.step][0] == id(message)

    def _do(self, executor: _Executor, entry: Any) -> None:
        if isinstance(entry, Change):
            self.allocations.append(Allocation(self.now, entry.memory, entry.bytes, self._label))
        elif isinstance(entry, Wait):
            self._free(id(entry.work))
        elif isinstance(entry, Cost):
            executor.activity = _Activity(self._device.seconds(entry), {"cores": 1.0})
        elif isinstance(entry, Busy):
            executor.activity = _Activity(entry.seconds, {"cores": 1.0})
        elif isinstance(entry, Mark):
            entry.seconds = self.now
            self._label = self._label if entry.label is None else entry.label
        elif isinstance(entry, Work):
            stream = self._streams.setdefault(entry.stream, _Executor(()))
            messages = [place for place, each in enumerate(entry.entries) if isinstance(each, Message)]
            rest = entry.entries[messages[-1] :] if messages else []
            self._freed[id(entry)] = [each for each in rest if _frees(each)]
            own = [*entry.entries[: len(entry.entries) - len(rest)], *(each for each in rest if not _frees(each))]
            stream.entries.extend([*own, _End(entry)])
        elif isinstance(entry, Message):
            executor.activity = self._message(entry)
            executor.entries.appendleft(_Sent(entry))
        elif isinstance(entry, _Sent):
            computed = sum(self._device.seconds(cost) for cost in entry.message.meanwhile)
            begun, executor.begun = executor.begun or 0.0, None
            executor.messages.append((begun, max(self.now - begun - computed, 0.0)))
            self._order[entry.message.ranks, entry.message.step].popleft()
        elif isinstance(entry, _End):
            self._done.add(id(entry.work))

    def _free(self, work: int) -> None:
        for change in self._freed.pop(work, ()):
            self.allocations.append(Allocation(self.now, change.memory, change.bytes, self._label))

    def _message(self, message: Message) -> _Activity:
        link, device = self._link_of(message), self._device
        others = message.ranks - 1
        trips = _TRIPS.get(message.name, 1.0)
        size = trips * message.bytes * others / message.ranks
        # Sends between every two ranks are on their way together; a ring passes parts on from host to host.
        pairwise = message.number or message.name in _ALL_TO_ALL
        hops = 1.0 if pairwise else max(trips * (message.ranks / link.ranks_per_hop - 1), 1.0)
        if device.runs_ahead and message.name in _TRIPS:  # NCCL's trees, up and down
            hops = min(hops, max(2 * math.log2(message.ranks / link.ranks_per_hop), 1.0))
        bandwidth = link.all_to_all if pairwise and link.all_to_all else link.bandwidth
        wire = size / bandwidth + hops * link.latency if others else 0.0
        meanwhile = sum(device.seconds(cost) for cost in message.meanwhile)
        # Every byte is sent and received.
        busy = meanwhile + device.send_seconds * 2 * size + device.message_seconds * (message.number or 2 * hops)
        last = meanwhile / max(others, 1)
        seconds = max(wire + last, busy, 1e-9)
        return _Activity(seconds, {"cores": busy / seconds, link.name: wire / seconds})

    def _share(self, active: list[_Activity]) -> None:
        """Set how fast activities run: a resource that is asked for too much is shared evenly."""
        for activity in active:
            activity.rate = 1.0
        names = {name for activity in active for name in activity.needs}
        for name in names:
            capacity = self._cores if name == "cores" else 1.0
            if capacity is None:
                continue
            asking = sorted((a for a in active if a.needs.get(name, 0.0) > 0), key=lambda a: a.needs[name])
            left = capacity
            for position, activity in enumerate(asking):
                given = min(activity.needs[name], left / (len(asking) - position))
                left -= given
                activity.rate = min(activity.rate, given / activity.needs[name])


class _End(NamedTuple):
    work: Work


class _Sent(NamedTuple):
    message: Message


def _frees(entry: Any) -> bool:
    return isinstance(entry, Change) and entry.bytes < 0


def _messages(entries: list[Any]) -> Iterable[Message]:
    for entry in entries:
        if isinstance(entry, Message):
            yield entry
        elif isinstance(entry, Work):
            yield from _messages(entry.entries)


def in_program_order(entries: list[Any], label: str = "") -> Iterable[Allocation]:
    """Changes of memory as a host that runs ahead makes them, at the time of the last mark before."""
    seconds = 0.0
    for entry in entries:
        if isinstance(entry, Change):
            yield Allocation(seconds, entry.memory, entry.bytes, label)
        elif isinstance(entry, Mark):
            seconds, label = entry.seconds, label if entry.label is None else entry.label
        elif isinstance(entry, Work):
            for change in in_program_order(entry.entries, label):
                yield change._replace(seconds=seconds)
