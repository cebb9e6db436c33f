"""The unit tests on a GPU: those that need one, and all others with their tensors on it."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tests.gpu.verdict import Setup, Verdict, judge

# The end of a session takes a while, and its report is needed.
SECONDS_TO_REPORT = 30.0


def of_cuda(setup: Setup) -> Verdict:
    """Delays on either stream change no bit, graphs are captured, memory is registered, the formulas of memory hold."""
    return _pytest(setup, "unit", ["test_cuda.py"] if setup.on_cuda else ["test_device.py"], [])


def all_of_them(setup: Setup) -> Verdict:
    """The unit tests that CI runs, in several processes that share the device."""
    files = ["test_device.py", "test_returned_parameters.py"] if setup.dry_run else [""]
    workers = "2" if setup.dry_run else "8"
    return _pytest(setup, "parity", files, ["-m", "not slow", "-n", workers, "--dist", "worksteal"])


def _pytest(setup: Setup, name: str, files: list[str], options: list[str]) -> Verdict:
    report = setup.out / f"{name}.xml"
    report.unlink(missing_ok=True)
    limit = setup.seconds - SECONDS_TO_REPORT
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", f"--junitxml={report}"]
    command += [
        "-p",
        "tests.gpu.resume",
        f"--seconds={limit}",
        *options,
        *(f"tests/unit_tests/{file}" for file in files),
    ]
    code = subprocess.run(command).returncode
    counts, problems = read_report(report)
    if not counts["passed"]:
        problems.append(f"no test passed; pytest ended with exit code {code}")
    done = ", ".join(f"{number} {what}" for what, number in counts.items())
    verdict = judge(problems, done, counts)
    if problems:
        verdict.line = f"{done}; the first: {verdict.line}"
    return verdict


def read_report(report: Path) -> tuple[dict[str, Any], list[str]]:
    """Numbers of outcomes, and the names of the tests that failed, from pytest's JUnit file."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    problems = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        parts = {part.tag: part for part in case}
        wrong = parts.get("failure", parts.get("error"))
        if wrong is not None:
            problems.append(f"{case.get('classname')}::{case.get('name')}: {(wrong.get('message') or '')[:200]}")
        counts["failed" if wrong is not None else "skipped" if "skipped" in parts else "passed"] += 1
    return counts, problems
