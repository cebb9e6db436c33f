"""The simulated device itself: small stream programs, with and without the wait that makes them right."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.comm.collectives import BACKEND
from tests.ranks import DEVICE as REAL_DEVICE
from tests.simulated.device import DEVICE, HOST_DEVICE, DeviceMismatch, SimulatedDevice, simulated_device
from tests.simulated.memory import FreedMemory
from tests.simulated.ranks import fake_ranks
from tests.simulated.streams import HostWait

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")


@pytest.fixture
def sim() -> Iterator[SimulatedDevice]:
    with simulated_device(kernel_time=10) as device:
        yield device


def _device(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=DEVICE)


# Order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_through_an_offset_view_needs_a_wait(sim: SimulatedDevice, waits: bool) -> None:
    flat, stream = _device(100), torch.cuda.Stream()
    view = flat[40:60].view(4, 5)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flat.fill_(1.0)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    view.sum()
    assert len(sim.races) == (not waits)
    if not waits:
        assert "fill_ writes on stream 1" in str(sim.races[0]) and "sum reads on stream 0" in str(sim.races[0])
        assert "test_checker.py" in str(sim.races[0])


def test_neighbouring_views_are_independent(sim: SimulatedDevice) -> None:
    flat, stream = _device(100), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flat[:50].fill_(1.0)
    flat[50:].sum()
    assert sim.races == []
    flat[49:].sum()
    assert len(sim.races) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_write_needs_to_wait_for_reads(sim: SimulatedDevice, waits: bool) -> None:
    flat, stream = _device(100), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flat[10:20].sum()
        flat[:5].sum()
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    flat.zero_()
    assert bool(sim.races) != waits


def test_an_event_covers_only_what_was_issued_before_it_was_recorded(sim: SimulatedDevice) -> None:
    flat, stream = _device(10), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        early = stream.record_event()
        flat.fill_(1.0)
    early.wait()
    flat.sum()
    assert len(sim.races) == 1


@pytest.mark.parametrize("synchronize", [True, False])
def test_the_host_reads_pinned_memory_after_it_has_waited(sim: SimulatedDevice, synchronize: bool) -> None:
    there = torch.empty(4, pin_memory=True)
    there.copy_(_device(4), non_blocking=True)
    if synchronize:
        torch.cuda.current_stream().synchronize()
    there.sum()
    assert bool(sim.races) != synchronize


def test_collectives_are_kernels_of_the_current_stream(sim: SimulatedDevice) -> None:
    with fake_ranks(4):
        whole, shard, stream = _device(16), _device(4), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            BACKEND.all_gather(whole, shard, dist.group.WORLD)
        shard.sum()
        assert sim.races == []
        whole[3:4].sum()
        assert len(sim.races) == 1
        shard.add_(1.0)
        assert len(sim.races) == 2


@pytest.mark.parametrize("waits", [True, False])
def test_an_asynchronous_collective_needs_a_wait(sim: SimulatedDevice, waits: bool) -> None:
    with fake_ranks(4):
        whole, shard = _device(16), _device(4)
        work = BACKEND.all_gather(whole, shard, dist.group.WORLD, async_op=True)  # type: ignore[call-arg]
        if waits:
            work.wait()
        whole.sum()
        assert bool(sim.races) != waits


def test_each_thread_has_a_current_stream(sim: SimulatedDevice) -> None:
    found: list[object] = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() is stream
    assert found == [torch.cuda.default_stream()]


def test_backward_runs_in_another_thread_on_the_stream_of_the_forward(sim: SimulatedDevice) -> None:
    x, stream, found = _device(4).requires_grad_(), torch.cuda.Stream(), list[object]()
    x.register_hook(lambda grad: found.extend([threading.get_ident(), torch.cuda.current_stream()]))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.sum().backward()
    assert found[1] is stream and found[0] != threading.get_ident() and sim.races == []


def test_every_kernel_is_reported(sim: SimulatedDevice) -> None:
    seen = []
    sim.on_kernel = lambda stream, function, *_: seen.append((stream, function._schema.name))
    flat, stream = _device(10), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flat[2:].view(2, 4).mul_(2.0)
    assert seen == [(0, "aten::zeros"), (1, "aten::mul_")]


# Memory ------------------------------------------------------------------------------------------------------------


def _use_and_free(sim: SimulatedDevice, before_free: Callable[[torch.Tensor, torch.cuda.Stream], None]) -> None:
    """Memory of compute is read by another stream, freed, and allocated again for compute."""
    stream, temporary = torch.cuda.Stream(), _device(1000)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        temporary.sum()
    before_free(temporary, stream)
    del temporary
    _device(1000)


def test_memory_that_another_stream_reads_must_not_be_freed(sim: SimulatedDevice) -> None:
    _use_and_free(sim, lambda temporary, stream: None)
    # When it is freed, and again when it is reused, which need not happen.
    assert [race.later.kernel for race in sim.races] == ["free", "aten::zeros"]


def test_memory_may_be_freed_after_a_wait(sim: SimulatedDevice) -> None:
    _use_and_free(sim, lambda temporary, stream: torch.cuda.current_stream().wait_stream(stream))
    assert sim.races == []


def test_memory_with_a_recorded_stream_is_reused_when_the_host_has_seen_its_end(sim: SimulatedDevice) -> None:
    sim.reset_peak()
    _use_and_free(sim, lambda temporary, stream: temporary.record_stream(stream))
    assert sim.races == []
    # The host ran ahead, so the second buffer could not use the memory of the first.
    assert sim.peak_bytes >= 8000
    torch.cuda.synchronize()
    sim.reset_peak()
    _use_and_free(sim, lambda temporary, stream: torch.cuda.synchronize())
    assert sim.races == [] and sim.peak_bytes < 8000


@pytest.mark.parametrize("waits", [True, False])
def test_a_storage_whose_memory_was_freed_and_allocated_has_other_memory(sim: SimulatedDevice, waits: bool) -> None:
    stream, storage = torch.cuda.Stream(), _device(1000).untyped_storage()
    view = torch.empty(0, device=DEVICE).set_(storage).view(torch.uint8)
    with pytest.raises(FreedMemory):
        storage.resize_(0)
        view.sum()
    with torch.cuda.stream(stream):
        storage.resize_(4000)
        view.zero_()
        if waits:
            torch.cuda.default_stream().wait_stream(stream)
    view.sum()
    with torch.cuda.stream(stream):
        if waits:
            stream.wait_stream(torch.cuda.default_stream())
        storage.resize_(0)
        torch.zeros(1000, device=DEVICE)
    assert len(sim.races) == (0 if waits else 3)


def test_bytes_in_use_are_those_of_living_storages(sim: SimulatedDevice) -> None:
    before = sim.memory.allocator.active
    tensor = _device(100)
    view = tensor[50:]
    assert sim.memory.allocator.active == before + 400
    del tensor
    assert sim.memory.allocator.active == before + 400
    del view
    gc.collect()
    assert sim.memory.allocator.active == before


def test_cycles_are_collected_when_the_program_asks_for_it(sim: SimulatedDevice) -> None:
    """So that a run allocates the same addresses each time, and none while others are allocated or freed."""
    before = sim.memory.allocator.active
    cycle: list[object] = [_device(100)]
    cycle.append(cycle)
    del cycle
    _ = [[number] for number in range(20_000)]  # the collector would run
    assert sim.memory.allocator.active == before + 400
    gc.collect()
    assert sim.memory.allocator.active == before


def test_an_exception_in_backward_keeps_nothing(sim: SimulatedDevice) -> None:
    before = sim.memory.allocator.active

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    def backward() -> None:
        x = _device(100).requires_grad_()
        x.register_hook(fail)
        (x * 2).sum().backward()

    with pytest.raises(ArithmeticError):
        backward()
    assert sim.memory.allocator.active == before


# Devices and waits of the host -------------------------------------------------------------------------------------


def test_tensors_know_their_device(sim: SimulatedDevice) -> None:
    here, there = _device(4), torch.zeros(4)
    assert here.device == DEVICE and there.device == HOST_DEVICE
    assert here.view(2, 2).device == torch.zeros_like(here).device == (here * 2).device == there.to(DEVICE).device
    assert here.to(DEVICE) is here and here.cpu().device == HOST_DEVICE and here.to(there).device == HOST_DEVICE
    assert torch.nn.Linear(2, 2).to(DEVICE).weight.device == torch.ones(2, device=here.device).device == DEVICE
    assert torch.tensor([1.0], device=DEVICE).device == DEVICE and torch.tensor([1.0]).pin_memory().is_pinned()
    with pytest.raises(DeviceMismatch):
        here.add(there)
    assert here.add(torch.tensor(1.0)).device == DEVICE


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "boolean index": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: torch.tensor([1.0], device=DEVICE),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=DEVICE),
    "from pageable memory": lambda x: x.copy_(torch.zeros(4), non_blocking=True),
    "to pageable memory": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    "blocking copy": lambda x: torch.zeros(4, pin_memory=True).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}
NOT_WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "index": lambda x: x[torch.zeros_like(x, dtype=torch.int64)],
    "number": lambda x: x * 2.0,
    "scalar tensor": lambda x: x * torch.tensor(2.0),
    "host": lambda x: torch.zeros(3).tolist(),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "from pinned memory": lambda x: torch.tensor([1.0]).pin_memory().to(DEVICE, non_blocking=True),
    "query": lambda x: torch.cuda.current_stream().record_event().query(),
}


@pytest.mark.parametrize("what", WAITING)
def test_waits_of_the_host_are_found(sim: SimulatedDevice, what: str) -> None:
    x = _device(4)
    WAITING[what](x)
    with sim.no_host_wait(), pytest.raises(HostWait):
        WAITING[what](x)


@pytest.mark.parametrize("what", NOT_WAITING)
def test_the_host_runs_ahead(sim: SimulatedDevice, what: str) -> None:
    x = _device(4)
    with sim.no_host_wait():
        NOT_WAITING[what](x)


def test_the_host_sees_virtual_time(sim: SimulatedDevice) -> None:
    _device(4)
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    for _ in range(12):
        event.query()
    assert event.query()


def test_the_suite_is_short(request: pytest.FixtureRequest) -> None:
    """At 1.6 s of one core each, CI runs 300 cases in 4 minutes on two cores. Most take half of that."""
    folder = Path(__file__).parent
    cases = [item for item in request.session.items if item.path.parent == folder]
    assert sum(item.get_closest_marker("slow") is None for item in cases) <= 300


def test_everything_is_put_back() -> None:
    names = (torch.Tensor.to, torch.Tensor.__dict__.get("device"), torch.cuda.Stream, torch.tensor)
    with simulated_device():
        assert torch.Tensor.to is not names[0]
    assert names == (torch.Tensor.to, torch.Tensor.__dict__.get("device"), torch.cuda.Stream, torch.tensor)
