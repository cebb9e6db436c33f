"""Mistakes planted where quantized weights are unsharded: the simulated device must find each, and name its place."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.streams import CudaStream, Handle
from megatron.fsdp.quantized.reference.base import ReferenceStorage
from megatron.fsdp.quantized.reference.float8 import Float8Storage
from megatron.fsdp.quantized.reference.mx import MXStorage
from megatron.fsdp.quantized.storage import Direction
from megatron.fsdp.runtime.unit import Unit, WeightState
from megatron_fsdp import fully_shard
from tests.models import Block, batches, loss_of
from tests.quantized_models import quantized_model, recompute
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.faults import Ended, task_does_not_wait
from tests.simulated.ranks import fake_ranks

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")


def _train(format: str, settings: dict[str, Any], plant: tuple[Any, str, Callable[..., Any]] | None) -> SimulatedDevice:
    """Three steps, with a method replaced by a function that gets the method as its first argument."""
    settings = dict(settings)
    with fake_ranks(4), simulated_device(5.0) as sim, pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            owner, name, version = plant
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args: version(original, *args))
        model: Any = recompute(quantized_model(format, place=DEVICE), settings.pop("recompute", ""))
        model.blocks.requires_grad_(not settings.pop("frozen", False))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, foreach=True)
        model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block], device=DEVICE, **settings)
        for step in batches(3, 1).to(DEVICE):
            loss_of(model, step[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sim


def _used_before_the_wait(prepare: Callable[..., None], unit: Unit, direction: Direction) -> None:
    for storage, params in unit.quantized:
        storage.before_use(params, direction)
    prepare(unit, direction)


def _forward_only_not_waited_for(wait: Callable[..., None], weights: WeightBuffer) -> None:
    # That of the planes of forward is the second.
    for handle in list(weights.unsharding)[1:]:
        weights.unsharding[Ended()] = weights.unsharding.pop(handle)
    wait(weights)


def _resharded_before_backward(use: Callable[..., None], unit: Unit, state: WeightState) -> None:
    use(unit, state)
    if state is WeightState.BACKWARD and not unit.is_root:
        unit.reshard()
        unit._set_versions(readable=True)  # autograd would notice


def _quantized_by_compute(unshard: Callable[..., Handle | None], weights: WeightBuffer, *planes: Any) -> Handle | None:
    handle = unshard(weights, *planes)
    if weights.batch is not None:
        for storage, shards in weights.batch._shards.values():
            storage.quantize(shards, lambda values: None)
    return handle


class Fault(NamedTuple):
    """A mistake, format and settings with which it matters, and parts of what must be reported of one race."""

    plant: tuple[Any, str, Callable[..., Any]]
    format: str
    settings: dict[str, Any]
    report: tuple[str, ...]


GATHER = ("allgather_base_ writes", "weights.py", " _unshard")
DECODE = ("reads on stream 0", " decode", " before_use")
ZERO_1, DOUBLE_BUFFER = {"zero_dp_strategy": "optim"}, {"fsdp_double_buffer": True}
FAULTS: dict[str, Fault] = {
    "main weights are quantized before their update": Fault(
        (CudaStream, "run", task_does_not_wait),
        "tensor",
        {},
        ("reads on stream 2", " quantize", "quantizing.py", "writes on stream 0", " _train"),
    ),
    "scales are written while backward reads them": Fault(
        (CudaStream, "run", task_does_not_wait), "tensor", {}, ("copy_ writes", " quantize", *DECODE)
    ),
    "bytes are written while backward reads them": Fault(
        (CudaStream, "run", task_does_not_wait), "mx", ZERO_1, ("copy_ writes", " quantize", *DECODE)
    ),
    "weights are prepared before the wait": Fault(
        (Unit, "prepare", _used_before_the_wait), "mx", DOUBLE_BUFFER, (*GATHER, *DECODE)
    ),
    "planes of a recomputation are not waited for": Fault(
        (WeightBuffer, "wait", _forward_only_not_waited_for), "mx", {"recompute": "unit"}, (*GATHER, *DECODE)
    ),
    "slot is gathered into while weights are decoded": Fault(
        (Unit, "use", _resharded_before_backward),
        "mx",
        {**DOUBLE_BUFFER, "frozen": True},
        (*GATHER, "reads on stream 0", " decode"),
    ),
    "quantized in the compute stream as well": Fault(
        (WeightBuffer, "unshard", _quantized_by_compute), "nvfp4", {}, ("writes on stream 0", " quantize", *GATHER[1:])
    ),
}


def _find(what: str) -> None:
    fault = FAULTS[what]
    assert _train(fault.format, fault.settings, None).races == []
    reports = [str(race) for race in _train(fault.format, fault.settings, fault.plant).races]
    assert any(all(part in report for part in fault.report) for report in reports), "\n".join(reports[:3])


@pytest.mark.parametrize("what", FAULTS)
def test_races_are_found(ranks: RankPool, what: str) -> None:
    ranks.run(1, _find, what)


def _keeps_derived() -> None:
    """Dequantized weights that are kept would be noticed as memory."""
    left_out = (ReferenceStorage, "after_use", lambda *unused: None)
    assert _train("mx", {}, left_out).peak_bytes > 1.2 * _train("mx", {}, None).peak_bytes


def test_derived_weights_that_are_kept_are_found(ranks: RankPool) -> None:
    ranks.run(1, _keeps_derived)


def _streams() -> None:
    for storage in (Float8Storage, MXStorage):
        found: set[int] = set()

        def quantize(original: Callable[..., None], *args: Any, found: set[int] = found) -> None:
            found.add(torch.cuda.current_stream().cuda_stream)
            original(*args)

        _train("mx" if storage is MXStorage else "tensor", {}, (storage, "quantize", quantize))
        # The first is that of the compute, where the model was built before it was sharded.
        assert len(found - {0}) == 1


def test_weights_are_quantized_in_one_stream_beside_the_compute(ranks: RankPool) -> None:
    ranks.run(1, _streams)
