"""The predictor against what a step on ranks allocates and communicates, and its simulation against literal times."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tests.unit_tests.test_memory as measured_memory
from benchmarks import model
from benchmarks.suite.gpu import MODELS
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.mcore.cpu.replacements import storage_copier
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.optim.hooks import attach_optimizer
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.estimate import AxisSizes, estimate_outline, outline, usage
from megatron.fsdp.tools.predict import (
    Device,
    Link,
    Prediction,
    Topology,
    calibration,
    ghosts,
    plan,
    predict,
    replay,
)
from megatron.fsdp.tools.predict.ghosts import Cost, Ghosts, Memory
from megatron.fsdp.tools.predict.play import Simulation
from megatron.fsdp.tools.predict.record import Change, Mark, Message, Recorder, Wait, Work, fake_ranks
from megatron.fsdp.tools.program import unit_classes
from scripts import memory_chart
from tests.models import FP32_GRADS, TinyModel
from tests.models import Block as TinyBlock
from tests.ranks import DEVICE
from tests.tensor_bytes import TensorBytes, build, call_counted

WIDTH, ROWS = 192, 256
CPU = Device("cpu", None, {"float32": 1e10}, 1e10, runs_ahead=False, cores=2)
LINK = Link("network", 1e9, 1e-4)
PAIR = Topology(2)


class Block(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _model(kind: str) -> nn.Module:
    blocks = [Block(kind == "recomputed") for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 2000))
    return model.bfloat16() if kind == "bf16" else model


def _batch(kind: str) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)


def _config(strategy: int) -> FSDPConfig:
    return FSDPConfig(strategy, mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32))


def _predict(
    strategy: int | FSDPConfig, kind: str = "plain", device: Device = CPU, ranks: Topology = PAIR
) -> Prediction:
    return predict(
        lambda: _model(kind),
        lambda: _batch(kind),
        config=strategy if isinstance(strategy, FSDPConfig) else _config(strategy),
        units=[Block],
        ranks=ranks,
        device=device,
        link=LINK,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )


def measure(strategy: int, kind: str, rank: int, store: str) -> list[int]:
    """Live bytes of tensors at the peak of the third step, and after it, on one of two ranks over gloo."""
    counter = TensorBytes()
    child = None
    if rank == 0:
        code = f"from tests.unit_tests.test_predict import measure; measure({strategy}, {kind!r}, 1, {store!r})"
        child = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    torch.manual_seed(0)
    # oneDNN's products of bf16 keep memory of their own, which the counter sees and no tensor has.
    torch.backends.mkldnn.set_flags(_enabled=False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = ShardedModel(_model(kind), _config(strategy), unit_modules=[Block])
    optimizer = torch.optim.AdamW(model.parameters())
    attach_optimizer(optimizer)
    for _ in range(3):
        counter.reset()
        loss = model(_batch(kind)).float().square().mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    found = [counter.peak(), counter.live()]
    dist.barrier()
    dist.destroy_process_group()
    assert child is None or child.wait(100) == 0
    return found


CASES = [(0, "plain"), (2, "bf16"), (3, "recomputed")]


@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_memory_of_a_step(strategy: int, kind: str, tmp_path: Path) -> None:
    predicted = _predict(strategy, kind)
    arguments = strategy, kind, 0, str(tmp_path / "store")
    peak, resting = call_counted(build(tmp_path), "tests.unit_tests.test_predict:measure", *arguments)
    assert predicted.peak.total == pytest.approx(peak, rel=0.03)
    assert predicted.timeline[-1].total == pytest.approx(resting, rel=0.03)


# On an NVIDIA H200 with torch 2.11, 2026-11-26: MiB at the peak, and milliseconds, of which one of 8 fake ranks spends
# none on communication.
MEASURED = {("1 B", 1): (20703.4, 102.3), ("8 B, 4 layers", 8): (6961.6, 55.0)}


@pytest.mark.parametrize(("name", "ranks"), MEASURED)
def test_a_step_that_a_gpu_has_measured(name: str, ranks: int) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    predicted = predict(
        lambda: model.build_model(MODELS[name], True).bfloat16(),
        lambda: model.batch(32_000, 4096, 0, 0),
        config=FSDPConfig(3, mixed_precision_policy=policy),
        units=[model.Block],
        ranks=Topology(ranks),
        device=plan.cluster_of("h200").device,
        link=Link("none", 1e18, 0.0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        loss=model.loss_of,
    )
    assert predicted.peak.total / 2**20 == pytest.approx(MEASURED[name, ranks][0], rel=0.02)
    assert 1e3 * predicted.step_seconds == pytest.approx(MEASURED[name, ranks][1], rel=0.1)


def _simulated(program: list[Any], device: Device = CPU, per_host: int = 1) -> Simulation:
    simulation = Simulation(device, lambda message: LINK, per_host)
    simulation.play(program)
    return simulation


def _second() -> Cost:
    return Cost("copy_", "memory", "float32", 0, 10**10)


def test_time_of_overlapping_streams() -> None:
    gather = Work("", [Message("_allgather_base_", 2, 1, 4 * 10**9)])  # 2 GB at 1 GB/s
    assert _simulated([gather, _second(), Wait(gather)]).now == pytest.approx(2.0, rel=1e-3)
    assert _simulated([gather, Wait(gather), _second()]).now == pytest.approx(3.0, rel=1e-3)


def test_memory_of_a_collective_counts_until_it_is_waited_for() -> None:
    """However late another rank takes part in it."""
    buffer, made = Memory("communication buffers", 0), Memory("temporary", 0)
    message = Message("_allgather_base_", 2, 1, 2 * 10**9)
    gather = Work("", [Change(buffer, 8), message, Change(buffer, -8)])
    never = Work("", [Change(buffer, 2), message, Change(buffer, -2)])
    for program in ([gather, _second(), _second(), Change(made, 4), Wait(gather)], [never, _second(), Change(made, 4)]):
        changes = [each.bytes for each in _simulated(program).allocations]
        assert changes == [changes[0], 4, -changes[0]]


def test_time_of_shared_cores() -> None:
    busy = Work("", [_second()])
    alone = Device("cpu", None, {"float32": 1e10}, 1e10, runs_ahead=False, cores=2)
    assert _simulated([busy, _second()], alone, per_host=1).now == pytest.approx(1.0)
    assert _simulated([busy, _second()], alone, per_host=2).now == pytest.approx(2.0)


def test_messages_of_a_group_keep_their_order() -> None:
    first, second = Mark(), Mark()
    reduction = Work("", [_second(), Message("_reduce_scatter_base_", 2, 1, 2 * 10**9), first])
    gather = Work("second", [Message("_allgather_base_", 2, 1, 2 * 10**9), second])
    _simulated([reduction, gather])
    assert (first.seconds, second.seconds) == pytest.approx((2.0, 3.0), rel=1e-3)


def test_an_all_to_all_sends_through_the_own_network_card() -> None:
    cluster = plan.cluster_of("h100")  # 8 GPUs per host, with 450 GB/s inside and 50 GB/s per card

    def seconds(name: str, ranks: int, step: int = 1) -> float:
        simulation = Simulation(cluster.device, cluster.link_of, 1)
        simulation.play([Message(name, ranks, step, 64 * 10**9)])
        return simulation.now

    assert seconds("alltoall_base_", 64) == pytest.approx(56 / 50 + 5e-6, rel=1e-9)  # to 56 ranks of other hosts
    assert seconds("alltoall_base_", 8) == pytest.approx(56 / 450 + 2e-6, rel=1e-9)
    assert seconds("alltoall_base_", 8, 8) == pytest.approx(56 / 50 + 5e-6, rel=1e-9)
    assert seconds("_reduce_scatter_base_", 64) == pytest.approx(63 / 400 + 35e-6, rel=1e-9)


def test_groups_side_by_side_share_the_line_between_data_centers() -> None:
    plain = plan.cluster_of("h100")
    cluster = dataclasses.replace(plain, site=512, line=(12.5e9, 0.02))

    def seconds(name: str, ranks: int, step: int = 1) -> float:
        simulation = Simulation(cluster.device, cluster.link_of, 1)
        simulation.play([Message(name, ranks, step, 2 * 10**9)])
        return simulation.now

    # All gather from all: each line carries all bytes once, and 127 hops between hosts come to one between sites.
    assert seconds("_allgather_base_", 1024) == pytest.approx(2 / 12.5 * 1023 / 1024 + 0.02 + 127 * 5e-6, rel=1e-6)
    # Each of 512 pairs sums its shard of the gradients, there and back.
    assert seconds("allreduce_", 2, 512) == pytest.approx(2 * 512 / 12.5 + 2 * 0.020005, rel=1e-6)
    assert cluster.link(512) == plain.link(512) and cluster.link(64, 8) == plain.link(64, 8)
    assert cluster.link(1024).all_to_all == pytest.approx(12.5e9 * 1023 / 512 / 512, rel=1e-6)
    # A few bytes that all ranks sum go from host to host and once over the line, also with HSDP.
    model, batch = lambda: _model("plain"), lambda: _batch("plain")
    found = plan.plan(model, batch, units=[Block], ranks=1024, cluster=cluster)
    seconds_of = {choice.name: choice.prediction.step_seconds for choice in found}
    assert 0.04 < seconds_of["HSDP 2 x 512"] < 0.5


def test_exchanged_gradients_are_an_all_to_all() -> None:
    gpu = Device("gpu", None, {"float32": 1e13, "bfloat16": 1e13}, 1e12)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.float32)
    seconds = [
        predict(
            lambda: _model("bf16"),
            lambda: _batch("bf16"),
            config=FSDPConfig(3, mixed_precision_policy=policy, exchange_gradients=exchanged),
            units=[Block],
            ranks=PAIR,
            device=gpu,
            link=Link("network", 1e12, 0.0, all_to_all=1e6),
            optimizer=lambda parameters: torch.optim.AdamW(parameters),
        ).step_seconds
        for exchanged in (False, True)
    ]
    sent = sum(p.numel() for p in _model("bf16").parameters())  # half of 2 bytes each
    assert seconds[0] < 0.1 and seconds[1] == pytest.approx(sent / 1e6, rel=0.05)


def test_the_calls_that_a_calibration_times_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        assert calls < 1000

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: calls * 1e-5))
    assert calibration._time(call, torch.device("cpu"), 2e-3) == pytest.approx(1e-5)
    assert calls == 2 + 10 * 20  # rounds of 0.2 ms for 2 ms


def test_calibrated_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_time", lambda *unused: 1e-3)
    measured = calibration.calibrate(dtypes=("bfloat16",)).device.measured
    assert len(measured["attention bfloat16"]) == 4  # forwards, and no backwards
    # What it is on a GPU:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: flash(q, k, v, 0.0, is_causal)
    )
    costs = map(calibration._cost, calibration._cases(torch.bfloat16, torch.device("meta")))
    names = [cost.name for cost in costs if cost is not None and cost.kind == "attention"]
    assert names == 3 * ["_scaled_dot_product_flash_attention"]


def test_more_communication_takes_longer() -> None:
    slow = {strategy: _predict(strategy, ranks=Topology(4)).step_seconds for strategy in (1, 3)}
    assert slow[3] > slow[1]


def test_spans_of_the_step_fill_it() -> None:
    predicted = _predict(3)
    computed = sum(predicted.trace.of_computation().values()) / 1e3
    assert computed == pytest.approx(predicted.step_seconds, rel=1e-3)
    assert predicted.trace.units == ("<root>", "1", "2", "3", "4")
    assert predicted.flops > 6 * ROWS * sum(p.numel() for p in _model("plain").parameters() if p.dim() == 2) * 0.95


def test_a_device_of_streams_frees_in_program_order() -> None:
    gpu = Device("gpu", 1 << 30, {"float32": 1e13}, 1e12)
    predicted = _predict(3, device=gpu, ranks=Topology(2, 2))
    assert predicted.peak.bytes["unsharded units"] > 0
    assert predicted.peak.total == max(moment.total for moment in predicted.timeline)


def test_ghosts_compute_integers_and_spread_choices() -> None:
    with Ghosts(lambda cost: None, lambda *_: None, lambda *_: None):
        assert torch.arange(5).sum().item() == 10
        experts = torch.topk(torch.randn(8, 4), 2).indices
        assert torch.bincount(experts.flatten(), minlength=4).tolist() == [4, 4, 4, 4]
        assert torch.randn(1 << 20, 1 << 10).mean().item() == 1.0  # no pages: 4 GiB would not be read in this time


def test_choices_lie_in_the_dimension_that_they_are_made_from() -> None:
    with Ghosts(*[lambda *unused: None] * 3):
        x = torch.empty(2, 3, 40)
        along = {0: 2, 1: 3, -1: 40}
        found = {dim: [x.argmax(dim), x.max(dim)[1], x.sort(dim)[1], x.topk(1, dim)[1]] for dim in along}
        anywhere = int(x.argmax())
    for dim, size in along.items():
        assert all(int(each.max()) < size for each in found[dim]), dim
    assert anywhere < x.numel()


def test_equal_operators_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    cost_of = ghosts._cost
    monkeypatch.setattr(ghosts, "_KNOWN", {})
    monkeypatch.setattr(ghosts, "_cost", lambda func, *rest: looked.append(func) or cost_of(func, *rest))
    costs: list[Cost] = []
    with Ghosts(costs.append, lambda *_: None, lambda *_: None):
        row, full = torch.empty(1, 64), torch.empty(64, 64)
        for _ in range(3):
            for x in (row.expand(64, 64), full):
                assert (x @ full).relu_().shape == (64, 64)
    assert costs[:4] == costs[4:8] == costs[8:]
    assert [cost.bytes for cost in costs[:4:2]] == [(64 + 2 * 64 * 64) * 4, 3 * 64 * 64 * 4]  # expanded: read once
    assert [func._overloadpacket.__name__ for func in looked] == ["empty", "empty", "mm", "relu_", "mm"]


def test_bytes_of_quantized_weights_are_not_computed() -> None:
    """They would get pages: gigabytes in a large model."""
    planes = torch.ones(8, dtype=torch.uint8)
    with Ghosts(lambda cost: None, lambda *_: None, lambda *_: None):
        planes.zero_()
    assert planes.tolist() == [1] * 8


def test_sorted_values_are_their_own() -> None:
    with Ghosts(lambda cost: None, lambda *_: None, lambda *_: None):
        values = torch.tensor([3, 1, 2])
        values.argsort().zero_()
        assert values.argsort().tolist() == [1, 2, 0]
        values[0] = 0
        assert values.argsort().tolist() == [0, 1, 2]


def test_what_is_one_kernel_on_a_gpu_is_one_operator() -> None:
    """It reads its arguments and writes its results, and what it makes in between takes no memory."""
    recorder, x = Recorder("nccl", True), torch.zeros(1024, 64, requires_grad=True)
    given, y = torch.zeros(8, 16, 64, requires_grad=True), torch.zeros(1024, 64)
    with recorder.active():
        recorder.as_one(lambda a: (a * 2 + 1).exp(), y)
        functional_result = nn.functional.dropout(x, 0.1)
        linear = torch.ops.aten._unsafe_view(y, (64, 1024))
        none = nn.functional.dropout(given, 0.1, training=False)
    assert none is given and linear.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    costs = [(entry.name, entry.bytes) for entry in recorder.program if isinstance(entry, Cost)]
    assert costs == [("fused", 2 * y.nbytes), ("native_dropout", 2 * y.nbytes + y.numel())]
    made = [entry.bytes for entry in recorder.program if isinstance(entry, Change) and entry.bytes > 0]
    assert made[:3] == [y.nbytes, y.nbytes, y.numel()] and functional_result.shape == x.shape
    cpu = Recorder("gloo", False)
    with cpu.active():
        nn.functional.dropout(x, 0.1)
    assert sum(isinstance(entry, Cost) for entry in cpu.program) > 1


def test_ghosts_gather_the_counts_of_many_experts() -> None:
    with fake_ranks(64), Ghosts(lambda cost: None, lambda *_: None, lambda *_: None):
        counts = torch.full((64 * 256,), -1)
        dist.all_gather_into_tensor(counts, torch.full((256,), 3))
        assert counts.unique().tolist() == [3]


def test_empty_tensors_take_no_time() -> None:
    costs: list[Cost] = []
    with Ghosts(costs.append, lambda *_: None, lambda *_: None):
        torch.empty_like(torch.empty(4)).new_empty(8)
        torch.empty(4).zero_()
    assert [cost.name for cost in costs] == ["zero_"]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="another operator without oneDNN")
@pytest.mark.parametrize("steps", [1, 20, 200])
@pytest.mark.parametrize("grad", [True, False])
def test_memory_of_recurrent_layers(steps: int, grad: bool) -> None:
    """They keep a workspace for the backward, and take more within the operators."""
    layer = nn.LSTM(8, 32, bidirectional=True)

    def step() -> None:
        with torch.set_grad_enabled(grad):
            made = layer(torch.zeros(steps, 4, 8))[0]
            if grad:
                made.backward(torch.zeros_like(made))
                layer.zero_grad()

    changes: list[int] = []
    with Ghosts(lambda cost: None, lambda *_: None, lambda _, change: changes.append(change)):
        step()
    assert max(itertools.accumulate(changes)) == pytest.approx(ghosts.allocated(step)[1], rel=0.03)


def test_recomputed_values_take_the_memory_of_freed_ones() -> None:
    changes: list[int] = []
    ghosts_of = Ghosts(lambda cost: None, lambda *_: None, lambda memory, change: changes.append(change))
    with ghosts_of, ghosts_of.follow_storages():
        output = torch.randn(1000)
        output.untyped_storage().resize_(0)
        recomputed = torch.randn(1000)
        storage_copier()(output, recomputed)
        assert (sum(changes), output.untyped_storage().nbytes()) == (4000, 4000)


def test_ghosts_that_grow_have_no_pages() -> None:
    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    making = Ghosts(lambda cost: None, lambda name, args: None, lambda memory, change: None)
    with making, making.follow_storages():
        tensor, before = torch.empty(1 << 28, dtype=torch.uint8), pages()
        tensor.untyped_storage().resize_(1 << 29)
        size, grown = tensor.untyped_storage().nbytes(), (pages() - before) * os.sysconf("SC_PAGE_SIZE")
        del tensor
    assert size == 1 << 29 and grown < 1 << 26


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors")
def test_estimates_without_activations_are_the_measured_bytes(tmp_path: Path) -> None:
    """One process trains as rank 0 of 8 on the fake process group, and every tensor is counted."""
    cases = [[strategy, "bf16", 8, 0.004, 0.01] for strategy in measured_memory.STRATEGIES]
    measured = call_counted(build(tmp_path), "tests.unit_tests.test_memory:measure_all", cases)
    model, axes = outline(measured_memory._model("bf16"), (TinyBlock,), FSDPConfig()), AxisSizes(8)
    for strategy, real in zip(measured_memory.STRATEGIES, measured, strict=True):
        config = FSDPConfig(strategy, mixed_precision_policy=FP32_GRADS)
        used = usage([estimate_outline(model, config, axes, axes)], config)
        # AdamW counts steps, the mesh lists its ranks, and no_shard keeps its gradients' memory on a CPU.
        other = 4 * real["parameters"] + 4 * 8 + (used.gradients if strategy == "no_shard" else 0)
        assert real["resting"] == pytest.approx(used.weights + used.optimizer + other, rel=0.01), strategy
        peak = real["peak"] - real["activations"] - 4 * real["parameters"] - 4 * 8
        assert peak <= used.total * 1.01, strategy
        # Sums of full gradients exist only with several micro-batches, and this step has one. With ZeRO-3, a CPU
        # frees the gradients of the unit that computes before the next unit is unsharded.
        if strategy != "optim":
            assert peak > used.total * 0.7, strategy


def small() -> nn.Module:
    """For --model."""
    return TinyModel(width=64, depth=2, vocabulary=32)


@torch.library.custom_op("predict_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator whose shape nothing but computing tells."""
    return x.clone()


