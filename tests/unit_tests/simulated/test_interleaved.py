"""A schedule by hand of two micro-batches at once, on the simulated device: no races, and mistakes in it are found."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.unit import Unit
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.interleaved import interleaved_step, ordinary_step
from tests.models import FP32_GRADS, Block, TinyModel, adamw, batches, main_weights
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.faults import no_wait_for_unshard

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")
MICRO_BATCHES = 3


def _delayed_step(model: MegatronFSDP, micro_batches: torch.Tensor) -> None:
    interleaved_step(model, micro_batches, delay=True)


def _train(
    sim: SimulatedDevice, strategy: str, dtype: torch.dtype, step: Callable[..., Any] = interleaved_step
) -> dict[str, torch.Tensor]:
    """The weights after three steps, in which the host does not wait once the order of communication is known."""
    torch.manual_seed(3)
    model = fully_shard_model(
        TinyModel(depth=5).to(DEVICE, dtype),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
        device=DEVICE,
    )
    optimizer = fully_shard_optimizer(adamw(model.parameters()))
    data = batches(3, MICRO_BATCHES * dist.get_world_size())[:, dist.get_rank() :: dist.get_world_size()].to(DEVICE)
    for number, micro_batches in enumerate(data):
        with sim.no_host_wait() if number else contextlib.nullcontext():
            step(model, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    return main_weights(model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("optim_grads", torch.float32),
        ("optim_grads_params", torch.bfloat16),
        pytest.param("no_shard", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("optim", torch.float32, marks=pytest.mark.slow),
        pytest.param("optim_grads", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("optim_grads_params", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_it_equals_the_ordinary_loop(strategy: str, dtype: torch.dtype) -> None:
    found = []
    for step in (ordinary_step, interleaved_step, _delayed_step):
        with simulated_device(kernel_time=5.0) as sim:
            found.append(_train(sim, strategy, dtype, step))
            assert not sim.races, "\n".join(map(str, sim.races[:3]))
            assert len(sim.timeline.streams) > 1
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]) and torch.equal(value, found[2][name]), name


# Mistakes ----------------------------------------------------------------------------------------------------------


def _let_go_of_both(let_go: Callable[..., None], unit: Unit, direction: Direction) -> None:
    unit.held_by.clear()
    let_go(unit, direction)


def _train_with(owner: type, name: str, version: Callable[..., None]) -> list[str]:
    """The reported races of a run in which ``version`` replaces a method, which it gets as its first argument."""
    original = getattr(owner, name)
    with simulated_device(kernel_time=5.0) as sim, pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args: version(original, *args))
        _train(sim, "optim_grads_params", torch.float32)
        return [str(race) for race in sim.races]


@on_ranks(2)
def test_a_missing_wait_is_found() -> None:
    expected = ("_allgather_base_ writes", " _unshard", " hold", "addmm reads on stream 0", " forward_block")
    reports = _train_with(WeightBuffer, "wait", no_wait_for_unshard)
    assert any(all(part in report for part in expected) for report in reports), "\n".join(reports[:3])


@on_ranks(2)
def test_weights_that_are_freed_while_the_other_micro_batch_needs_them_are_found() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _train_with(Unit, "let_go", _let_go_of_both)
