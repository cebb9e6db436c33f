"""Whether a command line fits, from predicted steps of its first and its last pipeline stage."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.estimate import AxisSizes, estimate_outline, outline
from megatron.fsdp.tools.fit import Situation, with_overhead
from megatron.fsdp.tools.predict import command, kernels
from megatron.fsdp.tools.predict.machine import cluster_of
from megatron.fsdp.tools.predict.record import Message, fake_ranks
from megatron.fsdp.tools.report import Report
from megatron.fsdp.tools.script import CommandStep
from tests.models import FP32_GRADS, Block, TinyModel

SCRIPT, H100 = Path("train.py"), cluster_of("h100")
GIVEN = SimpleNamespace(tensor_model_parallel_size=1, micro_batch_size=2, recompute_granularity="full")


def report(stage: int = 0) -> Report:
    """Of a stage of two."""
    with torch.device("meta"):
        model = TinyModel().bfloat16()
    config, axes = FSDPConfig(mixed_precision_policy=FP32_GRADS), AxisSizes(8)
    outlines = [outline(model, (Block,), config)]
    found = Report(16, stage=stage, config=config, args=GIVEN, outlines=outlines)
    found.situation = Situation(outlines, config, axes, axes)
    found.chunks = [estimate_outline(each, config, axes, axes) for each in outlines]
    found.stages = [found] if stage else [found, report(1)]
    return found


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stages that are predicted: the first has 8 GiB of activations at the peak, or 4, and the last is slower."""
    stages: list[int] = []

    def predict(script: Path, arguments: list[str], of_stage: Report, cluster: Any) -> CommandStep:
        stages.append(of_stage.stage)
        size = (8 - 5 * of_stage.stage) * GIB // (2 if "--micro-batch-size" in arguments else 1)
        return CommandStep(3.0 + of_stage.stage, 0.0, 1.0, 0.5, {}, {"activations": size}, "decoder")

    monkeypatch.setattr(command, "predict_command", predict)
    return stages


def test_the_fullest_stage_and_the_slowest_time_count(predicted: list[int]) -> None:
    found = command.predict_stages(SCRIPT, [], report(), H100)
    assert isinstance(found.step, CommandStep) and found.situation is not None
    assert (found.stage, found.step.seconds, found.step.peak) == (0, 4.0, {"activations": 8 * GIB})
    assert found.situation.total == with_overhead(8 * GIB) and predicted == [0, 1]


@pytest.mark.parametrize(("slowest", "stages"), [(0.9, [0, 1]), (1.1, [0])])
def test_the_last_stage_does_not_matter_if_the_first_is_too_slow(
    predicted: list[int], slowest: float, stages: list[int]
) -> None:
    command.predict_stages(SCRIPT, [], report(), H100, slowest)
    assert predicted == stages


def test_changes_of_activations_are_predicted(predicted: list[int]) -> None:
    found = command.judge(SCRIPT, [], report(), H100, 7 * GIB)
    assert found.verdict is not None and not found.verdict.fits and found.verdict.predicted
    assert {s.change: s.total for s in found.verdict.suggestions} == {"--micro-batch-size 1": with_overhead(4 * GIB)}
    fits = command.judge(SCRIPT, [], report(), H100, 11 * GIB).verdict
    assert fits is not None and fits.fits and fits.suggestions == ()


def test_without_a_prediction_the_verdict_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*unused: Any) -> CommandStep:
        raise NotImplementedError("operator aten.unknown")

    monkeypatch.setattr(command, "predict_command", refuse)
    found = command.judge(SCRIPT, [], report(), H100, 7 * GIB)
    assert "operator aten.unknown" in str(found.step) and found.verdict is not None
    assert found.verdict.text.startswith("without activations, fits: ")


def test_functions_that_would_be_compiled_are_known() -> None:
    module = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    found = [*kernels.compiled()]
    assert {(module, "swiglu"), (module, "swiglu_back")} <= {*found} and (module, "bias_swiglu_impl") not in found


@pytest.mark.parametrize("ranks", [1, 4])
def test_context_parallel_ranks_attend_to_all_tokens(ranks: int) -> None:
    """Keys and values go round in the course of the computation, which is that of the whole sequence, split evenly."""
    tokens, heads, channels, values = 8, 2, 16, 12
    query, key, value = (
        torch.zeros(tokens, 1, heads, n, dtype=torch.bfloat16, requires_grad=True) for n in (channels, channels, values)
    )
    entries: list[Any] = []
    with fake_ranks(ranks):
        kernels.Attention.apply(entries, dist.group.WORLD, query, key, value).sum().backward()
    costs = [entry.meanwhile[0] if isinstance(entry, Message) else entry for entry in entries]
    flops = heads * tokens * tokens * ranks * (channels + values)
    assert [cost.flops for cost in costs] == [flops, flops * 5 // 2]
    sent = (key.nbytes + value.nbytes) * ranks
    messages = [(entry.ranks, entry.bytes) for entry in entries if isinstance(entry, Message)]
    assert messages == ([(ranks, sent), (ranks, 2 * sent)] if ranks > 1 else [])
