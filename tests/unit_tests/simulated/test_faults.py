"""Mistakes injected in the engine, one per test: the simulated device must find each, and name its place.

Every run is made twice, without the mistake and with it. Only the second may be reported.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megatron.fsdp.buffers.gradients import GradientBuffer
from megatron.fsdp.buffers.pool import FixedPool
from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.collectives import BACKEND
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import CudaStream, Handle, Task
from megatron.fsdp.quantized.reference.base import ReferenceStorage
from megatron.fsdp.quantized.reference.float8 import Float8Storage
from megatron.fsdp.quantized.reference.mx import MXStorage
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.runtime.unit import Unit, WeightState
from tests.models import TinyModel, batches, loss_of
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.faults import (
    Ended,
    event_before_kernels,
    inner_waits_only,
    no_wait_for_unshard,
    one_free_list,
    outer_does_not_wait,
    placed_given_back_by_task,
    shards_not_waited_for,
    task_does_not_wait,
    waits_for_first_group,
    waits_for_unshard_stream,
    weights_allocated_in_reduce_stream,
)
from tests.simulated.models import BF16, Skips, sharded, two_axes
from tests.simulated.ranks import fake_ranks
from tests.simulated.streams import HostWait

pytestmark = [
    pytest.mark.every_strategy,
    pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors"),
]
Plant = Callable[[pytest.MonkeyPatch], None]
DOUBLE_BUFFER: dict[str, Any] = {"fsdp_double_buffer": True}
OFFLOAD: dict[str, Any] = {"offload_optimizer": True, **BF16}
HSDP: dict[str, Any] = {"two_axes": True}
HYBRID: dict[str, Any] = {"two_axes": True, "outer_dp_sharding_strategy": "optim"}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: torch.Tensor) -> None:
    for number, tokens in enumerate(micro_batches):
        last = number + 1 == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(sim: SimulatedDevice, settings: dict[str, Any]) -> None:
    """Three steps of two micro-batches, whose compute may be on another stream than the default one."""
    settings = dict(settings)
    if settings.pop("two_axes", False):
        settings |= two_axes()
    with torch.cuda.stream(torch.cuda.Stream() if settings.pop("side_stream", False) else None):
        model, optimizer = sharded(**settings)
        for micro_batches in batches(3, 2).to(DEVICE):
            _step(model, optimizer, micro_batches)


@contextlib.contextmanager
def _simulation(plant: Plant | None, kernel_time: float = 5.0) -> Iterator[SimulatedDevice]:
    with fake_ranks(4), simulated_device(kernel_time) as sim, pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield sim


def _replace(owner: Any, name: str, version: Callable[..., Any]) -> Plant:
    """Replace a method by a function that gets the method as its first argument."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return version(original, *args, **kwargs)

    return lambda patch: patch.setattr(owner, name, method)


# Mistakes that races show ------------------------------------------------------------------------------------------


def _no_wait_for_reduction(wait: Callable[..., None], gradients: GradientBuffer, *outer: bool) -> None:
    gradients.handles = [Ended() for _ in gradients.handles]
    wait(gradients)


def _wait_for_oldest_only(wait: Callable[..., None], gradients: GradientBuffer, *outer: bool) -> None:
    del gradients.handles[1:]
    wait(gradients)


def _slot_taken_from_unit_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unit, "slot_is_taken", False)
    patch.setattr(Unit, "yield_slot", lambda *unused: None)


def _resharded_before_backward(use: Callable[..., None], unit: Unit, state: WeightState, *direction: Any) -> None:
    use(unit, state, *direction)
    if state is WeightState.BACKWARD and not unit.is_root:
        unit.reshard()
        unit._set_versions(readable=True)  # autograd would notice


def _unshards_before_update(invalidate: Callable[..., None], engine: Engine) -> None:
    invalidate(engine)
    engine.schedule.prefetch_first()


def _left_out(function: Callable[..., Any], *unused: Any, **also_unused: Any) -> None:
    """Nothing happens."""


def _compute_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    for name, version in (("run", task_does_not_wait), ("follow", _left_out)):
        _replace(CudaStream, name, version)(patch)


def _used_before_the_wait(prepare: Callable[..., None], unit: Unit, direction: Direction) -> None:
    for storage, params in unit.quantized:
        storage.before_use(params, direction)
    prepare(unit, direction)


