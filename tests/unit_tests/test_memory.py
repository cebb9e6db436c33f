"""Memory of a rank, counted byte by byte: between steps, and the peak within a step.

The counter sees every CPU tensor of the process (tests/tensor_bytes.c). One process stands for rank 0 of 8 to 4,096, on
the fake process group, whose collectives need no memory of their own; gloo's do. Delays make the communication slow,
so that as much as may be in flight is in flight. The formulas are those of docs/memory.md.
"""

import gc
import time
from typing import Any

import pytest

from tests.ranks import DEVICE
from tests.tensor_bytes import TensorBytes, build, call_counted

WIDTH = 160
DEPTH = 6
DTYPES = {"fp32": (4, 4), "bf16": (2, 4)}  # bytes of a compute weight and of a gradient on its way
# Bytes of a quantized weight in forward, in backward, and in both: values and scales.
FORMATS = {
    "tensor": (1.0, 1.0, 1.0),
    "32x32": (1 + 4 / 1024, 1 + 4 / 1024, 1 + 4 / 1024),
    "mx": (1 + 1 / 32, 1 + 1 / 32, 2 + 2 / 32),
    "nvfp4": (1 / 2 + 1 / 16, 1 / 2 + 1 / 16, 1 / 2 + 1 / 16),
}

pytestmark = [
    pytest.mark.every_strategy,
    pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors"),
]


def _model(dtype: str) -> Any:
    """Of blocks whose rows leave little padding: what is counted is the engine's memory."""
    import torch

    from tests.models import TinyModel

    torch.manual_seed(0)
    model = TinyModel(width=WIDTH, depth=DEPTH, vocabulary=16)
    for block in model.blocks:
        block.up, block.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)
    if dtype == "fp32":
        return model
    model = model.bfloat16()
    if dtype in FORMATS:
        from tests.quantized_models import FORMATS as QUANTIZE

        for layer in (layer for block in model.blocks for layer in (block.up, block.down)):
            layer.weight = torch.nn.Parameter(QUANTIZE[dtype](layer.weight))
    return model


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


def measure_all(cases: list[list]) -> list[dict[str, int]]:
    """:func:`measure_sharded` for each case, and the activations of the dtypes."""
    activations = {dtype: measure_activations(dtype) for dtype in dict.fromkeys(case[1] for case in cases)}
    results = []
    for case in cases:
        results.append(measure_sharded(*case) | {"activations": activations[case[1]]})
        gc.collect()
    return results


def measure_sharded(strategy: str, dtype: str, ranks: int, collective: float, compute: float) -> dict[str, int]:
    """Bytes of one of so many ranks; it trains with the given delays, in seconds, of each collective and block."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.fsdp.comm import streams
    from megatron_fsdp import fully_shard
    from tests.models import FP32_GRADS, Block, adamw, loss_of

    class SlowStream(streams.CpuStream):
        def run(self, task: streams.Task) -> streams.Handle:
            return super().run(lambda: (time.sleep(collective), task(), time.sleep(collective))[1])

        def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
            return group

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    streams._STREAMS["fake", None, ""] = SlowStream()
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
    units = [sum(group.layout.numel for group in unit.groups) for unit in sharded.engine.units]
    quantized = [[group.layout for group in unit.groups if group.storage] for unit in sharded.engine.units]
    dist.destroy_process_group()
    return {
        "quantized": sum(layout.numel for unit in quantized for layout in unit),
        "quantized_shard": sum(layout.shard_numel for unit in quantized for layout in unit),
        "quantized_unit": max(sum(layout.numel for layout in unit) for unit in quantized),
        "built": built,
        "resting": resting,
        "peak": peak,
        "root": units[0],
        "unit": max(units[1:]),
        "whole": sum(units),
        "parameters": len(list(sharded.engine.params())),
        "shard": sum(group.layout.shard_numel for group in sharded.engine.groups),
    }


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WORLDS = (8, 64, 512, 4096)
DELAYS = ((0.0, 0.0), (0.02, 0.0), (0.004, 0.01), (0.02, 0.02))
AT_REST = [(strategy, dtype, ranks, 0.0, 0.0) for strategy in STRATEGIES for dtype in DTYPES for ranks in WORLDS]
AT_PEAK = [("optim_grads_params", dtype, 8, *delays) for dtype in DTYPES for delays in DELAYS]
# Every strategy with one format, and every format with ZeRO-3.
QUANTIZED = [(strategy, "mx", 8, 0.004, 0.01) for strategy in STRATEGIES]
QUANTIZED += [(STRATEGIES[-1], format, 8, 0.004, 0.01) for format in FORMATS if format != "mx"]
WHOLE_WEIGHTS = [("optim_grads", dtype, 8, 0.02, 0.0) for dtype in DTYPES]


def fewest_and_most(cases: list[tuple]) -> list[Any]:
    """The cases; those between the fewest ranks and the most are slow."""
    return [c if c[2] in (WORLDS[0], WORLDS[-1]) else pytest.param(c, marks=pytest.mark.slow) for c in cases]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[tuple, dict[str, int]]:
    """The measurements of the selected cases, made in one process."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    cases = list(dict.fromkeys(selected))
    library = build(tmp_path_factory.mktemp("tensor_bytes"))
    return dict(zip(cases, call_counted(library, "tests.unit_tests.test_memory:measure_all", cases), strict=True))


