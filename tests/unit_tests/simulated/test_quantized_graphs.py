"""A replayed graph of an iteration quantizes weights as an eager loop does."""

import contextlib
from typing import Any

import pytest
import torch

from megatron_fsdp import fully_shard
from tests.models import STRATEGIES, Block, batches, loss_of, main_weights
from tests.quantized_models import exact, quantized_model, recompute
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool
from tests.simulated.device import DEVICE, simulated_device
from tests.simulated.graphs import SimulatedGraph
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")
STEPS, MICRO_BATCHES, WARM_UP = 6, 2, 2
FORMATS = ("tensor", "delayed", "32x32", "mx", "nvfp4")


class Loop:
    """Trains a model on the simulated device.

    Args:
        format: Format of its weights.
        step_in_graph: The optimizer's step is part of an iteration that is captured.
        settings: Those of ``fully_shard``, and which modules are recomputed.
    """

    def __init__(self, format: str, step_in_graph: bool, settings: dict[str, Any]) -> None:
        settings = dict(settings)
        model = recompute(quantized_model(format, place=DEVICE), settings.pop("recompute", ""))
        settings |= {"fsdp_unit_modules": [Block], "device": DEVICE}
        self.model, self.optimizer = fully_shard(model, exact(model.parameters()), **settings)
        self.step_in_graph = step_in_graph
        self.micro_batches = batches(1, MICRO_BATCHES)[0].to(DEVICE)

    def iteration(self) -> None:
        """What may be captured."""
        for number, tokens in enumerate(self.micro_batches):
            with self.model.no_sync() if number + 1 < MICRO_BATCHES else contextlib.nullcontext():
                loss_of(self.model, tokens).backward()
        if self.step_in_graph:
            self.step()

    def step(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> torch.Tensor:
        """What an evaluation sees."""
        with torch.no_grad():
            return self.model(self.micro_batches[0]).clone()


def _trained(format: str, graphed: bool, step_in_graph: bool, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Train, and return what evaluations saw and the main weights at the end."""
    settings = {"cuda_graph_mode": True, **settings}
    evaluates, seen = settings.pop("evaluates", False), []
    with simulated_device() as sim:
        loop, graph = Loop(format, step_in_graph, settings), SimulatedGraph(sim)
        for number, micro_batches in enumerate(batches(STEPS, MICRO_BATCHES)):
            loop.micro_batches.copy_(micro_batches.to(DEVICE))
            if graphed and number == WARM_UP:
                with graph.capture():
                    loop.iteration()
            if len(graph):
                graph.replay()
            else:
                loop.iteration()
            if not step_in_graph:
                loop.step()
            if evaluates:
                seen.append(loop.evaluate())
        assert not sim.races, "\n".join(map(str, sim.races[:2]))
        return [*seen, *main_weights(loop.model).values()]


def _equal(format: str, step_in_graph: bool, settings: dict[str, Any]) -> None:
    expected, found = (_trained(format, graphed, step_in_graph, settings) for graphed in (False, True))
    assert all(value.isfinite().all() for value in expected)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    if not settings.get("evaluates"):
        without_mode = _trained(format, False, False, {**settings, "cuda_graph_mode": False})
        for one, other in zip(without_mode, found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("step_in_graph", [False, True], ids=["step outside", "step inside"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "delayed"))
def test_a_replayed_iteration_quantizes_as_an_eager_one(
    ranks: RankPool, format: str, strategy: str, step_in_graph: bool
) -> None:
    ranks.run(2, _equal, format, step_in_graph, {"zero_dp_strategy": strategy})


SETTINGS: dict[str, dict[str, Any]] = {
    "double buffer": {"fsdp_double_buffer": True},
    "evaluation between": {"evaluates": True},
    "recomputed units": {"recompute": "unit"},
    "recomputed layers": {"recompute": "layer"},
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("format", all_but_slow(["delayed", "mx"], "mx"))
def test_settings(ranks: RankPool, format: str, what: str) -> None:
    ranks.run(2, _equal, format, True, SETTINGS[what])


def _evaluates_between(format: str) -> None:
    """Evaluations change nothing."""
    expected = _trained(format, False, False, {"cuda_graph_mode": False})
    found = _trained(format, True, True, {"evaluates": True})
    for one, other in zip(expected, found[STEPS:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("format", all_but_slow(FORMATS, "delayed"))
def test_evaluations_do_not_change_training(ranks: RankPool, format: str) -> None:
    ranks.run(2, _evaluates_between, format)
