"""The checks of the planner: which cases are chosen, which are judged, and how agreement is counted."""

import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import planner, report
from benchmarks.compiled import compiled
from benchmarks.figures import Summary
from benchmarks.model import Shape
from benchmarks.network import DELAYER
from benchmarks.options import Skipped
from benchmarks.results import Case, Result
from benchmarks.suite.prediction import (
    CALIBRATION,
    FASTEST,
    MOST_ROUNDS,
    SETTINGS,
    Measured,
    Setting,
    case_of,
    load,
    save,
    summary,
)
from benchmarks.suite.published import FIGURES, Training, _predict, predicted_mfu
from benchmarks.zoo import MODELS
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools import recipes
from megatron.fsdp.tools.estimate import AxisSizes, estimate_outline, outline
from megatron.fsdp.tools.predict import Link, Topology, predict
from megatron.fsdp.tools.predict.machine import cluster_of

SETTING = Setting(2, 1000, 0.1, "small", "fp32")


def _round(step: float, cpu: float = 30.0, sent: float = 4e6) -> dict[str, float]:
    return {"step": step, "cpu": cpu, "sent": sent, "others": 0.0}


def _measured(setting: Setting = SETTING, noisy: bool = False, **rounds: list[dict[str, float]]) -> Measured:
    """All strategies take 100 ms, of which 32 on the wire, and gloo 10 ms of CPU time; ``rounds`` replaces some."""
    usual = {"alone": [_round(10.0, cpu=20.0, sent=0.0)], **{peer: [_round(100.0)] * 5 for peer in setting.strategies}}
    return Measured(setting, {**usual, **{peer.replace("_", "-"): own for peer, own in rounds.items()}}, noisy)


def _is_judged(measured: Measured, peer: str = "ours-3") -> bool:
    return bool(case_of(measured).figures[peer]["judged"].median)


def test_there_are_sixty_cases_and_all_pairs_occur() -> None:
    assert sum(len(setting.strategies) for setting in SETTINGS) == 60
    judged = [vars(setting) for setting in SETTINGS if setting.rate < FASTEST]
    for one, other in itertools.combinations(judged[0], 2):
        pairs = {(setting[one], setting[other]) for setting in judged}
        values = [{setting[name] for setting in judged} for name in (one, other)]
        assert pairs == set(itertools.product(*values)), (one, other)


def test_the_calibration_uses_no_case() -> None:
    _, rate, latency = CALIBRATION
    assert rate not in {f"{setting.rate}mbit" for setting in SETTINGS}
    assert 1e3 * latency not in {setting.latency for setting in SETTINGS}


def test_cases_that_count() -> None:
    assert _is_judged(_measured())
    assert not _is_judged(_measured(noisy=True))
    assert not _is_judged(_measured(Setting(2, FASTEST, 0.1, "small", "fp32")))
    scattered = [_round(step) for step in (90.0, 95.0, 100.0, 105.0, 110.0)]
    assert not _is_judged(_measured(ours_3=scattered))
    # gloo takes 40 ms of each core, and the bytes are on the wire for 32 ms.
    assert not _is_judged(_measured(ours_3=[_round(100.0, cpu=100.0)] * 5))


def test_turns_of_a_cpu_whose_speed_has_changed_do_not_count() -> None:
    """The five in which it was fastest count, and more rounds are made until those agree."""
    steps, cpu = (
        (100.0, 125.0, 99.0, 120.0, 101.0, 110.0, 100.0, 100.0),
        (30.0, 40.0, 29.9, 39.0, 30.1, 34.0, 30.0, 30.0),
    )
    turns = [_round(*each) for each in zip(steps, cpu, strict=True)]
    assert not _measured(ours_3=turns[:5]).is_complete and not _is_judged(_measured(ours_3=turns[:5]))
    measured = _measured(ours_3=turns)
    assert sorted(turn["step"] for turn in measured.turns("ours-3")) == [99.0, 100.0, 100.0, 100.0, 101.0]
    assert measured.is_complete and _is_judged(measured)
    scattered = [_round(100.0 + 20 * (n % 2)) for n in range(MOST_ROUNDS)]
    assert not _measured(ours_3=scattered[:-1]).is_complete and _measured(ours_3=scattered).is_complete
    assert not _is_judged(_measured(ours_3=scattered))


def test_a_strategy_that_crashed_is_named() -> None:
    case = case_of(_measured(ours_3=[]))
    assert case.notes == ["ours-3 crashed"]
    assert "ours-3" not in case.figures


def test_measurements_survive_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "new" / "measured.json"
    assert load(path) == []
    save([_measured()], path)
    assert load(path) == [_measured()]


def _predicted(**times: float) -> Case:
    case = case_of(_measured(ours_0=[_round(200.0)] * 5))
    for peer, predicted in times.items():
        own = case.figures[peer.replace("_", "-")]
        case.put(peer.replace("_", "-"), predicted=predicted, error=predicted / own["measured"].median - 1)
    return case