@pytest.mark.parametrize("case", fewest_and_most(AT_REST), ids=str)
def test_resting_memory(measured: dict[tuple, dict[str, int]], case: tuple) -> None:
    found, (strategy, dtype, ranks, *_) = measured[case], case
    compute, _ = DTYPES[dtype]
    # Main weights and AdamW's two moments, all in fp32; full compute weights where they are not sharded. Where main
    # weights have the compute weights' dtype they are part of them. AdamW counts steps in a tensor per parameter.
    owned = found["whole"] if strategy == "no_shard" else found["shard"]
    main = 4 * owned if dtype == "bf16" or strategy == "optim_grads_params" else 0
    whole = 0 if strategy == "optim_grads_params" else compute * found["whole"]
    # Full gradients keep their memory on a CPU. Nothing else is kept for the next step.
    gradients = 4 * owned if strategy == "no_shard" else 0
    mesh = 4 * ranks  # the mesh lists its ranks
    assert found["built"] == pytest.approx(main + whole + mesh, rel=0.01)
    resting = main + whole + gradients + mesh + 8 * owned + 4 * found["parameters"]
    assert found["resting"] == pytest.approx(resting, rel=0.01)


def _bound(found: dict[str, int], dtype: str) -> int:
    """Peak: shards and their gradients, the root and two units unsharded, the gradients of one unit, activations."""
    compute, gradient = DTYPES[dtype]
    shards = found["resting"] + gradient * found["shard"]
    root = (compute + gradient) * found["root"]  # unsharded throughout, and reduced at the end
    return shards + root + (2 * compute + gradient) * found["unit"] + found["activations"]


@pytest.mark.parametrize("case", AT_PEAK, ids=str)
def test_peak_of_a_step(measured: dict[tuple, dict[str, int]], case: tuple) -> None:
    found, (_, dtype, _, _, compute_delay) = measured[case], case
    bound = _bound(found, dtype)
    assert found["peak"] <= bound
    if compute_delay:
        # Where there is compute to overlap, what may be in flight is: the bound is no larger than it has to be. The
        # gradients' shards are not all there when the most units are.
        compute, gradient = DTYPES[dtype]
        assert found["peak"] > bound - compute * found["unit"] - gradient * found["shard"]


@pytest.mark.parametrize("case", fewest_and_most([c for c in AT_REST if c[0] == "optim_grads_params"]), ids=str)
def test_peak_of_a_step_at_scale(measured: dict[tuple, dict[str, int]], case: tuple) -> None:
    assert measured[case]["peak"] <= _bound(measured[case], case[1])


