"""Fixed buffers of quantized weights: nothing grows after the first step, and ranks use the same windows of NCCL."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.buffers.pool import Buffer
from megatron_fsdp import FSDPConfig, MegatronFSDP
from tests.models import Block, batches, loss_of
from tests.nccl_recorder import Event, Recorder, assert_alike
from tests.quantized_models import quantized_model, recompute, sharded_model, train
from tests.ranks import DEVICE, RankPool
from tests.slow import all_but_slow

FORMATS = ("tensor", "delayed", "32x32", "mx", "nvfp4")


def _allocations(format: str, kind: str, recomputed: str) -> tuple[list[list[Buffer]], list[list[int]]]:
    """The buffers at the end of each step, and the addresses of all planes."""
    model, optimizer = sharded_model(kind, recompute(quantized_model(format), recomputed), fsdp_double_buffer=True)
    made, places = [], []
    for step in batches(5, dist.get_world_size()):
        if kind != "hybrid":  # its scratch memory for gradients of further micro-batches depends on timing
            with model.no_sync():
                loss_of(model, step[dist.get_rank()]).backward()
        train(model, optimizer, step[None])
        with torch.no_grad():
            model(step[0])
        assert model.engine.pool is not None
        made.append(model.engine.pool.buffers())
        planes = [plane for group in model.engine.groups for plane in group.weights.planes]
        places.append([plane.buffer.flat.data_ptr() for plane in planes])
    return made, places


@pytest.mark.parametrize("recomputed", ["", "unit", "layer"])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params", "hybrid"])
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "mx"))
def test_nothing_is_allocated_in_the_steady_state(ranks: RankPool, format: str, kind: str, recomputed: str) -> None:
    for made, places in ranks.run(4 if kind == "hybrid" else 2, _allocations, format, kind, recomputed):
        assert made[0] and made[1:] == [made[0]] * 4
        assert places[1:] == [places[0]] * 4


def _gradients(format: str, kind: str, recomputed: str, registered: bool) -> tuple[list[Event], list[float]]:
    """The registered and sent tensors, and the losses."""
    with Recorder().installed() if registered else nullcontext(None) as recorder:
        config = FSDPConfig(zero_dp_strategy=kind, nccl_ub=registered, fsdp_double_buffer=True)
        model: Any = recompute(quantized_model(format), recomputed)
        sharded = MegatronFSDP(model, fsdp_unit_modules=[Block], device="cpu", config=config)
        losses = []
        for step in batches(4, dist.get_world_size()):
            loss = loss_of(sharded, step[dist.get_rank()])
            loss.backward()
            with torch.no_grad():
                for param in sharded.engine.params():
                    param.main.sub_(param.main.grad, alpha=0.25)
            sharded.install_optimized_model_weights()
            sharded.zero_grad_buffer()
            losses.append(loss.item())
        del sharded
    return [] if recorder is None else recorder.events, losses


def _registers(format: str, kind: str, recomputed: str) -> list[Event]:
    events, found = _gradients(format, kind, recomputed, True)
    assert found == _gradients(format, kind, recomputed, False)[1]
    return events


@pytest.mark.skipif(DEVICE == "cuda", reason="records what is called on a CPU")
@pytest.mark.parametrize("recomputed", ["", "unit"])
@pytest.mark.parametrize("kind", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "mx"))
def test_all_ranks_gather_into_the_same_windows(ranks: RankPool, format: str, kind: str, recomputed: str) -> None:
    found = ranks.run(2, _registers, format, kind, recomputed)
    assert_alike(found)
    for events in found:
        windows = [place for place, event in enumerate(events) if event.what == "window"]
        gathers = [event for event in events[windows[-1] :] if event.what == "all_gather"]
        if kind == "optim_grads_params":
            assert gathers and all(event.details[0] is not None for event in gathers)
