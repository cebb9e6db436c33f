"""A graph of an iteration, captured and replayed on the simulated device, trains as an eager loop does."""

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.journal import Journal, Watchdog
from megatron.fsdp.comm.streams import CudaStream
from tests.models import STRATEGIES, batches, loss_of, main_weights
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.graphs import SimulatedGraph
from tests.simulated.memory import FreedMemory
from tests.simulated.models import BF16, Skips, adamw, sharded, two_axes
from tests.simulated.pairs import parametrize_pairs
from tests.simulated.ranks import fake_ranks
from tests.simulated.streams import CaptureError
from tests.slow import all_but_slow

pytestmark = [
    pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors"),
]
STEPS, MICRO_BATCHES, WARM_UP = 4, 2, 2
Optimizers = Callable[[Any], torch.optim.Optimizer]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose step has no state on the host, so that it can be part of the graph."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def _sharded(make: Optimizers = adamw, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    return sharded(make=make, **{"cuda_graph_mode": True, **settings})


def _backward(model: nn.Module, step: torch.Tensor) -> None:
    for number, tokens in enumerate(step):
        with model.no_sync() if number + 1 < len(step) else contextlib.nullcontext():
            (loss_of(model, tokens) / len(step)).backward()


def _evaluate(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).clone()


def _trained(
    graphed: bool, settings: dict[str, Any], step_in_graph: bool = False, evaluates: bool = False, to_none: bool = True
) -> list[torch.Tensor]:
    """Train, and return what evaluation saw and the main weights at the end."""
    data = batches(STEPS, MICRO_BATCHES)
    seen: list[torch.Tensor] = []
    with simulated_device() as sim:
        make = _sgd if step_in_graph else adamw
        model, optimizer = _sharded(make, **settings)
        static = data[0].to(DEVICE)
        graph = None

        def iteration() -> None:
            _backward(model, static)
            if step_in_graph:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)

        for number, step in enumerate(data):
            static.copy_(step.to(DEVICE))
            if graphed and number == WARM_UP:
                graph = SimulatedGraph(sim)
                with graph.capture():
                    iteration()
            if graph is None:
                iteration()
            else:
                graph.replay()
            if not step_in_graph:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            if evaluates:
                seen.append(_evaluate(model, static[0]))
        assert graph is None or len(graph) > 100
        assert not sim.races
        return [*seen, *main_weights(model).values()]


def _equal(settings: dict[str, Any], loop: dict[str, bool]) -> None:
    expected, found = _trained(False, settings, **loop), _trained(True, settings, **loop)
    assert all(value.isfinite().all() for value in expected)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


LOOPS: dict[str, dict[str, bool]] = {
    "step outside": {},
    "step inside": {"step_in_graph": True},
    "evaluation between": {"evaluates": True},
    "step inside, evaluation between": {"step_in_graph": True, "evaluates": True},
    "zeros": {"to_none": False},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replayed_iteration_trains_as_an_eager_one(ranks: RankPool, strategy: str, loop: str) -> None:
    ranks.run(2, _equal, {"zero_dp_strategy": strategy}, LOOPS[loop])


@on_ranks(4)
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_two_axes(outer: str) -> None:
    _equal({**two_axes(), "outer_dp_sharding_strategy": outer}, {})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _equal, {"zero_dp_strategy": strategy, **BF16}, {})


FORMATS = ("tensor", "delayed", "32x32", "mx", "nvfp4")


@parametrize_pairs(format=all_but_slow(FORMATS, "delayed"), strategy=STRATEGIES, loop=["step outside", "step inside"])
def test_quantized_weights(ranks: RankPool, format: str, strategy: str, loop: str) -> None:
    ranks.run(2, _equal, {"zero_dp_strategy": strategy, "format": format}, LOOPS[loop])


@pytest.mark.parametrize(
    "setting", [{"fsdp_double_buffer": True}, {"recomputed": "unit"}, {"recomputed": "layer"}], ids=str
)
@pytest.mark.parametrize("format", all_but_slow(["delayed", "mx"], "mx"))
def test_settings_of_quantized_weights(ranks: RankPool, format: str, setting: dict[str, Any]) -> None:
    ranks.run(2, _equal, {"format": format, **setting}, LOOPS["step inside"])