@pytest.mark.parametrize("case", WHOLE_WEIGHTS, ids=str)
def test_gradients_in_flight_are_limited_where_weights_are_whole(
    measured: dict[tuple, dict[str, int]], case: tuple
) -> None:
    """With slow reductions and no unshards, backward waits instead of accumulating unreduced gradients."""
    found, (_, dtype, *_) = measured[case], case
    compute, gradient = DTYPES[dtype]
    shards = found["resting"] + gradient * found["shard"]
    # The gradients of the unit that is reduced, of the one that waits for it, and of the one that computes.
    units = gradient * found["unit"] + 2 * compute * found["unit"] + gradient * found["root"]
    assert found["peak"] <= shards + units + found["activations"]


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_memory_of_quantized_weights(measured: dict[tuple, dict[str, int]], case: tuple) -> None:
    """All matrices of the units are quantized. Main weights are always apart, and shards of all planes stay."""
    found, (strategy, dtype, ranks, *_) = measured[case], case
    forward, backward, both = FORMATS[dtype]
    sharded = strategy == "optim_grads_params"
    owned = found["whole"] if strategy == "no_shard" else found["shard"]
    plain = found["whole"] - found["quantized"]
    weights = both * found["quantized_shard"] if sharded else both * found["quantized"] + 2 * plain
    gradients = 4 * owned if strategy == "no_shard" else 0
    resting = (4 + 8) * owned + weights + gradients + 4 * ranks + 4 * found["parameters"]
    assert found["resting"] == pytest.approx(resting, rel=0.01)
    if not sharded:
        return
    # While a unit computes, the reference also holds its values in bf16, for the pass.
    unit = max(forward, backward) * found["quantized_unit"] + 2 * (found["unit"] - found["quantized_unit"])
    root = (2 + 4) * found["root"]
    shards = found["resting"] + 4 * found["shard"]
    bound = shards + root + 2 * unit + 2 * found["quantized_unit"] + 4 * found["unit"] + found["activations"]
    assert found["peak"] <= bound


def measure_optimizer_step(hooked: bool, at_once: int = 0) -> dict[str, int]:
    """The most that an optimizer's step holds besides what it holds afterwards, and the elements of units.

    Args:
        hooked: With a pre-hook of the user, which has to see all parameters.
        at_once: As on a GPU, with this many elements in a part.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.fsdp.optim import hooks
    from megatron_fsdp import fully_shard
    from tests.models import Block, loss_of

    if at_once:
        hooks.is_on_host, hooks.ELEMENTS_AT_ONCE = (lambda device: False), at_once
    hooks.ELEMENTS_ON_HOST = 1  # these units are small
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counter = TensorBytes()
    model = _model("fp32")
    sharded, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), foreach=True),
        fsdp_unit_modules=[Block],
        zero_dp_strategy="no_shard",
    )
    seen: list[int] = []
    if hooked:
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(len(o.param_groups[0]["params"])))
    for _ in range(2):
        loss_of(sharded, _tokens()).backward()
        counter.reset()
        optimizer.step()
    assert seen in ([], [len(list(sharded.parameters()))] * 2)
    units = [sum(group.layout.numel for group in unit.groups) for unit in sharded.engine.units]
    return {"temporary": counter.peak() - counter.live(), "unit": max(units), "whole": sum(units)}


@pytest.mark.parametrize("hooked", [False, True])
def test_optimizer_updates_one_unit_at_a_time(tmp_path_factory: pytest.TempPathFactory, hooked: bool) -> None:
    library = build(tmp_path_factory.mktemp("tensor_bytes"))
    found = call_counted(library, "tests.unit_tests.test_memory:measure_optimizer_step", hooked)
    # A foreach update of all units at once takes four bytes per element of the model.
    assert found["temporary"] <= 4.1 * found["unit"] < 4 * found["whole"] * 0.9


def test_optimizer_updates_some_units_at_a_time_on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    library = build(tmp_path_factory.mktemp("tensor_bytes"))
    small, large = (
        call_counted(library, "tests.unit_tests.test_memory:measure_optimizer_step", False, at_once)
        for at_once in (1, 2**40)
    )
    assert small["temporary"] <= 4.1 * small["unit"] < 3.9 * large["whole"] <= large["temporary"]
