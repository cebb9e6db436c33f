"""The checks for a GPU: their own code, run in small on a CPU, their time limits, and what they make of results."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gpu import __main__ as driver
from tests.gpu.megatron_loop import RUNS, summary
from tests.gpu.rules import RULES, follow
from tests.gpu.unit_tests import read_report
from tests.gpu.verdict import Setup, Verdict, judge
from tests.ranks import DEVICE, ROOT
from tests.simulated.streams import Timeline

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a dry run")
SHORT = ["waits", "sanitizer", "memory", "rules", "probe", "gloo", "unit", "nccl", "megatron"]
LONG = ["parity", "speed"]


def _options(folder: Path, *names: str, device: str = "cpu") -> argparse.Namespace:
    return driver.parse(["--out", str(folder), "--only", ",".join(names), "--device", device, "--dry-run"])


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert driver.main(_options(tmp_path, name)) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{name}: passed: ")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["outcome"] == "passed" and found["device"] == "the CPU, as a dry run" and found["seconds"] > 0


# By name: variables of the command in small.
COMMANDS = {
    "gpu-test": f"GPU_TEST_DEVICE=cpu PYTEST_FLAGS='-n 1' GPU_TESTS={Path(__file__).parent}/test_labels.py",
    "gpu-checks": "GPU_CHECKS_FLAGS='--device cpu --dry-run --only waits'",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_dry_run_of_the_command(tmp_path: Path, name: str) -> None:
    """The one for benchmarks has a test in test_benchmarks.py."""
    make = f"make -n --no-print-directory -C {ROOT} {name} GPU_PYTHON={sys.executable} {COMMANDS[name]}"
    command = subprocess.run(make, shell=True, capture_output=True, text=True, check=True).stdout
    command = command.replace("gpu_checks", str(tmp_path / "out"))
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["megatron", "speed"])
def test_checks_of_missing_packages_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("tests.needs.find_spec", lambda package: None)
    driver.run_here(name, _options(tmp_path, name))
    found = Verdict.load(tmp_path / f"{name}.json")
    assert (found.outcome, found.line) == ("skipped", "megatron.core, psutil, rich is not installed")


def test_times_and_functions() -> None:
    assert all(check.seconds <= 600 for check in driver.CHECKS.values())
    assert sum(check.seconds for check in driver.CHECKS.values()) <= 25 * 60
    for check in driver.CHECKS.values():
        module, _, function = check.function.partition(":")
        assert callable(getattr(importlib.import_module(f"tests.gpu.{module}"), function))
    assert set(driver.CHECKS) == {*SHORT, *LONG}


def test_the_page_lists_the_checks_and_their_limits() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("| check | shows | seconds |\n|---|---|---|\n")[2]
    rows = [line.strip("| ").split(" | ") for line in page.partition("\n\n")[0].splitlines()]
    assert [(row[0].strip("`"), float(row[-1])) for row in rows] == [(n, c.seconds) for n, c in driver.CHECKS.items()]


def test_every_rule_of_the_simulated_device_has_a_program() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("| rule | source |\n|---|---|\n")[2]
    rules = [line.split(" | ")[0] for line in page.partition("\n\n")[0].splitlines()]
    assert all(any(name in rule for name in RULES) for rule in rules), "a rule has no program"
    assert all(any(name in rule for rule in rules) for name in RULES), "a program has no rule"


def test_a_device_that_breaks_a_rule_fails() -> None:
    rule = "`torch.cuda.graph` first waits for the device"
    follow(rule, on_cuda=False)
    with patch.object(Timeline, "synchronize", lambda *_: None), pytest.raises(AssertionError):
        follow(rule, on_cuda=False)


def test_a_check_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(driver.CHECKS, "waits", driver.Check("one_rank:host_waits", 0.01))
    assert driver.main(_options(tmp_path, "waits")) == 1
    assert "did not end within 0 s" in Verdict.load(tmp_path / "waits.json").line


def test_a_check_that_ends_without_a_verdict_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (tmp_path / "waits.json").write_text("of an earlier run")
    assert driver.main(_options(tmp_path, "waits")) == 1
    assert Verdict.load(tmp_path / "waits.json").line.startswith("ended with exit code 1")


def test_an_exception_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(setup: Setup) -> Verdict:
        raise ValueError("for two\nreasons")

    monkeypatch.setattr("tests.gpu.one_rank.host_waits", fail)
    driver.run_here("waits", _options(tmp_path, "waits"))
    found = Verdict.load(tmp_path / "waits.json")
    assert (found.outcome, found.line) == ("failed", "ValueError: for two reasons")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_checked(tmp_path: Path) -> None:
    driver.run_here("waits", _options(tmp_path, "waits", device="cuda"))
    assert Verdict.load(tmp_path / "waits.json") == Verdict("skipped", "there is no CUDA device")


@pytest.mark.parametrize("arguments", [["--only", "haste"], ["--device", "cpu"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        driver.parse(["--out", "folder", *arguments])


def test_the_first_problem_is_the_verdict() -> None:
    assert judge([], "fine", {"a": 1}) == Verdict("passed", "fine", {"a": 1})
    found = judge(["one\nline", "another"], "fine", {})
    assert (found.outcome, found.line) == ("failed", "one line (and 1 more)")
    assert found.figures["problems"] == ["one\nline", "another"]


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    cases = "<testcase classname='c' name='good'/><testcase classname='c' name='left'><skipped/></testcase>"
    cases += "<testcase classname='c' name='bad'><failure message='1 is not 2'/></testcase>"
    cases += "<testcase classname='c' name='broken'><error message='no module'/></testcase>"
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    counts, problems = read_report(tmp_path / "report.xml")
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert problems == ["c::bad: 1 is not 2", "c::broken: no module"]
    assert read_report(tmp_path / "none.xml") == ({"passed": 0, "failed": 0, "skipped": 0}, [])


def _run(*losses: float) -> dict[str, Any]:
    return {"losses": list(losses), "milliseconds": 1.0, "peak_mb": 2.0}


def test_losses_of_megatron_are_compared() -> None:
    same = {name: _run(5.0, 4.0) for name in RUNS}
    assert summary(same).outcome == "passed"
    line = "this engine: the loss of iteration 2 is 4.2; DDP's is 4.0"
    assert summary({**same, "this engine": _run(5.0, 4.2)}).line == line
    assert summary({**same, "this engine": _run(5.0, float("nan"))}).outcome == "failed"
    fp8 = {**same, "this engine, fp8 delayed": _run(5.0, 4.5)}
    assert summary(fp8).line == "this engine, fp8 delayed: the loss of iteration 2 is 4.5; DDP's is 4.0"
    assert summary({**fp8, "DDP, fp8 delayed": _run(5.0, 4.49)}).outcome == "passed"
    assert summary({**same, "NVIDIA's": {"error": "out of memory"}}).line == "NVIDIA's: out of memory"
    assert summary({**same, "this engine": {"not run": "no time was left"}}).line.startswith("13 of 14 runs")
    assert summary({**same, "this engine, resumed": _run(4.0)}).outcome == "passed", "it begins in the middle"
    late = "this engine, resumed: the loss of iteration 2 is 4.2; DDP's is 4.0"
    assert summary({**same, "this engine, resumed": _run(4.2)}).line == late
    # Without DDP's losses nothing has been compared.
    assert summary({**same, "DDP": {"not run": "no time was left"}}).outcome == "failed"
    assert summary({**same, "this engine": _run(5.0)}).outcome == "failed"
    much = summary({**same, "this engine, fp8 delayed": {**_run(5.0, 4.0), "peak_mb": 2.5}})
    assert much.line == "this engine, fp8 delayed: the peak is 2.5 MB; in bf16 it is 2.0 MB"


def test_checks_go_on_where_the_last_run_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Verdict("passed", "fine").save(tmp_path / "waits.json", device=driver.DRY)
    Verdict("skipped", "no NCCL").save(tmp_path / "nccl.json", device=driver.DRY)
    Verdict("failed", "wrong").save(tmp_path / "memory.json", device=driver.DRY)
    Verdict("passed", "on a GPU").save(tmp_path / "gloo.json", device="NVIDIA H100")
    options = _options(tmp_path, "waits", "nccl", "memory", "gloo")
    options.minutes = 0.5
    assert driver.main(options) == 3
    assert capsys.readouterr().out.splitlines() == [
        "waits: passed in an earlier run: fine",
        "nccl: skipped in an earlier run: no NCCL",
        "not run yet: memory, gloo. Run the command again to go on.",
    ]
    options.again = True
    assert driver.main(options) == 3 and "not run yet: waits, nccl, memory, gloo" in capsys.readouterr().out


TESTS = """
import time, pytest

@pytest.mark.parametrize("number", range(4))
def test_short(number):
    time.sleep(0.6)

def test_wrong():
    assert False

def test_left_out():
    pytest.skip()
"""


def test_long_suites_run_in_parts(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.resume", "--finished", "out/tests.finished", "-n", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def part(seconds: float) -> str:
        again = [*command, "--seconds", str(seconds), "-p", "no:cacheprovider"]
        found = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert "Run the command again to go on" in found.stdout, found.stdout + found.stderr
        return found.stdout

    assert "4 passed" not in part(1.0)
    done = (tmp_path / "out/tests.new").read_text().splitlines()
    assert 1 <= len(done) < 4
    assert f"1 failed, {4 - len(done)} passed, 1 skipped" in part(100.0)
    assert "1 failed in" in part(100.0), "what has failed runs again, and nothing else"
