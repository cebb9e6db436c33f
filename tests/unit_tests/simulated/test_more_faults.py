"""More mistakes injected in the engine, by somebody who did not write the checker; see test_faults.py."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.fsdp.buffers.gradients import GradientBuffer
from megatron.fsdp.buffers.pool import FixedPool, Writer
from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import CudaStream, Handle, Task, _CudaHandle
from megatron.fsdp.optim import hooks
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.state.full_weights import _Gathering
from megatron_fsdp import MixedPrecisionPolicy
from tests.models import batches, loss_of, train_step
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import on_ranks
from tests.simulated.device import DEVICE
from tests.simulated.faults import Ended
from tests.simulated.models import BF16, sharded, two_axes
from tests.unit_tests.simulated.test_faults import (
    HSDP,
    HYBRID,
    OFFLOAD,
    ZERO_3,
    Fault,
    Plant,
    _left_out,
    _replace,
    _simulation,
    _step,
    _train,
    find,
)
from tests.unit_tests.simulated.test_more import _use_memory

pytestmark = [
    pytest.mark.every_strategy,
    pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors"),
]


def second_wait_left_out(wait: Callable[..., None], handle: _CudaHandle) -> None:
    """The outer stream has waited for the handle: compute does not."""
    if not handle.done:
        wait(handle)


def event_of_compute(run: Callable[..., Handle], stream: CudaStream, task: Task) -> Handle:
    """``event.record()`` records in the current stream."""
    handle: Any = run(stream, task)
    handle._event = torch.cuda.current_stream().record_event()
    return handle


class _Now:
    def run(self, task: Task) -> Handle:
        task()
        return Ended()


def kept_by_compute(reshard: Callable[..., None], weights: WeightBuffer, keep: bool = False) -> None:
    """``self._keep()`` in place of ``self.stream.run(self._keep)``."""
    with pytest.MonkeyPatch.context() as patch:
        if keep and weights.temporary and weights._near is not None:
            patch.setattr(weights, "stream", _Now())
        reshard(weights, keep)


def taken_in_reduce_stream(take: Callable[..., Any], gradients: GradientBuffer, dtype: torch.dtype) -> Any:
    """Copies gradients to the host next to the compute, for which the host waits."""
    with torch.cuda.stream(gradients.reduction.stream._stream):  # type: ignore[attr-defined]
        return take(gradients, dtype)


def host_waits_for_default_stream(finish: Callable[..., None], context: CommContext) -> None:
    if context.offloads:
        torch.cuda.default_stream(context.device).synchronize()


def gathered_before_update(update: Callable[..., bool], optimizer: Any, engine: Engine, local: Any) -> bool:
    """A unit is prefetched before its main weights are updated, not after."""
    if engine.config.gather_during_step:
        engine.invalidate_weights()
        engine.schedule.prefetch_first(until=engine.schedule.units_to_prefetch_first()[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "invalidate_weights", lambda *unused: None)
            return update(optimizer, engine, local)
    return update(optimizer, engine, local)


def oldest_only_before_outer(start_outer: Callable[..., None], gradients: GradientBuffer) -> None:
    """The outer reduction waits for the oldest reduction over the inner axis."""
    handles, gradients.handles = gradients.handles, gradients.handles[:1]
    start_outer(gradients)
    gradients.handles = handles


def read_by_outer_freed_by_inner_wait(wait: Callable[..., None], gradients: GradientBuffer, outer: bool = True) -> None:
    wait(gradients, outer)
    while gradients._read_by_outer:
        gradients.give_back(gradients._read_by_outer.pop())


def outer_writes_as_inner(init: Callable[..., None], reduction: Reduction, *args: Any) -> None:
    """Both reduction streams have one free list."""
    init(reduction, *args)
    if reduction.outer is not None:
        reduction.outer = replace(reduction.outer, writer=Writer.TASKS)


def lent_twice(
    scratch: Callable[..., torch.Tensor], pool: FixedPool, numel: int, dtype: torch.dtype, device: Any, writer: Writer
) -> torch.Tensor:
    """A buffer stays in the free list when it is in use."""
    flat = scratch(pool, numel, dtype, device, writer)
    kind, base = pool._lent[flat.data_ptr()]
    if not any(each is base for each in pool._free[kind]):
        pool._free[kind].append(base)
    return flat


def without_waits_for_tasks(function: Callable[..., Any], *args: Any) -> Any:
    """``run(task)`` in place of ``run(task).wait()``, in one method."""
    run = CudaStream.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaStream, "run", lambda *task: (run(*task), Ended())[1])
        return function(*args)


def without_wait_before_write(function: Callable[..., Any], *args: Any) -> Any:
    """A method of the engine or of the optimizer's hooks that writes main weights while they are gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "wait_before_write", lambda *unused: None)
        return function(*args)