def test_the_summary_of_right_and_wrong_predictions() -> None:
    right = summary([_predicted(ours_0=206.0, ours_1=100.0, ours_2=101.0, ours_3=98.0)]).figures[planner.NAME]
    assert right["worst_error"].median == pytest.approx(0.03)
    assert right["median_error"].median == pytest.approx(0.015)
    assert (right["pairs"].median, right["wrong_pairs"].median) == (3, 0)
    assert right["lost_by_choice"].median == 0
    assert (right["judged"].median, right["left_out"].median) == (4, 0)
    wrong = summary([_predicted(ours_0=50.0, ours_1=100.0, ours_2=100.0, ours_3=40.0)]).figures[planner.NAME]
    assert wrong["wrong_pairs"].median == 2
    assert wrong["lost_by_choice"].median == 0
    assert summary([_predicted(ours_0=50.0, ours_3=90.0)]).figures[planner.NAME]["lost_by_choice"].median == 1


def test_a_summary_without_predictions_has_no_errors() -> None:
    found = summary([case_of(_measured())]).figures[planner.NAME]
    assert found["judged"] == Summary.of([4])
    assert not {"median_error", "worst_error", "wrong_pairs", "lost_by_choice"} & set(found)


def test_rank_correlation() -> None:
    assert planner.rank_correlation([1.0, 2.0, 3.0], [10.0, 40.0, 90.0]) == pytest.approx(1)
    assert planner.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)


def test_why_nothing_is_predicted() -> None:
    def fails() -> float:
        raise NotImplementedError("aten::item")

    assert planner.ask(lambda: 3.0) == 3.0
    assert planner.ask(fails) == "not predicted: aten::item"


@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_have_units(name: str) -> None:
    kind = MODELS[name]
    model = kind.build()
    assert sum(isinstance(module, kind.units) for module in model.modules()) >= 4
    kind.loss(model, kind.batch()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in trained)


def test_kinds_of_models_differ() -> None:
    def parameters(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    built: dict[str, Any] = {name: kind.build() for name, kind in MODELS.items()}
    assert parameters(built["tied"]) < parameters(built["gpt"])
    assert any(not p.requires_grad for p in built["adapters"].parameters())
    assert {p.dtype for p in built["bf16"].parameters()} == {torch.bfloat16}
    assert len(MODELS) == 10


def test_published_figures_have_sources_and_are_listed_once() -> None:
    assert all(figure.source and figure.value > 0 for figure in FIGURES)
    assert len({(figure.job, figure.quantity, figure.source) for figure in FIGURES}) == len(FIGURES)
    assert all(figure.value < 1 for figure in FIGURES if figure.quantity == "mfu")


def test_a_few_layers_say_what_all_of_them_take() -> None:
    training = Training(Shape(64, 10, 4, 128), "h100", 4, 32, 1, recomputed=True)
    assert predicted_mfu(training) == pytest.approx(_predict(training, 10).mfu, rel=0.02)


@pytest.mark.parametrize("recipe", [*recipes.FP8.values(), recipes.NVFP4], ids=lambda recipe: recipe.key)
@pytest.mark.parametrize("zero", [1, 3])
def test_quantized_weights_of_a_step(recipe: recipes.Recipe, zero: int) -> None:
    """A predicted step holds what layouts say."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    config, axes = FSDPConfig(zero, mixed_precision_policy=policy), AxisSizes(4)

    def build() -> nn.Module:
        made = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(4)))
        for parameter in made.parameters():
            recipes.plan(parameter, recipe)
        return made

    found = predict(
        build,
        lambda: torch.zeros(4, 256, dtype=torch.bfloat16),
        config=config,
        units=[nn.Linear],
        ranks=Topology(4),
        device=cluster_of("b200").device,
        link=Link("network", 1e9, 1e-5),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )
    expected = estimate_outline(outline(build(), (nn.Linear,), config), config, axes, axes).total
    first, peak = found.timeline[0].bytes, planner.largest_by_category(found)
    assert first["shards"] + first["optimizer"] == pytest.approx(expected.resting, rel=0.01)
    if zero == 3:
        limit = config.max_unsharded_units or 1
        assert peak["unsharded units"] <= (limit + 1) * expected.unsharded // 4


def test_the_program_that_delays_packets_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr("benchmarks.compiled.FOLDER", tmp_path)
    program = compiled(DELAYER, "-Wall", "-Werror")
    refused = subprocess.run([program, "1000", "no-such-namespace"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no-such-namespace" in refused.stderr


def test_without_a_compiler_a_benchmark_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compiled.FOLDER", tmp_path)
    monkeypatch.setattr("benchmarks.compiled.shutil.which", lambda _: None)
    with pytest.raises(Skipped, match="needs a C compiler"):
        compiled(DELAYER)


def test_the_table_of_predictions() -> None:
    time, memory = _predicted(ours_3=103.0), Case({"model": "gpt"})
    time.put("ours-2", judged=0.0, error=0.01)
    memory.put("ours-3", peak=3 * 2**20, error=-0.01)
    results = {
        "prediction": Result("prediction", [time, summary([time])]),
        "predicted-memory": Result("predicted-memory", [memory]),
    }
    text = report.predictions(results)
    assert " +3.0 (+1.0); " in text
    assert "gpt -1.0" in text
    assert "worst error 0.03" in text
    assert "*not measured*" in report.predictions({})
    assert "*needs root*" in report.predictions({"prediction": Result("prediction", skipped="needs root")})
