"""Megatron's wrapper on the simulated device, in Megatron's schedule and with its optimizer."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.models import STRATEGIES
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.graphs import SimulatedGraph
from tests.simulated.streams import Timeline

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")


@contextlib.contextmanager
def _megatron(kernel_time: float = 2.0) -> Iterator[tuple[SimulatedDevice, Any]]:
    """Megatron on the simulated device, and the helpers that build its models."""
    from megatron.fsdp.mcore.cpu import fake_cuda, torch_view
    from tests import megatron_models as mm

    with contextlib.ExitStack() as stack:
        sim = stack.enter_context(simulated_device(kernel_time))
        for module in (fake_cuda, torch_view):
            stack.enter_context(patch.object(module, "CPU", DEVICE))
        stack.enter_context(mm.megatron())
        yield sim, mm


def _built(mm: Any, **settings: Any) -> tuple[Any, Any]:
    model = mm.wrapped(build=lambda config: mm.gpt(config).to(DEVICE), check_for_nan_in_grad=False, **settings)
    return model, mm.optimizer_of(model)


def _losses(mm: Any) -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    # Made before a capture, as Megatron's loop makes them: a CUDA graph cannot copy from pageable memory.
    positions = torch.arange(mm.SEQUENCE, device=DEVICE).unsqueeze(0)
    mask = torch.ones(1, 1, mm.SEQUENCE, mm.SEQUENCE, device=DEVICE).tril() < 0.5
    return lambda module, rows: module(rows[:, :-1], positions, mask, labels=rows[:, 1:])


def _backward(
    sim: SimulatedDevice, mm: Any, model: torch.nn.Module, optimizer: Any, losses: Callable, step: int
) -> None:
    """Compute the gradients of a step, in which the wrapper must not wait."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    data = mm.tokens(step, 2).to(DEVICE)
    # In the first step, the ranks agree on an order. Megatron's optimizer, later, waits for the norm of the gradients.
    with sim.no_host_wait() if step else contextlib.nullcontext():
        mm.forward_backward(model, data, losses)


@on_ranks(2)
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, bf16: bool) -> None:
    with _megatron() as (sim, mm):
        model, optimizer = _built(mm, strategy=strategy, bf16=bf16)
        losses = _losses(mm)
        for step in range(3):
            _backward(sim, mm, model, optimizer, losses, step)
            optimizer.step()
        assert not sim.races, "\n".join(map(str, sim.races[:3]))
        assert len(sim.timeline.streams) > 1


@on_ranks(2)
@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=pytest.mark.slow), 0.4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offload(strategy: str, fraction: float) -> None:
    """Train with --optimizer-cpu-offload and without, and compare norms of gradients and weights, and the weights."""
    results = []
    for settings in ({}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}):
        with _megatron() as (sim, mm):
            config = mm.transformer_config(bf16=True, finalize_model_grads_func=mm.finalize)
            ddp_config = mm.ddp_config(strategy, check_for_nan_in_grad=False, grad_reduce_in_fp32=True)
            vars(ddp_config).update(settings)
            model = mm.FullyShardedDataParallel(config=config, ddp_config=ddp_config, module=mm.gpt(config).to(DEVICE))
            precise = {"use_precision_aware_optimizer": True} if settings else {}
            optimizer = mm.optimizer_of(model, **precise, **settings)
            losses, norms = _losses(mm), []
            for step in range(3):
                _backward(sim, mm, model, optimizer, losses, step)
                norms.append(float(optimizer.step()[1]))
            assert not sim.races, "\n".join(map(str, sim.races[:3]))
            places = {unit.is_offloaded for unit in model.module.engine.units}
            for unit in model.module.engine.units:
                for param in (param for group in unit.groups for param in group.params):
                    tensors = [param.main, optimizer.optimizer.state[param.main]["exp_avg"]]
                    assert {sim.is_here(tensor) for tensor in tensors} == {not unit.is_offloaded}
            from megatron.training import training  # Megatron is imported after it is prepared for a CPU

            # As --log-params-norm does.
            norms.append(training.calc_params_l2_norm([model]))
            results.append((norms, mm.weights_of(model), places))
    (norms, weights, _), (offloaded_norms, offloaded_weights, places) = results
    assert places == ({True} if fraction == 1 else {True, False})
    torch.testing.assert_close(norms, offloaded_norms, rtol=1e-6, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, offloaded_weights[name], rtol=1e-6, atol=1e-6, msg=name)