def outer_stream_not_joined(join: Callable[..., None], context: CommContext) -> None:
    for stream in (context.stream, context.unshard_stream):
        stream.join()


def read_by_outer_dropped_by_clear(clear: Callable[..., None], gradients: GradientBuffer) -> None:
    gradients._read_by_outer = []
    clear(gradients)


def bucket_not_waited_for(start: Callable[..., Handle], gathering: _Gathering, *args: Any) -> Handle:
    start(gathering, *args)
    return Ended()


FAULTS: dict[str, Fault] = {
    "a handle is waited for once only": Fault(
        _replace(_CudaHandle, "wait", second_wait_left_out),
        {**ZERO_3, **HSDP},
        ("_reduce_scatter_base_ ", "stream 1", " _reduce", "free writes on stream 0", "gradients.py", " wait"),
    ),
    "event is recorded in the current stream": Fault(
        _replace(CudaStream, "run", event_of_compute),
        {**ZERO_3, **BF16},
        ("_allgather_base_ writes on stream 2", "reads on stream 0"),
    ),
    "kept shard is copied by compute": Fault(
        _replace(WeightBuffer, "reshard", kept_by_compute),
        {**ZERO_3, "reshard_after_forward": 2},
        ("aten::copy_ reads on stream 2", " _unshard_kept"),
    ),
    "offloaded gradients are taken in the reduce stream": Fault(
        _replace(GradientBuffer, "take", taken_in_reduce_stream),
        {**ZERO_3, **OFFLOAD},
        ("aten::copy_ writes on stream 1", " take", "the host"),
    ),
    "host waits for the default stream": Fault(
        _replace(CommContext, "finish_offload", host_waits_for_default_stream),
        {**ZERO_3, **OFFLOAD, "side_stream": True},
        ("aten::copy_ ", "the host"),
    ),
    "unit is gathered before its update": Fault(
        _replace(hooks, "_update_by_unit", gathered_before_update),
        {**ZERO_3, **OFFLOAD},
        ("aten::copy_ reads on stream 2", " _cast_into", "writes on the host"),
    ),
    "outer reduction waits for the oldest inner one only": Fault(
        _replace(GradientBuffer, "_start_outer", oldest_only_before_outer),
        {**ZERO_3, **HSDP, "max_reducing_units": 10},
        ("add_ writes on stream 1", " over_inner", "stream 3", " over_outer"),
    ),
    "outer buffers are freed by the inner wait": Fault(
        _replace(GradientBuffer, "wait", read_by_outer_freed_by_inner_wait),
        {**ZERO_3, **HYBRID},
        ("_reduce_scatter_base_ reads on stream 3", "free writes on stream 1"),
    ),
    "both reduction streams have one free list": Fault(
        _replace(Reduction, "__init__", outer_writes_as_inner),
        {
            "zero_dp_strategy": "optim",
            **HYBRID,
            "fsdp_double_buffer": True,
            "dtype": torch.bfloat16,
            "mixed_precision_policy": MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16),
        },
        ("stream 3", " over_outer", "writes on stream 1", " over_inner"),
    ),
    "buffer in use stays in the free list": Fault(
        _replace(FixedPool, "scratch", lent_twice),
        {**ZERO_3, "fsdp_double_buffer": True, "max_reducing_units": 3},
        ("reduce_scatter", "stream 1", "writes on stream 0", " place"),
    ),
}


def _tokens(steps: int) -> torch.Tensor:
    return batches(steps, 1).to(DEVICE).flatten(0, 1)


def broadcast_after_start_param_sync() -> None:
    """As in test_more.py, but with replicas: with ZeRO-1 and ZeRO-3 on one axis nothing is broadcast."""
    model, optimizer = sharded(**ZERO_3, **two_axes())
    for tokens in _tokens(2):
        train_step(model, optimizer, tokens)
        model.start_param_sync()
        model.broadcast_params()


def initial_values_of_the_first_rank() -> None:
    model, _ = sharded(**ZERO_3, sync_module_states=True)
    loss_of(model, _tokens(1)[0]).backward()


def deleted_while_reducing_over_two_axes() -> None:
    for outer in ("no_shard", "optim"):
        model, optimizer = sharded(**ZERO_3, **two_axes(), outer_dp_sharding_strategy=outer)
        model.set_model_auto_sync(False)
        loss_of(model, _tokens(1)[0]).backward()
        del model, optimizer
        gc.collect()
        _use_memory()


