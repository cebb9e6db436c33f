"""Targets, records and the page of the benchmark suite."""

import json
from pathlib import Path

import pytest

from benchmarks import original_package, planner, plots, report
from benchmarks.__main__ import BENCHMARKS, parse
from benchmarks.columns import COLUMNS
from benchmarks.figures import Summary
from benchmarks.peers import PEERS
from benchmarks.probes.traffic import _Collective, _Write, classify
from benchmarks.results import Case, Result, load_all
from benchmarks.sections import SECTIONS
from benchmarks.suite.real_loop import PEERS as LOOP_PEERS
from benchmarks.targets import TARGETS, Target, judge, judge_all

BENCHMARKS_FOLDER = Path(report.__file__).parent


def _case(**figures: list[float]) -> Case:
    tags = {"ranks": 2, "dtype": "fp32", "tokens": 32, "load": "communication-heavy"}
    return Case(tags, {peer.replace("_", "-"): {"step": Summary.of(rounds)} for peer, rounds in figures.items()})


def _outcomes(target: Target, case: Case) -> list[str]:
    return [verdict.outcome for verdict in judge(Result(target.benchmark, [case]), (target,))]


def test_targets_are_judged() -> None:
    case = _case(ours_3=[8.0, 7.9], fsdp2=[10.0, 10.0], ours_0=[3.0, 3.0])
    assert _outcomes(Target("step", "ours-3", "step", 0.80, "fsdp2"), case) == ["met"]
    assert _outcomes(Target("step", "ours-3", "step", 0.79, "fsdp2"), case) == ["missed"]
    assert _outcomes(Target("step", "ours-3", "step", 7.0, at_least=True), case) == ["met"]
    assert _outcomes(Target("step", "ours-3", "step", 9.0, at_least=True), case) == ["missed"]
    assert _outcomes(Target("step", "ours-3", "step", 0.8, "original-3"), case) == ["not measured"]
    assert _outcomes(Target("step", "ours-3", "step", 0.8, "fsdp2", where={"tokens": (256,)}), case) == ["not measured"]
    assert _outcomes(Target("step", "ours-3", "step", 0.8, "fsdp2", where={"tokens": (32, 256)}), case) == ["met"]


def test_a_target_within_the_spread() -> None:
    case = _case(ours_3=[9.0, 10.5, 12.0], fsdp2=[10.0, 10.0, 10.0])
    assert _outcomes(Target("step", "ours-3", "step", 1.0, "fsdp2"), case) == ["missed"]
    assert _outcomes(Target("step", "ours-3", "step", 1.0, "fsdp2", within_spread=True), case) == ["met"]


def test_targets_of_cases_that_did_not_run() -> None:
    verdicts = judge_all({"network": Result("network", skipped="needs root")})
    assert {verdict.outcome for verdict in verdicts} == {"not measured"}
    assert {verdict.case for verdict in verdicts if verdict.benchmark == "network"} == {"needs root"}


def test_tables_refer_to_existing_benchmarks_and_peers() -> None:
    assert set(COLUMNS) == set(BENCHMARKS)
    assert set(plots.PLOTS) <= set(BENCHMARKS)
    assert set(LOOP_PEERS) <= set(PEERS)
    for target in TARGETS:
        assert target.benchmark in BENCHMARKS
        assert target.peer in {*PEERS, planner.NAME}
        assert target.reference is None or target.reference in PEERS
    for module in BENCHMARKS.values():
        assert (BENCHMARKS_FOLDER / "suite" / f"{module}.py").exists()
    for peer in PEERS.values():
        assert (BENCHMARKS_FOLDER / "peers" / f"{peer.module}.py").exists()


def test_a_record_survives_writing_and_reading(tmp_path: Path) -> None:
    case = _case(ours_3=[8.0, 7.9], fsdp2=[10.0, 11.0])
    case.notes.append("noisy")
    result = Result("step", [case], about={"date": "2026-11-21"})
    path = result.save(tmp_path)
    assert json.loads(path.read_text())["cases"][0]["figures"]["ours-3"]["step"]["rounds"] == [8.0, 7.9]
    assert Result.load(path) == result
    assert load_all(tmp_path) == {"step": result}