@contextlib.contextmanager
def _host_waits() -> Iterator[set[str]]:
    """Collects where the host waits, as names of Megatron's functions."""
    found: set[str] = set()
    wait_until = Timeline.wait_until

    def noted(timeline: Timeline, time: float, event: int, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/site-packages/megatron/" in frame.filename]
        found.add(f"{Path(frames[-1].filename).name}: {frames[-1].name}" if frames else what)
        wait_until(timeline, time, event, what)

    with patch.object(Timeline, "wait_until", noted):
        yield found


def _waits() -> set[str]:
    with _megatron() as (_, mm):
        model, optimizer = _built(mm, strategy="optim_grads_params")
        losses = _losses(mm)
        for step in range(2):
            model.zero_grad_buffer()
            mm.forward_backward(model, mm.tokens(step, 2).to(DEVICE), losses)
            with _host_waits() as found:
                optimizer.step()
    return found


def test_where_megatrons_optimizer_waits_is_on_the_page(ranks: RankPool) -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    places = set().union(*ranks.run(2, _waits))
    assert places
    for place in places:
        assert f"`{place}`" in page


# A graph of the whole iteration -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _graphs_of(sim: SimulatedDevice) -> Iterator[None]:
    """Let Megatron's full_cuda_graph capture simulated graphs."""
    from megatron.core import full_cuda_graph

    class Graph(SimulatedGraph):
        def __init__(self) -> None:
            super().__init__(sim)

        def register_generator_state(self, state: Any) -> None:
            """The model draws no random numbers."""

    @contextlib.contextmanager
    def capture(graph: Graph, stream: Any, **unused: Any) -> Iterator[None]:
        with torch.cuda.stream(stream), graph.capture():
            yield

    names = {"CUDAGraph": Graph, "graph": capture, "graph_pool_handle": lambda: None}
    # Megatron on a CPU sees other streams, which do nothing.
    names |= {name: getattr(torch.cuda, name) for name in ("Stream", "stream", "current_stream", "synchronize")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(full_cuda_graph, "_shared_capture_stream", None))
        # Of a class, and never cleared.
        buffers = full_cuda_graph.StaticBufferLoader.static_buffers
        stack.enter_context(patch.dict(buffers, training=[], validation=[]))
        for name, value in names.items():
            stack.enter_context(patch.object(full_cuda_graph.torch.cuda, name, value, create=True))
        yield


def _full_iteration(graphed: bool, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train as Megatron's loop does with ``--cuda-graph-impl full_iteration``, or without."""
    with _megatron() as (sim, mm), _graphs_of(sim):
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        model, optimizer = _built(mm, megatron_fsdp_cuda_graph_mode=True, **settings)
        losses = _losses(mm)
        tokens_of = torch.tensor(mm.SEQUENCE, dtype=torch.int, device=DEVICE)

        def forward_step(iterator: Iterator[Any], module: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            output = losses(module, next(iterator)["tokens"])
            return output, lambda output: (output.float().sum(), tokens_of.clone(), {})

        run = forward_backward_no_pipelining
        if graphed:
            run = FullCudaGraphWrapper(run, cuda_graph_warmup_steps=2)
        model.config.no_sync_func = model.no_sync
        for step in range(6):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            data = [{"tokens": rows} for rows in mm.tokens(step, 2).to(DEVICE)]
            run(
                forward_step_func=forward_step,
                data_iterator=[iter(data)] if graphed else iter(data),
                model=[model],
                num_microbatches=len(data),
                seq_length=mm.SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
            )
            success, _, _ = optimizer.step()
            assert success
        if graphed:
            assert len(FullCudaGraphWrapper.cuda_graph["training"]) > 100
            run.reset_cuda_graph()
        return mm.weights_of(model)


def _equal(settings: dict[str, Any]) -> None:
    expected, found = _full_iteration(False, settings), _full_iteration(True, settings)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_iteration_graphs_train_as_the_eager_loop(ranks: RankPool, strategy: str) -> None:
    ranks.run(2, _equal, {"strategy": strategy})