class Opaque(TinyModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().forward(tokens)
        return found + opaque(found.detach())


def with_opaque() -> nn.Module:
    return Opaque(width=64, depth=2, vocabulary=32)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    return plan.main()


def test_table_of_strategies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "--model", f"{__name__}:small", "--ranks", "4", "16", "--tokens", "3", "8") == 0
    text = capsys.readouterr().out
    few, many = text.split("16 ranks")
    strategies = ("no_shard", "optim ", "optim_grads ", "optim_grads_params")
    assert all(name in part for part in (few, many) for name in strategies)
    assert "HSDP 2 x 8" in many and "HSDP" not in few and text.count("Simulated. The best: fully_shard(") == 2


def test_the_timeline_of_a_predicted_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, file = ["--model", f"{__name__}:small"], tmp_path / "trace.json"
    assert command(monkeypatch, *target, "--ranks", "2", "--strategy", "3", "--trace", str(file), "--json") == 0
    printed = {choice["strategy"]: choice["step_seconds"] for choice in json.loads(capsys.readouterr().out)}
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    seconds = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    assert seconds / 1e6 == pytest.approx(printed["optim_grads_params"], rel=0.01)
    with pytest.raises(SystemExit):
        command(monkeypatch, "--trace", str(file), __file__)
    assert "only the step of a --model" in capsys.readouterr().err


