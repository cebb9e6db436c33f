"""The rules of CUDA that ``tests/simulated`` follows, as small programs: does a device follow them, too?

A failure means that the simulation permits what CUDA does not, or the other way round. Each program runs in a process
of its own, because CUDA does not recover from some of them. On a CPU, they run on the simulated device.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm import journal
from megatron.fsdp.comm.collectives import BACKEND
from tests.gpu.verdict import Setup, Verdict, judge
from tests.ranks import RankFailure, RankPool
from tests.simulated.device import DEVICE, HOST_DEVICE, SimulatedDevice, simulated_device
from tests.simulated.graphs import SimulatedGraph
from tests.simulated.streams import CaptureError

# So many that copies wait, blocks of memory have segments of their own, and a collective takes a while.
ELEMENTS = 1 << 28
REFUSED = (RuntimeError, CaptureError)


class Machine:
    """A CUDA device."""

    place = torch.device("cuda", 0)
    host = HOST_DEVICE
    elements = ELEMENTS

    def new(self) -> torch.Tensor:
        """A tensor without values, 1 GiB on CUDA."""
        return torch.empty(self.elements, device=self.place)

    def late(self) -> None:
        """Keep the current stream busy."""
        torch.cuda._sleep(1_000_000_000)

    def kernel(self) -> None:
        """Run a kernel on the current stream."""
        self.small.add_(1.0)

    def address(self, tensor: torch.Tensor) -> Any:
        """Where a tensor lies."""
        return tensor.data_ptr()

    def capture(self) -> contextlib.AbstractContextManager[Any]:
        """Context of which a graph is captured."""
        self.graph: Any = torch.cuda.CUDAGraph()
        return torch.cuda.graph(self.graph)

    def prepare(self) -> None:
        """Run what happens once."""
        self.small = torch.zeros(4, device=self.place)
        self.kernel()
        torch.cuda.synchronize()


class Simulated(Machine):
    """The simulated device."""

    place, elements = DEVICE, 64

    def __init__(self, sim: SimulatedDevice) -> None:
        self._sim = sim

    def late(self) -> None:
        self.kernel()

    def address(self, tensor: torch.Tensor) -> Any:
        return self._sim.memory.bytes_of(tensor)

    def capture(self) -> contextlib.AbstractContextManager[Any]:
        self.graph = SimulatedGraph(self._sim)
        return self.graph.capture()


def _each_thread_has_a_current_stream(at: Machine) -> None:
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        found[name] = threading.get_ident(), torch.cuda.current_stream()

    with torch.cuda.stream(torch.cuda.Stream()):
        y = at.small.clone().requires_grad_() * 2.0
        y.register_hook(lambda grad: look("backward"))
        y.sum().backward()
        other = threading.Thread(target=look, args=["other"])
        other.start()
        other.join()
        look("forward")
    assert found["other"][1] == torch.cuda.default_stream() != found["forward"][1]
    assert found["backward"][1] == found["forward"][1]
    assert found["backward"][0] != found["forward"][0]


def _collectives_are_kernels(at: Machine) -> None:
    """The current stream takes as long as the collective; with async_op=True, only after it has waited."""
    source, gathered = at.new(), at.new()
    gather: Any = BACKEND.all_gather
    gather(gathered, source, group=dist.group.WORLD)
    times = []
    for asynchronous in (False, True):
        begin, issued, waited = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        at.late()  # so that the host is ahead, and its time does not count
        begin.record()
        work = gather(gathered, source, group=dist.group.WORLD, async_op=asynchronous)
        issued.record()
        if work is not None:
            work.wait()
        waited.record()
        torch.cuda.synchronize()
        times.append((begin.elapsed_time(issued), begin.elapsed_time(waited)))
    (of_current, _), (before, after) = times
    assert before < of_current / 2 < after, times


def _memory_belongs_to_a_stream(at: Machine) -> None:
    """Freed memory is reused by its stream at once, by no other, and not while a recorded stream is busy."""
    side = torch.cuda.Stream()
    first = at.new()
    place = at.address(first)
    del first
    with torch.cuda.stream(side):
        other = at.new()
    assert at.address(other) != place
    again = at.new()
    assert at.address(again) == place
    with torch.cuda.stream(side):
        at.late()
    again.record_stream(side)
    del again
    held = at.new()
    assert at.address(held) != place
    torch.cuda.synchronize()
    assert at.address(at.new()) == place


def _copies_wait(at: Machine) -> None:
    """Those of pageable memory, and those that block."""
    here, pageable = at.new(), torch.empty(at.elements, device=at.host)
    pinned = torch.empty(at.elements, device=at.host, pin_memory=True)
    copies: dict[str, tuple[bool, Callable[[], Any]]] = {
        "to pageable memory": (True, lambda: pageable.copy_(here, non_blocking=True)),
        "from pageable memory": (True, lambda: here.copy_(pageable, non_blocking=True)),
        "to pinned memory": (False, lambda: pinned.copy_(here, non_blocking=True)),
        "from pinned memory": (False, lambda: here.copy_(pinned, non_blocking=True)),
        "to pinned memory, blocking": (True, lambda: pinned.copy_(here)),
        "from pinned memory, blocking": (True, lambda: here.copy_(pinned)),
        "an element": (True, lambda: here[0].item()),
        "on the device": (False, lambda: here[1:2].copy_(here[:1])),
    }
    for name, (waits, copy) in copies.items():
        torch.cuda.synchronize()
        at.late()
        event = torch.cuda.current_stream().record_event()
        copy()
        assert event.query() == waits, name


def _captures_wait_for_the_device(at: Machine) -> None:
    at.late()
    event = torch.cuda.current_stream().record_event()
    with at.capture():
        at.kernel()
    assert event.query()


def _streams_join_captures(at: Machine) -> None:
    side = torch.cuda.Stream()
    for joins in (True, False):
        with _refused(not joins), at.capture():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                at.kernel()
            if joins:
                torch.cuda.current_stream().wait_stream(side)


def _queries_end_captures(at: Machine) -> None:
    """Those of other threads, too, unless these ignore captures."""
    event = torch.cuda.current_stream().record_event()

    def query(ignores: bool) -> None:
        if ignores:
            journal.ignore_captures()
        with contextlib.suppress(*REFUSED):
            event.query()

    for ignores in (True, False):
        with _refused(not ignores), at.capture():
            at.kernel()
            thread = threading.Thread(target=query, args=[ignores])
            thread.start()
            thread.join()


def _no_wait_enters_a_capture(at: Machine) -> None:
    event = torch.cuda.current_stream().record_event()
    with _refused(), at.capture():
        at.kernel()
        torch.cuda.current_stream().wait_event(event)


def _no_wait_leaves_a_capture(at: Machine) -> None:
    with at.capture():
        at.kernel()
        event = torch.cuda.current_stream().record_event()
    with _refused():
        torch.cuda.current_stream().wait_event(event)


def _captures_have_memory_of_their_own(at: Machine) -> None:
    """A capture reuses memory that it has freed; nothing else does while there is the graph."""
    with at.capture():
        inside = at.new()
        own = at.address(inside)
        del inside
        again = at.new()
        at.kernel()
        places = own, at.address(again)
        del again
    assert places == (own, own)
    assert at.address(at.new()) != own


def _refused(expected: bool = True) -> contextlib.AbstractContextManager[None]:
    """Context of which CUDA raises an error, if ``expected``."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        except REFUSED:
            return
        raise AssertionError("CUDA permits it")

    return context() if expected else contextlib.nullcontext()