def test_the_page_has_a_section_for_every_benchmark() -> None:
    case = _case(ours_3=[8.0, 7.9], fsdp2=[10.0, 10.0])
    case.notes.append("a <note>")
    machine = {"processor": "x", "cores": 2, "memory_gib": 4, "native_bf16": True, "gpus": []}
    about = {"date": "2026-11-21", "commit": "abc", "machine": machine, "versions": {"torch": "2.13.0"}}
    results = {
        "step": Result("step", [case], about=about),
        "gpu": Result("gpu", skipped="needs a CUDA device", about=about),
    }
    made = report.page(results)
    assert list(SECTIONS) == ["targets", *BENCHMARKS, "machine"]
    assert [line for line in made.split("\n") if line.startswith("## ")] == [f"## {s.title}" for s in SECTIONS.values()]
    assert "| this engine, ZeRO-3 |" in made
    assert "* a &lt;note>" in made
    assert "pictures/step-0.png" in made
    assert "*Skipped: needs a CUDA device.*" in made
    assert "*Not measured: `python -m benchmarks --only memory`.*" in made


def test_a_quick_run_is_marked() -> None:
    assert "A quick run" in report.block("step", {"step": Result("step", [_case(ours_3=[1.0])], quick=True)})


def test_the_summary_says_when_benchmarks_ran() -> None:
    machine = {"processor": "x", "cores": 2, "memory_gib": 4, "native_bf16": True, "gpus": []}
    about = {"date": "2026-11-21", "commit": "abc", "machine": machine, "versions": {"torch": "2.13.0"}}
    made = report.summary({name: Result(name, [_case(ours_3=[8.0])], about=about) for name in ("step", "memory")})
    assert "| step, memory | 2026-11-21 | abc | x |" in made


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = _case(ours_3=[8.0, 7.9], fsdp2=[10.0, 10.0])
    result = Result("step", [case])
    assert plots.is_plotted(result, case)
    assert not plots.is_plotted(Result("growth"), case)
    plots.draw(result, case, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_command_line() -> None:
    assert parse([]).only == list(BENCHMARKS)
    assert parse(["--only", "step,memory", "--quick"]).only == ["step", "memory"]
    with pytest.raises(SystemExit):
        parse(["--only", "unheard-of"])


def test_copies_are_classified() -> None:
    weights, shard, gradients, other = 1, 2, 3, 4
    events: list = [
        _Write(50, {shard}, {other}, casts=True, adds=False),
        _Write(100, {shard}, {other}, casts=False, adds=False),
        _Collective("gather", 10_000, {weights, shard}, {weights}),
        _Write(200, {other}, {weights}, casts=False, adds=False),
        _Write(300, {gradients}, {other}, casts=True, adds=False),
        _Write(400, {gradients}, {other}, casts=False, adds=True),
        _Write(700, {gradients}, set(), casts=False, adds=False, zeros=True),
        _Collective("reduce", 20_000, {gradients}, {gradients}),
        _Collective("reduce", 16, {other}, {other}),
        _Write(500, {99}, {98}, casts=False, adds=False),
        _Write(600, {99}, {98}, casts=False, adds=True),
    ]
    found = classify(events)
    assert (found["gathers"], found["reduces"], found["small_collectives"]) == (1, 1, 1)
    assert (found["gathered_bytes"], found["reduced_bytes"]) == (10_000, 20_000)
    assert found["gather_cast_bytes"] == 50
    assert found["gather_copied_bytes"] == 100 + 200
    assert found["reduce_copied_bytes"] == 300 + 400
    assert found["reduce_zeroed_bytes"] == 700
    assert found["other_copied_bytes"] == 500


def test_the_copy_of_the_original_is_patched() -> None:
    source = 'import torch\nfrom megatron.core.x import y\nd = torch.device(f"cuda:{torch.cuda.current_device()}")\n'
    changed = original_package.for_cpu(source + 'm = mesh("cuda")\ns = torch.cuda.Stream()\n', "x.py")
    assert "megatron.core" not in changed
    assert 'd = torch.device("cpu")' in changed
    assert 'm = mesh("cpu")' in changed
    assert "s = _cuda.Stream()" in changed
    with pytest.raises(original_package.NotInstalled, match="once"):
        original_package.for_cpu(source, "param_and_grad_buffer.py")