def _forward_only_not_waited_for(wait: Callable[..., None], weights: WeightBuffer) -> None:
    # That of the planes of forward is the second.
    for handle in list(weights.unsharding)[1:]:
        weights.unsharding[Ended()] = weights.unsharding.pop(handle)
    wait(weights)


def _quantized_by_compute(unshard: Callable[..., Handle | None], weights: WeightBuffer, *planes: Any) -> Handle | None:
    handle = unshard(weights, *planes)
    if weights.batch is not None:
        for storage, shards in weights.batch._shards.values():
            storage.quantize(shards, lambda values: None)
    return handle


def _waits_for_default_stream(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", torch.cuda.default_stream)
        return run(stream, task)


def _without_wait(name: str) -> Plant:
    """A collective that is started and not waited for."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(BACKEND, name)
        patch.setattr(BACKEND, name, lambda *args: original(*args[:-1], group=args[-1], async_op=True))

    return plant


class _TwoGroups(TinyModel):
    """Units with parameters of two dtypes."""

    def to(self, *args: Any) -> Any:
        super().to(*args)
        for block in self.blocks:
            block.norm.float()
        return self


class _OutOfOrder(TinyModel):
    """Units that share a slot of the double buffer follow each other."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in (0, 2, 1, 3):
            x = self.blocks[number](x)
        return self.head(self.norm(x))


class Fault(NamedTuple):
    """A mistake, the settings with which it matters, and parts of what must be reported of one race."""

    plant: Plant
    settings: dict[str, Any]
    report: tuple[str, ...]


ZERO_1, ZERO_2, ZERO_3 = ({"zero_dp_strategy": name} for name in ("optim", "optim_grads", "optim_grads_params"))
GATHER, SCATTER = ("allgather_base_ writes", "weights.py", " _unshard"), ("reduce_scatter", "reduction.py", " _reduce")
DECODE = ("reads on stream 0", " decode", " before_use")
FAULTS: dict[str, Fault] = {
    "unshard is not waited for": Fault(
        _replace(WeightBuffer, "wait", no_wait_for_unshard), ZERO_3, (*GATHER, "layer_norm reads on stream 0")
    ),
    "resident weights are not waited for": Fault(
        _replace(WeightBuffer, "wait", no_wait_for_unshard), ZERO_1, (*GATHER, "layer_norm reads on stream 0")
    ),
    "reduction is not waited for": Fault(
        _replace(GradientBuffer, "wait", _no_wait_for_reduction), ZERO_3, (*SCATTER, "writes on stream 0")
    ),
    "only the oldest reduction is waited for": Fault(
        _replace(GradientBuffer, "wait", _wait_for_oldest_only),
        {**ZERO_2, "max_reducing_units": 10},
        ("add_ writes on stream 1", "reduction.py", " _reduce", "reads on stream 0", " _step"),
    ),
    "gradients are taken without a wait": Fault(
        _replace(GradientBuffer, "wait", _left_out), ZERO_2, ("add_ writes on stream 1", " over_inner", " _step")
    ),
    "event is recorded before the kernels": Fault(
        _replace(CudaStream, "run", event_before_kernels), ZERO_3, (*GATHER, "reads on stream 0")
    ),
    "buffer is dropped while it is reduced": Fault(
        _replace(GradientBuffer, "hold", _left_out), ZERO_3, (*SCATTER, "addmm writes on stream 0")
    ),
    "buffer goes back to the pool while it is reduced": Fault(
        _replace(Reduction, "over_inner", placed_given_back_by_task),
        {**ZERO_3, **DOUBLE_BUFFER, "max_reducing_units": 3},
        (*SCATTER, "_foreach_copy_ writes on stream 0", " place"),
    ),
    "weights have memory of the reduce stream": Fault(
        _replace(WeightBuffer, "unshard", weights_allocated_in_reduce_stream),
        ZERO_3,
        (*GATHER, "on stream 1", "context.py", " any_rank"),
    ),
    "stale main weights are gathered": Fault(
        _compute_is_not_waited_for,
        {**ZERO_3, **BF16},
        ("aten::copy_ reads on stream 2", " _cast_into", "writes on stream 0", " _step"),
    ),
    "slot is gathered into while it is read": Fault(
        _compute_is_not_waited_for,
        {**ZERO_3, **DOUBLE_BUFFER},
        (*GATHER, "addmm reads on stream 0"),
    ),
    "slot of a unit in use is taken": Fault(
        _slot_taken_from_unit_in_use,
        {**ZERO_3, **DOUBLE_BUFFER, "kind": _OutOfOrder},
        (*GATHER, "addmm reads on stream 0", " _prefetch"),
    ),
    "resharded before the backward's kernels": Fault(
        _replace(Unit, "use", _resharded_before_backward),
        {**ZERO_3, **DOUBLE_BUFFER, "frozen": True},
        (*GATHER, "reads on stream 0", " before_backward"),
    ),
    "weights are freed while they are read": Fault(
        _replace(CudaStream, "follow", _left_out), ZERO_3, ("reads on stream 0", "free writes on stream 2", " reshard")
    ),
    "gradients are freed while they are read": Fault(
        _replace(CommContext, "follow", _left_out), ZERO_2, ("reads on stream 0", "free writes on stream 1", " _step")
    ),
    "outer reduction still reads what is freed": Fault(
        _replace(CudaStream, "follow", _left_out),
        {**ZERO_3, **HYBRID},
        ("reads on stream 3", "free writes on stream 1", " wait"),
    ),
    "another stream is waited for": Fault(
        _replace(GradientBuffer, "reduce", waits_for_unshard_stream), ZERO_3, (*SCATTER, "writes on stream 0")
    ),
    "only the first group of a unit is waited for": Fault(
        _replace(Unit, "prepare", waits_for_first_group),
        {**ZERO_3, "kind": _TwoGroups, "dtype": torch.bfloat16},
        (*GATHER, "addmm reads on stream 0"),
    ),
    "tasks and compute have one free list": Fault(
        _replace(FixedPool, "scratch", one_free_list),
        {**ZERO_3, **DOUBLE_BUFFER, **BF16, "exchange_gradients": True, "max_reducing_units": 3},
        ("reads on stream 1", " reduce_scatter", "writes on stream 0", " place"),
    ),
    "tasks wait for the default stream": Fault(
        _replace(CudaStream, "run", _waits_for_default_stream),
        {**ZERO_3, "side_stream": True},
        ("_foreach_copy_ writes on stream 1", " place", "reduce_scatter"),
    ),
    "all-gather is asynchronous": Fault(_without_wait("all_gather"), ZERO_3, (*GATHER, "layer_norm reads on stream 0")),
    "reduce-scatter is asynchronous": Fault(
        _without_wait("reduce_scatter"), ZERO_2, ("reduce_scatter_base_ ", "mul_ writes on stream 1")
    ),
    "outer reduction does not wait for the inner one": Fault(
        _replace(GradientBuffer, "_start_outer", outer_does_not_wait),
        {**ZERO_3, **HSDP},
        ("add_ writes on stream 1", " over_inner", "allreduce_ writes on stream 3", " over_outer"),
    ),
    "outer reduction is not waited for": Fault(
        _replace(GradientBuffer, "wait", inner_waits_only),
        {**ZERO_3, **HYBRID},
        ("reduce_scatter_base_ reads on stream 3", " over_outer", "free writes on stream 1"),
    ),
    "outer gather is not waited for": Fault(
        _replace(WeightBuffer, "_unshard", shards_not_waited_for),
        {**ZERO_3, **HYBRID},
        ("_allgather_base_ writes", " _update_shards", "_allgather_base_ reads", " _unshard"),
    ),
    "host reads gradients too early": Fault(
        _replace(CommContext, "finish_offload", _left_out),
        {**ZERO_3, **OFFLOAD},
        ("aten::copy_ writes on stream 0", "gradients.py", " take", "reads on the host"),
    ),
    "main weights are updated while they are unsharded": Fault(
        _replace(Engine, "invalidate_weights", _unshards_before_update),
        {**ZERO_3, **OFFLOAD},
        ("aten::copy_ reads on stream 2", " _cast_into", "writes on the host", "hooks.py"),
    ),
    "quantized: main weights are quantized before their update": Fault(
        _compute_is_not_waited_for,
        {"format": "tensor"},
        ("reads on stream 2", " quantize", "quantizing.py", "writes on stream 0", " _step"),
    ),
    "quantized: scales are written while backward reads them": Fault(
        _compute_is_not_waited_for, {"format": "tensor"}, ("copy_ writes", " quantize", *DECODE)
    ),
    "quantized: bytes are written while backward reads them": Fault(
        _compute_is_not_waited_for,
        {**ZERO_1, "format": "mx"},
        ("copy_ writes", " quantize", *DECODE),
    ),
    "quantized: weights are prepared before the wait": Fault(
        _replace(Unit, "prepare", _used_before_the_wait), {**DOUBLE_BUFFER, "format": "mx"}, (*GATHER, *DECODE)
    ),
    "quantized: planes of a recomputation are not waited for": Fault(
        _replace(WeightBuffer, "wait", _forward_only_not_waited_for),
        {"format": "mx", "recomputed": "unit"},
        (*GATHER, *DECODE),
    ),
    "quantized: slot is gathered into while weights are decoded": Fault(
        _replace(Unit, "use", _resharded_before_backward),
        {**DOUBLE_BUFFER, "format": "mx", "frozen": True},
        (*GATHER, "reads on stream 0", " decode"),
    ),
    "quantized: by the compute stream as well": Fault(
        _replace(WeightBuffer, "unshard", _quantized_by_compute),
        {"format": "nvfp4"},
        ("writes on stream 0", " quantize", *GATHER[1:]),
    ),
}


def find(plant: Plant, program: Callable[[SimulatedDevice], None], report: tuple[str, ...]) -> list[Any]:
    """Run a program without a mistake and with it. Returns its races, of which one has all parts of the report."""
    with _simulation(None) as sim:
        program(sim)
        assert sim.races == []
    with _simulation(plant) as sim:
        program(sim)
        reports = [str(race) for race in sim.races]
        assert any(all(part in each for part in report) for each in reports), "\n".join(reports[:3])
        return sim.races


@on_ranks(1)
@pytest.mark.parametrize("what", FAULTS)
def test_races_are_found(what: str) -> None:
    fault = FAULTS[what]
    races = find(fault.plant, lambda sim: _train(sim, fault.settings), fault.report)
    if what == "unshard is not waited for":
        # Seen through a parameter that is a view of the flat buffer: blocks start at multiples of 512 bytes.
        assert any(race.memory.start % 512 for race in races)


# Mistakes that something else shows, or that need something special ------------------------------------------------


def _copies_from_pageable_memory(any_rank: Callable[..., Any], context: CommContext, *args: Any) -> Any:
    torch.tensor(args[0], dtype=torch.uint8, device=context.device)
    return any_rank(context, *args)


@on_ranks(1)
def test_a_blocking_copy_in_a_step_is_found() -> None:
    plant = _replace(CommContext, "any_rank", _copies_from_pageable_memory)
    for injected in (None, plant):
        with _simulation(injected) as sim:
            model, optimizer = sharded()
            data = batches(1, 1).to(DEVICE)
            with sim.no_host_wait():
                if injected is None:
                    _step(model, optimizer, data[0])
                    continue
                with pytest.raises(HostWait, match="makes the host wait") as raised:
                    _step(model, optimizer, data[0])
            assert "_used_anywhere" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


def _records_instead_of_holding(hold: Callable[..., None], gradients: GradientBuffer, buffer: torch.Tensor) -> None:
    buffer.record_stream(torch.cuda.current_stream())


def _pageable(main_buffer: Callable[..., torch.Tensor], context: CommContext, numel: int, dtype: Any) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=context.main_device)


