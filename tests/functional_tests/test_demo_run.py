"""The demo as a user runs it: it trains, resumes from its checkpoint, reports failed processes, and can be interrupted.

The tests run in order on one output folder, because each uses the files of the one before it.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import ROOT, printed, start

ITERATIONS = 3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the demo writes to."""
    return tmp_path_factory.mktemp("demo") / "demo_output"


def command(output: Path, iterations: int) -> list[str]:
    script = str(ROOT / "examples" / "demo" / "run.py")
    return [sys.executable, script, "--output", str(output), "--iterations", str(iterations)]


def run(output: Path) -> str:
    """Runs the demo for too few iterations to beat the unigram entropy, which it must report; returns its output."""
    result = start(command(output, ITERATIONS))
    assert "validation loss is not below the unigram entropy" in result.stdout, result.stdout + result.stderr
    assert result.returncode == 1
    return result.stdout


def history(output: Path, kind: str) -> list[int]:
    points = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    return [point["iteration"] for point in points if point["kind"] == kind]


def processes_of(output: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(output) in str(process.info["cmdline"])]


def test_trains_and_writes_everything(output: Path) -> None:
    text = run(output)
    assert "iterations         0 -> 3" in text
    assert history(output, "train") == [1, 2, 3]
    assert history(output, "validation")[-1] == 3
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  1/3  loss "))
    assert lines[first - 1] == "  the first iteration"
    assert len(set(lines[1:first])) == len(lines[1:first])
    generate = lines[lines.index("  Let the model continue a text:") + 1]
    assert printed(start(shlex.split(generate))).startswith("class Parser")
    assert list((output / "tensorboard").glob("events.*"))
    for name in ("train.log", "loss.png", "sample.txt", "data/meta.json", "checkpoints/iter_0000003/.metadata"):
        assert (output / name).stat().st_size > 0, name
    assert (output / "sample.txt").read_text().startswith("def __init__(self")


def test_resumes_from_its_checkpoint(output: Path) -> None:
    built = (output / "data" / "meta.json").stat().st_mtime_ns
    text = run(output)
    assert "from the checkpoint of iteration 3" in text
    assert history(output, "train") == [1, 2, 3, 4, 5, 6]
    assert (output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert (output / "data" / "meta.json").stat().st_mtime_ns == built


def test_an_interrupt_saves_and_stops_the_training_processes(output: Path) -> None:
    log = output / "train.log"
    offset = log.stat().st_size
    process = subprocess.Popen(command(output, 1000), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while "iteration        7/" not in log.read_text()[offset:]:
            assert process.poll() is None
            time.sleep(0.5)
        assert len(processes_of(output)) >= 3, "expected the demo, torchrun and at least one rank"
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 130
    saved = int((output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 7 and history(output, "train") == [*range(1, saved + 1)]
    assert " ".join(text.split()).endswith(f"the next run resumes after iteration {saved}")
    assert processes_of(output) == []


def test_a_failed_process_is_reported_with_its_error(output: Path) -> None:
    (output / "data" / "tokenizer" / "tokenizer.json").write_text("not a tokenizer")
    result = start(command(output, ITERATIONS))
    assert result.returncode == 1
    assert "the training processes failed" in result.stdout
    assert "Unable to instantiate HuggingFace" in result.stdout
    assert str(output / "train.log") in result.stdout