# In the order of the table in CONTRIBUTING.md.
RULES: dict[str, Callable[[Machine], None]] = {
    "each thread has a current stream": _each_thread_has_a_current_stream,
    "a collective is a kernel of the current stream": _collectives_are_kernels,
    "memory belongs to the stream that allocated it": _memory_belongs_to_a_stream,
    "copies from or to pageable memory": _copies_wait,
    "a capture includes streams that wait for its events": _streams_join_captures,
    "an event query by any thread": _queries_end_captures,
    "`torch.cuda.graph` first waits for the device": _captures_wait_for_the_device,
    "no wait crosses the border of a capture": _no_wait_enters_a_capture,
    "in either direction": _no_wait_leaves_a_capture,
    "a capture has memory of its own": _captures_have_memory_of_their_own,
}


def follow(rule: str, on_cuda: bool) -> None:
    """Run the program of a rule."""
    with contextlib.nullcontext() if on_cuda else simulated_device(kernel_time=1000.0) as sim:
        at = Simulated(sim) if sim is not None else Machine()
        at.prepare()
        RULES[rule](at)


def on_device(setup: Setup) -> Verdict:
    """The device follows every rule of the simulated one."""
    problems = []
    pool = RankPool()
    pool.timeout = 30.0
    for rule in RULES:
        try:
            pool.run(1, follow, rule, setup.on_cuda)
        except RankFailure as failure:
            problems.append(f"{rule}: {str(failure)[-1000:]}")
        if setup.on_cuda:
            pool.close()
    pool.close()
    return judge(problems, f"{len(RULES)} rules of the simulated device are those of the device", {"rules": [*RULES]})