def _blocking_cast(
    cast_into: Callable[..., torch.Tensor], weights: WeightBuffer, own: torch.Tensor, *unused: Any
) -> Any:
    return own.copy_(weights.main)


OFFLOAD_FAULTS = {
    "main weights are not pinned": _replace(CommContext, "main_buffer", _pageable),
    "main weights are copied with a wait": _replace(WeightBuffer, "_cast_into", _blocking_cast),
}


@on_ranks(1)
@pytest.mark.parametrize("what", OFFLOAD_FAULTS)
def test_blocking_copies_of_offload_are_found(what: str) -> None:
    for injected in (None, OFFLOAD_FAULTS[what]):
        with _simulation(injected) as sim:
            model, optimizer = sharded(**ZERO_3, **OFFLOAD, sync_model_each_microbatch=False)
            data = batches(2, 1).to(DEVICE)
            _step(model, optimizer, data[0])
            # The optimizer's step is on the host, which waits for the gradients. A backward is not.
            with sim.no_host_wait(), contextlib.nullcontext() if injected is None else pytest.raises(HostWait):
                loss_of(model, data[1, 0]).backward()
            assert sim.races == [] or injected is not None


@on_ranks(1)
def test_main_weights_written_while_an_unused_unit_is_gathered_are_found() -> None:
    """Megatron's optimizer writes main weights without a call of the engine after gradients are synchronized."""
    for injected in (None, _replace(CommContext, "join_unshards", _left_out)):
        with _simulation(injected, kernel_time=50.0) as sim:
            model, optimizer = sharded(kind=Skips)
            for tokens in batches(3, 1).to(DEVICE):
                loss_of(model, tokens[0]).backward()
                model.finish_grad_sync()
                model.module.skips = True
                with torch.no_grad():
                    torch._foreach_mul_([group.weights.main for group in model.engine.groups], 0.9)
                model.engine.invalidate_weights()
                optimizer.zero_grad()
            reports = [str(race) for race in sim.races]
            found = [r for r in reports if "_allgather_base_ reads" in r and "_foreach_mul_ writes on stream 0" in r]
            assert bool(found) == (injected is not None) and bool(reports) == bool(found), reports[:3]


