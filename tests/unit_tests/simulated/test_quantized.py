"""Quantized weights on the simulated device: no unordered accesses, no waits of the host, the values of a CPU run."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import fsdp2
from megatron_fsdp import fully_shard
from tests.models import STRATEGIES, Block, batches, loss_of, main_weights, train_step
from tests.quantized_models import KINDS, arguments, exact, quantized_model
from tests.quantized_models import recompute as recomputing
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.models import BF16, assert_clean, sharded
from tests.simulated.pairs import parametrize_pairs
from tests.simulated.ranks import fake_ranks
from tests.slow import all_but_slow

pytestmark = pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors")
# One of each storage: without and with a history, scales in a plane, planes for each direction, packed values.
FORMATS = ("tensor", "delayed", "32x32", "mx", "nvfp4")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: torch.Tensor) -> None:
    for number, tokens in enumerate(micro_batches):
        with model.no_sync() if number + 1 < len(micro_batches) else contextlib.nullcontext():
            (loss_of(model, tokens) / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _simulation() -> Iterator[SimulatedDevice]:
    with fake_ranks(4), simulated_device(5.0) as sim:
        yield sim
        assert_clean(sim)


def _evaluate(model: nn.Module, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        model(tokens)


def _train(format: str, kind: str, settings: dict[str, Any]) -> None:
    """Steps with micro-batches and evaluations, in which the host does not wait from the first step on."""
    waits = "offload_optimizer" in settings
    with _simulation() as sim:
        model, optimizer = sharded(format=format, **arguments(kind), **settings)
        for step in batches(3, 2).to(DEVICE):
            with contextlib.nullcontext() if waits else sim.no_host_wait():
                _step(model, optimizer, step)
                _evaluate(model, step[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "mx"))
def test_strategies(ranks: RankPool, format: str, kind: str) -> None:
    ranks.run(1, _train, format, kind, {})


SETTINGS: dict[str, dict[str, Any]] = {
    "double buffer": {"fsdp_double_buffer": True},
    "offload": {"offload_optimizer": True},
    "bf16": BF16,
    "no prefetch": {"overlap_param_gather": False, "overlap_grad_reduce": False},
    "more in flight": {"max_unsharded_units": 3, "max_reducing_units": 3},
    "modules": {"enable_fine_grained_param_gather": True},
    "recomputed units": {"recomputed": "unit"},
    "recomputed layers": {"recomputed": "layer"},
    "recomputed units, double buffer": {"recomputed": "unit", "fsdp_double_buffer": True},
    "recomputed layers, double buffer": {"recomputed": "layer", "fsdp_double_buffer": True},
    "recomputed layers, no prefetch": {"recomputed": "layer", "overlap_param_gather": False},
}


@parametrize_pairs(
    format=all_but_slow(["delayed", "mx", "nvfp4"], "mx"),
    what=[*SETTINGS],
    kind=["optim", "optim_grads_params", "hybrid"],
)
def test_settings(ranks: RankPool, format: str, what: str, kind: str) -> None:
    ranks.run(1, _train, format, kind, SETTINGS[what])


@on_ranks(1)
@parametrize_pairs(format=["tensor", "mx"], reshard=[True, False], recompute=["", "unit", "layer"])
def test_fsdp2(format: str, reshard: bool, recompute: str) -> None:
    with _simulation() as sim:
        model = recomputing(quantized_model(format, place=DEVICE), recompute)
        for block in (module for module in model.modules() if isinstance(module, Block)):
            fsdp2.fully_shard(block, reshard_after_forward=reshard)
        fsdp2.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        for step in batches(3, 1).to(DEVICE):
            with sim.no_host_wait():
                train_step(model, optimizer, step[0])


def _trained(simulate: bool, format: str, kind: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    """The main weights after some steps on ranks that exchange values."""
    settings = dict(settings)
    recompute, dtype = settings.pop("recomputed", ""), settings.pop("dtype", torch.float32)
    data = batches(4, 2 * dist.get_world_size())[:, dist.get_rank() :: dist.get_world_size()]
    with simulated_device(2.0) if simulate else contextlib.nullcontext() as sim:
        place = DEVICE if simulate else torch.device("cpu")
        model = recomputing(quantized_model(format, dtype, place=place), recompute)
        if simulate:
            data, settings["device"] = data.to(DEVICE), DEVICE
        settings |= arguments(kind)
        model, optimizer = fully_shard(model, exact(model.parameters()), fsdp_unit_modules=[Block], **settings)
        for step in data:
            _step(model, optimizer, step)
        if simulate:
            assert_clean(sim)
        return list(main_weights(model).values())


def _values(format: str, kind: str, settings: dict[str, Any]) -> None:
    expected, found = (_trained(simulate, format, kind, settings) for simulate in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("format", all_but_slow(FORMATS, "mx"))
def test_values(ranks: RankPool, format: str, kind: str) -> None:
    ranks.run(2, _values, format, kind, {})


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("format", all_but_slow(["delayed", "mx"], "mx"))
def test_values_with_settings(ranks: RankPool, format: str, what: str) -> None:
    ranks.run(2, _values, format, "optim_grads_params", SETTINGS[what])


@on_ranks(1)
def test_bytes_of_the_other_direction_are_not_read() -> None:
    """A recomputed function that reads a weight, of which backward has gathered other bytes."""
    model = quantized_model("mx", place=torch.device("cpu"))
    for block in model.blocks:
        block.forward = lambda x, block=block: (
            x + checkpoint(lambda x: linear(linear(x, block.up.weight), block.down.weight), x, use_reentrant=False)
        )
    model, _ = fully_shard(model, exact(model.parameters()), fsdp_unit_modules=[Block])
    loss = loss_of(model, batches(1, 1)[0, 0])
    with pytest.raises(RuntimeError, match="The forward bytes of MXTensor are read while only others are unsharded"):
        loss.backward()