@on_ranks(2)
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "delayed"))
def test_evaluations_do_not_change_training(format: str) -> None:
    """Evaluations change nothing, and neither does the mode."""
    expected = _trained(False, {"format": format, "cuda_graph_mode": False}, step_in_graph=True)
    found = _trained(True, {"format": format}, step_in_graph=True, evaluates=True)
    for one, other in zip(expected, found[STEPS:], strict=True):
        assert torch.equal(one, other)


@on_ranks(1)
@pytest.mark.parametrize("setting", ["offload_optimizer", "report_nan_in_param_grad"])
def test_settings_that_make_the_host_wait_raise(setting: str) -> None:
    with simulated_device(), pytest.raises(ValueError, match=setting):
        _sharded(**{setting: True})


@on_ranks(2)
def test_a_capture_before_the_first_iteration_raises() -> None:
    with simulated_device() as sim:
        model, _ = _sharded()
        tokens = batches(1, 1)[0].to(DEVICE)
        with pytest.raises(RuntimeError, match="Run at least one whole iteration"), SimulatedGraph(sim).capture():
            _backward(model, tokens)


def _evaluates_without_a_unit(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Nothing waits for the unshard of a unit that is skipped."""
    model.module.skips = True
    _evaluate(model, tokens)
    model.module.skips = False


def _drops_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model.set_model_auto_sync(False)
    loss_of(model, tokens).backward()
    optimizer.zero_grad()
    model.set_model_auto_sync(True)


LEFT = {"an unshard": _evaluates_without_a_unit, "a reduction": _drops_gradients}


@on_ranks(1)
@pytest.mark.parametrize("what", LEFT)
def test_tasks_from_before_a_capture_are_not_waited_for_in_it(what: str) -> None:
    with fake_ranks(4), simulated_device() as sim:
        model, optimizer = _sharded(kind=Skips, outer_dp_sharding_strategy="optim", **two_axes())
        data = batches(1, 1)[0].to(DEVICE)
        for _ in range(WARM_UP):
            _backward(model, data)
            optimizer.step()
            optimizer.zero_grad()
        LEFT[what](model, optimizer, data[0])
        graph = SimulatedGraph(sim)
        with graph.capture():
            _backward(model, data)
        for _ in range(2):
            graph.replay()
            optimizer.step()
            optimizer.zero_grad()
        LEFT[what](model, optimizer, data[0])
        _backward(model, data)
        assert not sim.races


@on_ranks(1)
def test_a_replaced_gradient_raises() -> None:
    with simulated_device():
        model, optimizer = _sharded()
        tokens = batches(1, 1)[0].to(DEVICE)
        _backward(model, tokens)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()
        with pytest.raises(RuntimeError, match="was replaced by another tensor"):
            _backward(model, tokens)


def _drops_persistent(clear: Callable[..., None]) -> Callable[..., None]:
    """Gradients get other memory in the next step, as they do without a graph."""

    def version(group: ParameterGroup, set_to_none: bool = True) -> None:
        clear(group, set_to_none)
        group._persistent = None
        for param in group.params:
            param.main.grad = None

    return version


@on_ranks(1)
@pytest.mark.parametrize("drops", [True, False])
def test_memory_that_a_graph_needs_and_the_engine_frees_is_found(drops: bool) -> None:
    clear = ParameterGroup.clear_gradients
    with fake_ranks(4), simulated_device() as sim, contextlib.ExitStack() as stack:
        model, optimizer = _sharded()
        data = batches(1, 1)[0].to(DEVICE)
        for _ in range(WARM_UP):
            _backward(model, data)
            optimizer.step()
            optimizer.zero_grad()
        graph = SimulatedGraph(sim)
        with graph.capture():
            _backward(model, data)
        if drops:
            stack.enter_context(patch.object(ParameterGroup, "clear_gradients", _drops_persistent(clear)))
        graph.replay()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(FreedMemory, match="a replay uses memory") if drops else contextlib.nullcontext():
            graph.replay()


# The rules of captures -------------------------------------------------------------------------------------------


def _on(sim: SimulatedDevice, stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.ones(4, device=DEVICE).mul_(2)


def test_a_stream_that_is_not_joined_raises() -> None:
    with simulated_device() as sim:
        stream = torch.cuda.Stream()
        with pytest.raises(CaptureError, match="not joined"), SimulatedGraph(sim).capture():
            stream.wait_stream(torch.cuda.current_stream())
            _on(sim, stream)
        with SimulatedGraph(sim).capture():
            stream.wait_stream(torch.cuda.current_stream())
            _on(sim, stream)
            torch.cuda.current_stream().wait_stream(stream)


def test_a_stream_that_is_not_forked_raises() -> None:
    with simulated_device() as sim:
        stream = torch.cuda.Stream()
        with pytest.raises(CaptureError, match="not part"), SimulatedGraph(sim).capture():
            _on(sim, stream)


def test_a_wait_for_an_earlier_event_raises() -> None:
    with simulated_device() as sim:
        event = torch.cuda.Event()
        event.record()
        with pytest.raises(CaptureError, match="from before"), SimulatedGraph(sim).capture():
            torch.cuda.current_stream().wait_event(event)


def test_a_wait_for_an_event_of_an_earlier_capture_raises() -> None:
    with simulated_device() as sim:
        with SimulatedGraph(sim).capture():
            event = torch.cuda.current_stream().record_event()
        with pytest.raises(CaptureError, match="has ended"):
            torch.cuda.current_stream().wait_event(event)


def test_a_query_during_a_capture_raises() -> None:
    with simulated_device() as sim, pytest.raises(CaptureError, match="queried"), SimulatedGraph(sim).capture():
        event = torch.cuda.Event()
        event.record()
        event.query()


def test_a_replay_reads_new_data_at_the_same_address() -> None:
    with simulated_device() as sim:
        data = torch.ones(3, device=DEVICE)
        graph = SimulatedGraph(sim)
        with graph.capture():
            result = (data * 2).add_(1)
        data.fill_(5.0)
        graph.replay()
        assert result.cpu().tolist() == [11.0] * 3


def test_a_capture_has_memory_of_its_own() -> None:
    """Without it, what is allocated after the capture would be written by replays."""
    with simulated_device() as sim:
        with SimulatedGraph(sim).capture():
            inside = torch.empty(4, device=DEVICE)
            own = sim.memory.bytes_of(inside)
            del inside
            assert sim.memory.bytes_of(torch.empty(4, device=DEVICE)) == own
        assert sim.memory.bytes_of(torch.empty(4, device=DEVICE)) != own


def test_a_replay_of_freed_memory_raises() -> None:
    with simulated_device() as sim:
        data, graph = torch.ones(3, device=DEVICE), SimulatedGraph(sim)
        with graph.capture():
            data.add_(1)
        graph.replay()
        del data
        with pytest.raises(FreedMemory, match="before the capture"):
            graph.replay()


def test_a_capture_runs_nothing() -> None:
    with simulated_device() as sim:
        data = torch.ones(3, device=DEVICE)
        with SimulatedGraph(sim).capture():
            data.add_(1)
        assert data.cpu().tolist() == [1.0] * 3


@pytest.mark.parametrize("ignores", [True, False])
def test_events_that_the_watchdog_queries_end_no_capture(ignores: bool) -> None:
    """The thread asks about an operation from before the capture, here of somebody else's graph."""
    with simulated_device() as sim:
        x = torch.zeros(4, device=DEVICE)
        journal = Journal()
        with torch.cuda.stream(torch.cuda.Stream()):
            handle = CudaStream(DEVICE).run(lambda: None)
        journal.channel([0, 1]).note("gather", [handle])
        watchdog = Watchdog(journal, 0.1, interval=0.01)
        with contextlib.nullcontext() if ignores else pytest.raises(CaptureError, match="another thread"):
            with contextlib.ExitStack() as stack:
                if not ignores:
                    stack.enter_context(patch("megatron.fsdp.comm.journal.ignore_captures"))
                with SimulatedGraph(sim).capture():
                    watchdog.start()
                    x.add_(1.0)
                    time.sleep(0.3)
                    watchdog.stop()