def test_a_device_that_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = plan.cluster_of("h100")
    device = dataclasses.replace(full.device, memory=1 << 20)
    monkeypatch.setattr(plan, "cluster_of", lambda name: dataclasses.replace(full, device=device))
    assert command(monkeypatch, "--model", f"{__file__}:small", "--ranks", "2") == 3
    assert "does not fit by" in capsys.readouterr().out


def test_json_of_a_huggingface_config_and_its_chart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert command(monkeypatch, "--model", str(tmp_path / "config.json"), "--ranks", "8", "--json") == 0
    printed = capsys.readouterr().out
    found = {choice["strategy"]: choice["peak"] for choice in json.loads(printed)}
    elements = 2 * 256 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert found["no_shard"]["shards"] == pytest.approx((2 + 4) * elements, rel=0.01)
    assert found["optim_grads_params"]["optimizer"] == pytest.approx(8 * elements / 8, rel=0.05)
    (tmp_path / "memory.json").write_text(printed)
    for name, option in (
        ("memory.svg", "--device-memory=1MB"),
        ("memory.png", "--device-memory=1MB"),
        ("c.svg", "--curves"),
    ):
        drawn = [str(tmp_path / "memory.json"), str(tmp_path / name), option]
        memory_chart.main(drawn)
        first = (tmp_path / name).read_bytes()
        memory_chart.main(drawn)
        assert len(first) > 5000 and (tmp_path / name).read_bytes() == first, "a picture drawn again is the same file"


