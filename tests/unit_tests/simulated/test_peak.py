"""Peak memory on the simulated device, whatever the ratio of a kernel's time to the time of its launch.

The bytes are those that the caching allocator has in use: memory that is allocated, and memory that is free but waits
for another stream. The bounds are those of docs/memory.md.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard
from tests.models import FP32_GRADS, STRATEGIES, Block, TinyModel, loss_of, train_step
from tests.ranks import DEVICE as REAL_DEVICE
from tests.ranks import RankPool, on_ranks
from tests.simulated.device import DEVICE, SimulatedDevice, simulated_device
from tests.simulated.pairs import parametrize_pairs
from tests.simulated.ranks import fake_ranks

pytestmark = [
    pytest.mark.skipif(REAL_DEVICE == "cuda", reason="computes on CPU tensors"),
]
WIDTH, DEPTH = 64, 8
# Time of a kernel; its launch takes 1. The host runs ahead.
KERNEL_TIMES = [1.0, 2.0, 10.0]
DTYPES = {"fp32": (4, 4), "bf16": (2, 4)}  # bytes of a compute weight and of a gradient that is sent


def _model(dtype: str) -> nn.Module:
    """Blocks whose rows leave little padding, of many weights: one gradient is small compared with the unit's."""
    model = TinyModel(width=WIDTH, depth=DEPTH, vocabulary=16)
    for block in model.blocks:
        block.up = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(7)], nn.Linear(WIDTH, 3 * WIDTH))
        block.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
    return model.to(DEVICE, torch.bfloat16 if dtype == "bf16" else torch.float32)


def _peak(sim: SimulatedDevice, model: nn.Module, tokens: torch.Tensor) -> int:
    sim.reset_peak()
    loss_of(model, tokens).backward()
    return sim.peak_bytes


def _activations(sim: SimulatedDevice, dtype: str, tokens: torch.Tensor) -> int:
    """The most that forward and backward of the unsharded model hold besides its weights and finished gradients."""
    model = _model(dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    before = sim.memory.allocator.allocated
    return _peak(sim, model, tokens) - before


def _settings(two_axes: bool) -> dict[str, Any]:
    if not two_axes:
        return {}
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": "optim",
    }


def _check(strategy: str, dtype: str, kernel_time: float, two_axes: bool) -> None:
    compute, gradient = DTYPES[dtype]
    with fake_ranks(8), simulated_device(kernel_time) as sim:
        tokens = torch.zeros(1, 2, dtype=torch.int64).to(DEVICE)
        activations = _activations(sim, dtype, tokens)
        model = _model(dtype)
        sharded, optimizer = fully_shard(
            model,
            torch.optim.AdamW(model.parameters(), foreach=True),
            device=DEVICE,
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            mixed_precision_policy=FP32_GRADS,
            **_settings(two_axes),
        )
        del model
        for _ in range(2):
            train_step(sharded, optimizer, tokens)
        resting = sim.memory.allocator.allocated
        peak = _peak(sim, sharded, tokens)
        groups = sharded.engine.groups
        units = [sum(group.layout.numel for group in unit.groups) for unit in sharded.engine.units]
        owned = sum(units) if strategy == "no_shard" else sum(group.weights.main.numel() for group in groups)
        bound = resting + gradient * owned + (compute + gradient) * units[0] + activations
        bound += (3 * compute + gradient) * max(units[1:])
        assert peak <= bound, f"{peak:,} bytes; {bound:,} expected"
        assert not sim.races


@parametrize_pairs(strategy=STRATEGIES, dtype=[*DTYPES], kernel_time=KERNEL_TIMES)
def test_the_peak_does_not_depend_on_how_far_the_host_is_ahead(
    ranks: RankPool, strategy: str, dtype: str, kernel_time: float
) -> None:
    ranks.run(1, _check, strategy, dtype, kernel_time, False)


@pytest.mark.parametrize("kernel_time", KERNEL_TIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hybrid(ranks: RankPool, dtype: str, kernel_time: float) -> None:
    ranks.run(1, _check, "optim_grads_params", dtype, kernel_time, True)


@on_ranks(1)
def test_recorded_memory_piles_up_under_a_slow_device() -> None:
    """A buffer per layer that another stream reads, held by ``record_stream`` or until compute has waited."""
    peaks = {}
    for recorded in (True, False):
        with simulated_device(kernel_time=10.0) as sim:
            stream = torch.cuda.Stream()
            for _ in range(40):
                buffer = torch.zeros(1000, device=DEVICE)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    buffer.sum()
                if recorded:
                    buffer.record_stream(stream)
                else:
                    torch.cuda.current_stream().wait_stream(stream)
                del buffer
            peaks[recorded] = sim.peak_bytes
            assert not sim.races
    assert peaks[False] < 3 * 4000 and peaks[True] > 20 * 4000