def cleared_while_reducing_over_two_axes() -> None:
    """zero_grad while the outer reductions are in flight."""
    model, optimizer = sharded(**ZERO_3, **two_axes(), outer_dp_sharding_strategy="optim")
    for tokens in _tokens(3):
        model.set_model_auto_sync(False)
        loss_of(model, tokens).backward()
        optimizer.zero_grad()
        _use_memory()


def averaged_buffers() -> None:
    model, _ = sharded(**ZERO_3)
    model.module.register_buffer("mean", torch.zeros(13, device=DEVICE))
    loss_of(model, _tokens(1)[0]).backward()
    model.average_buffers()


def full_weights_in_buckets() -> None:
    model, _ = sharded(**ZERO_3, **BF16)
    for bucket in model.full_weights(bucket_bytes=4096):
        for value in bucket.values():
            value.sum()


# With a program in place of settings.
PROGRAMS: dict[str, tuple[Plant, Callable[[], None], tuple[str, ...]]] = {
    "broadcast writes main weights during unshards": (
        _replace(Engine, "broadcast_weights", without_wait_before_write),
        broadcast_after_start_param_sync,
        ("_allgather_base_ reads on stream 2", "writes on stream 1", " _broadcast"),
    ),
    "initial values are copied before they are received": (
        _replace(WeightBuffer, "initialize_main", without_waits_for_tasks),
        initial_values_of_the_first_rank,
        ("broadcast_ writes on stream 2", "reads on stream 0", " initialize_main"),
    ),
    "outer stream is not joined": (
        _replace(CommContext, "join", outer_stream_not_joined),
        deleted_while_reducing_over_two_axes,
        ("on stream 3", " over_outer"),
    ),
    "zero_grad frees what the outer reduction reads": (
        _replace(GradientBuffer, "clear", read_by_outer_dropped_by_clear),
        cleared_while_reducing_over_two_axes,
        ("_reduce_scatter_base_ reads on stream 3", "free writes"),
    ),
    "averaged buffers are not waited for": (
        _replace(Engine, "average_buffers", without_waits_for_tasks),
        averaged_buffers,
        ("allreduce_ writes on stream 1", "div_ "),
    ),
    "full weights are read before they are gathered": (
        _replace(_Gathering, "_start", bucket_not_waited_for),
        full_weights_in_buckets,
        ("_allgather_base_ writes on stream 2", "sum reads on stream 0"),
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("what", FAULTS)
def test_races_are_found(what: str) -> None:
    fault = FAULTS[what]
    find(fault.plant, lambda sim: _train(sim, fault.settings), fault.report)


@on_ranks(1)
@pytest.mark.parametrize("what", PROGRAMS)
def test_races_in_programs_are_found(what: str) -> None:
    plant, program, report = PROGRAMS[what]
    find(plant, lambda sim: program(), report)


@on_ranks(1)
def test_main_weights_written_over_a_copy_in_flight_are_found() -> None:
    for injected in (None, _replace(CommContext, "finish_offload", _left_out)):
        with _simulation(injected) as sim:
            model, _ = sharded(**ZERO_3, **OFFLOAD)
            with torch.no_grad():
                model(batches(1, 1).to(DEVICE)[0][0])
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            reports = [str(race) for race in sim.races]
            assert all("_cast_into" in report and "writes on the host" in report for report in reports)
            assert bool(reports) == (injected is not None)


@on_ranks(1)
def test_memory_read_in_another_stream_of_compute_is_found() -> None:
    """A second model computes next to the first. They communicate in the same streams."""
    for injected in (None, _replace(CudaStream, "follow", _left_out)):
        with _simulation(injected) as sim:
            (student, optimizer), (teacher, _) = sharded(**ZERO_3), sharded(**ZERO_3)
            side = torch.cuda.Stream()
            for (tokens,) in batches(3, 1).to(DEVICE):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), torch.no_grad():
                    wanted = teacher(tokens)
                loss = loss_of(student, tokens)
                torch.cuda.current_stream().wait_stream(side)
                (loss + 0 * wanted.float().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            found = [race for race in sim.races if "_unshard" in str(race.later) and race.later.kernel != "free"]
            assert bool(found) == (injected is not None) == bool(sim.races)


@on_ranks(1)
def test_main_weights_loaded_over_a_copy_in_flight_are_found() -> None:
    for injected in (None, _replace(Engine, "wait_before_write", _left_out)):
        with _simulation(injected) as sim:
            model, optimizer = sharded(**ZERO_3, **OFFLOAD)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            _step(model, optimizer, batches(1, 1).to(DEVICE)[0])
            model.load_state_dict(state)
            reports = [str(race) for race in sim.races]
            if injected is None:
                assert reports == []
            else:
                assert any("_cast_into" in r and "writes on the host" in r and "copy_shard" in r for r in reports)
