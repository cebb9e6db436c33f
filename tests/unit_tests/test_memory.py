"""Memory of a rank, counted byte by byte: what it holds at rest, and the most it holds in a step.

The counter sees every CPU tensor of the process (tests/tensor_bytes.c). One process stands for rank 0 of eight, on
the fake process group, whose collectives need no memory of their own; gloo's do. Delays make the communication slow,
so that as much as may be in flight is in flight.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import DEVICE
from tests.tensor_bytes import TensorBytes, build, call_counted

RANKS = 8
WIDTH = 160
DEPTH = 6
DTYPES = {"fp32": (4, 4), "bf16": (2, 4)}  # bytes of a compute weight and of a gradient on its way

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors")


def _model(dtype: str) -> Any:
    """Of blocks whose rows leave little padding: what is counted is the engine's memory."""
    import torch

    from tests.models import TinyModel

    torch.manual_seed(0)
    model = TinyModel(width=WIDTH, depth=DEPTH, vocabulary=16)
    for block in model.blocks:
        block.up, block.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)
    return model.bfloat16() if dtype == "bf16" else model


def _warm_up(dtype: str) -> None:
    """Kernels keep scratch memory from their first call on."""
    from tests.models import loss_of

    loss_of(_model(dtype), _tokens()).backward()


def _tokens() -> Any:
    import torch

    return torch.zeros(2, 4, dtype=torch.int64)


def measure_activations(dtype: str) -> int:
    """The most that forward and backward of the unsharded model hold besides its weights and finished gradients."""
    from tests.models import loss_of

    _warm_up(dtype)
    model = _model(dtype)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    counter = TensorBytes()
    counter.reset()
    loss_of(model, _tokens()).backward()
    return counter.peak()


def measure_sharded(strategy: str, dtype: str, collective: float, compute: float) -> dict[str, int]:
    """Bytes of a rank that trains with the given delays, in seconds, of each collective and each block."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.fsdp import device
    from megatron_fsdp import fully_shard
    from tests.models import FP32_GRADS, Block, adamw, loss_of

    class SlowStream(device.CpuStream):
        def run(self, task: device.Task) -> device.Handle:
            return super().run(lambda: (time.sleep(collective), task(), time.sleep(collective))[1])

        def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
            return group

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    device._STREAMS["fake", None] = SlowStream()
    _warm_up(dtype)
    counter = TensorBytes()
    model = _model(dtype)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(compute))
        block.register_full_backward_hook(lambda *_: time.sleep(compute))
    sharded, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=FP32_GRADS,
    )
    built = counter.live()
    for _ in range(2):
        loss_of(sharded, _tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
    resting = counter.live()
    counter.reset()
    loss_of(sharded, _tokens()).backward()
    peak = counter.peak()
    units = [sum(group.layout.numel for group in unit.groups) for unit in sharded._units]
    return {
        "built": built,
        "resting": resting,
        "peak": peak,
        "root": units[0],
        "unit": max(units[1:]),
        "whole": sum(units),
        "shard": sum(group.layout.shard_numel for group in sharded.groups),
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tensor_bytes"))


ME = "tests.unit_tests.test_memory"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_resting_memory(library: Path, strategy: str, dtype: str) -> None:
    found = call_counted(library, f"{ME}:measure_sharded", strategy, dtype, 0.0, 0.0)
    compute, _ = DTYPES[dtype]
    # Main weights and AdamW's two moments, all in fp32; whole compute weights where they are not sharded. Where main
    # weights have the compute weights' dtype they are part of them.
    owned = found["whole"] if strategy == "no_shard" else found["shard"]
    main = 4 * owned if dtype == "bf16" or strategy == "optim_grads_params" else 0
    whole = 0 if strategy == "optim_grads_params" else compute * found["whole"]
    assert found["built"] == pytest.approx(main + whole, rel=0.02)
    assert found["resting"] == pytest.approx(main + whole + 8 * owned, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("collective", "compute"), [(0.0, 0.0), (0.02, 0.0), (0.004, 0.01), (0.02, 0.02)])
def test_peak_of_a_step(library: Path, dtype: str, collective: float, compute: float) -> None:
    """Resting shards, with those of the gradients, two gathered units, the gradients of one, and activations."""
    found = call_counted(library, f"{ME}:measure_sharded", "optim_grads_params", dtype, collective, compute)
    activations = call_counted(library, f"{ME}:measure_activations", dtype)
    compute_bytes, gradient_bytes = DTYPES[dtype]
    shards = found["resting"] + gradient_bytes * found["shard"]
    root = (compute_bytes + gradient_bytes) * found["root"]  # gathered throughout, and reduced at the end
    bound = shards + root + 2 * compute_bytes * found["unit"] + gradient_bytes * found["unit"] + activations
    assert found["peak"] <= bound
    if compute:  # where there is compute to run beside, what may be in flight is, and the bound is no larger than that
        assert found["peak"] > bound - compute_bytes * found["unit"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_flight_are_limited_where_weights_are_whole(library: Path, dtype: str) -> None:
    """With slow reductions and nothing to gather, backward waits rather than let gradients pile up."""
    found = call_counted(library, f"{ME}:measure_sharded", "optim_grads", dtype, 0.02, 0.0)
    activations = call_counted(library, f"{ME}:measure_activations", dtype)
    compute_bytes, gradient_bytes = DTYPES[dtype]
    shards = found["resting"] + gradient_bytes * found["shard"]
    # The gradients of the unit that is reduced, of the one that waits for it, and of the one that computes.
    units = gradient_bytes * found["unit"] + 2 * compute_bytes * found["unit"] + gradient_bytes * found["root"]
    assert found["peak"] <= shards + units + activations