def test_a_model_that_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "--model", f"{__name__}:with_opaque", "--ranks", "8") == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("Without times and activations:") and "predict_tests.opaque" in first
    sizes = {row.split()[2]: float(row.split()[-2]) for row in rows}
    assert list(sizes) == ["no_shard", "optim", "optim_grads", "optim_grads_params", "offloaded"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_colon", "expected module:function, or a config.json that exists (nothing is downloaded)"),
        ("no_such_module:f", "cannot call 'no_such_module:f'"),
        ("math:pi", "cannot call"),
        ("builtins:list", "expected builtins:list to return an nn.Module, or a tuple or dict with one; got list"),
    ],
)
def test_wrong_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, "--model", target)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_model_without_a_list_of_layers_needs_units() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match="--units"):
        unit_classes(plain, [])
    assert unit_classes(plain, ["Linear"]) == (nn.Linear,)


def test_a_layer_that_holds_its_graph_does_so_in_later_runs() -> None:
    """Whether the recorded layer's graph lives is asked for at the end of its run: later, its model is gone."""
    graph = replay._Node()
    template = replay.Template(graph=weakref.ref(graph))
    replays = replay.Replays(Recorder("nccl", runs_ahead=True), CPU.seconds, {"kind": template}, None)
    replays._recorded, replays._first = ["kind"], {"kind": []}
    replays.finish()
    del graph
    assert template.graph is True