MEMORY_FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "record_stream instead of holding": (_replace(GradientBuffer, "hold", _records_instead_of_holding), ZERO_3),
    "reductions in flight without a limit": (_replace(Unit, "wait_for_gradients", _left_out), ZERO_3),
    "dequantized weights are kept": (_replace(ReferenceStorage, "after_use", _left_out), {"format": "mx"}),
}


def _peak(plant: Plant | None, settings: dict[str, Any]) -> int:
    """Peak memory in bytes with a device that is ten times slower than the host."""
    with _simulation(plant, kernel_time=10.0) as sim:
        _train(sim, settings)
        assert sim.races == []
        return sim.peak_bytes


@on_ranks(1)
@pytest.mark.parametrize("what", MEMORY_FAULTS)
def test_memory_that_piles_up_is_found(what: str) -> None:
    plant, settings = MEMORY_FAULTS[what]
    assert _peak(plant, settings) > 1.2 * _peak(None, settings)


def _raises_without_wait(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    handle = run(stream, guarded)
    if errors:
        raise errors.pop()
    return handle


def _fails_once(reduce_scatter: Callable[..., None]) -> Callable[..., None]:
    calls: list[None] = []

    def launch(*args: Any) -> None:
        reduce_scatter(*args)
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError

    return launch


@on_ranks(1)
def test_memory_freed_by_an_exception_in_a_task_is_found() -> None:
    for injected in (None, _replace(CudaStream, "run", _raises_without_wait)):
        with _simulation(injected) as sim, pytest.MonkeyPatch.context() as patch:
            patch.setattr(BACKEND, "reduce_scatter", _fails_once(BACKEND.reduce_scatter))
            model, optimizer = sharded()
            data = batches(2, 1).to(DEVICE)
            with pytest.raises(MemoryError):
                _step(model, optimizer, data[0])
            _step(model, optimizer, data[1])
            reports = [str(race) for race in sim.races]
            if injected is None:
                assert reports == []
            else:
                assert any("reduce_scatter" in r and " _reduce" in r and "on stream 0" in r for r in reports), reports


def _on_current_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A version of a function that asks for the current stream without naming its device."""
    of_device = torch.cuda.current_stream

    def call(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda *unused: of_device())
            return function(*args)

    return call


def _beside(here: Callable[..., Any], elsewhere: Any) -> Callable[..., Any]:
    """``torch.cuda.current_stream`` while another device than the model's is the current one."""
    return lambda at=None: here() if at == DEVICE else elsewhere


def _waits_on_current_device(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    handle = run(stream, task)
    handle.wait = _on_current_device(handle.wait)  # type: ignore[method-assign]
    return handle


@on_ranks(1)
def test_the_current_stream_of_another_device_is_found() -> None:
    for injected in (None, _replace(CudaStream, "run", _waits_on_current_device)):
        with _simulation(injected) as sim, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", _beside(torch.cuda.current_stream, torch.cuda.Stream()))
            _train(sim, ZERO_3)
            found = [race for race in sim.races if "_unshard" in str(race) and "reads on stream 0" in str(race)]
            assert bool(found) == (injected is not None) and bool(sim.races) == bool(found)


@on_ranks(1)
def test_weights_are_quantized_in_one_stream_beside_the_compute() -> None:
    for owner, format in ((Float8Storage, "tensor"), (MXStorage, "mx")):
        found: set[int] = set()

        def quantize(original: Callable[..., None], *args: Any, found: set[int] = found) -> None:
            found.add(torch.cuda.current_stream().cuda_stream)
            original(*args)

        with _simulation(_replace(owner, "quantize", quantize)) as sim:
            _train(sim, {"format": format})
        # The first is that of the compute, where the model was built before it was sharded.
        assert len(found - {0}) == 1
