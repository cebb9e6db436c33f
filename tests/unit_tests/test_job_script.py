"""The doctor finds what would lose work in a launch script for Slurm."""

import os
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from megatron.fsdp.tools import job
from tests.launch import ROOT, python

GOOD = """#!/usr/bin/env bash
#SBATCH --nodes 8 --time=24:00:00 --signal=TERM@600
#SBATCH --requeue --open-mode=append  # keep the log
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
srun --kill-on-bad-exit=1 torchrun --nproc-per-node 8 pretrain_gpt.py --train-iters 1000 --lr-warmup-iters 100 \\
    --save out --save-interval 500 --exit-signal-handler --exit-duration-in-mins 1400
read -r OUTCOME _ <out/outcome.txt
case $OUTCOME in finished) ;; stopped) scontrol requeue "$SLURM_JOB_ID" ;; *) exit 1 ;; esac
"""
EXAMPLES = ROOT / "examples" / "megatron_fsdp"
# What is changed, and what is found then.
CHANGES = {
    "no signal": (" --signal=TERM@600", "", "Add #SBATCH --signal"),
    "only the batch shell": ("TERM@600", "B:TERM@600", "no signal to the ranks"),
    "other signal": ("TERM@600", "USR1@600", "Slurm sends SIGUSR1, which nothing handles"),
    "torchrun is in a hurry": ("TIMEOUT=600", "TIMEOUT=80", "ranks 80 s after SIGTERM. Set its time to 180"),
    "stopped": ("scontrol", "echo", "nothing queues it again"),
    "failed": ("*) exit 1", "*)", "a job that has failed COMPLETED"),
    "saves nothing": ("--save out", "", "Add --save FOLDER"),
    "no handler": ("--exit-signal-handler", "", "no handler"),
    "short grace": (
        "TERM@600",
        "TERM@70",
        r"shorter than a step between two saves, 90 s. Use --signal=TERM@180",
    ),
    "grace by default": ("TERM@600", "TERM", "the grace of 60 s is shorter"),
    "torchrun": ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "OTHER", "torchrun kills ranks 30 s after SIGTERM"),
    "warm-up": ("--train-iters 1000", "--train-iters 100", "--lr-warmup-iters 100 is not below 100.*Use 10"),
    "duration": ("mins 1400", "mins 1435", "ends after the signal at 1430 minutes.*Use at most 1429"),
    "no time": ("24:00:00", "11", "the signal comes after 1 minutes.*at least 12 minutes.*\n.*500 steps of 60 s"),
    "no checkpoint": ("24:00:00", "8:00:00", "--exit-duration.*\n.*500 steps of 60 s.*Use --save-interval 120"),
    "requeue": ("SBATCH --requeue", "SBATCH", "Add #SBATCH --requeue"),
    "log": ("--open-mode=append", "", "overwrites its log"),
    "other nodes": ("--kill-on-bad-exit=1", "", "other nodes wait"),
}


def found_in(path: Path, text: str, step: float | None = 60, save: float = 15) -> list[str]:
    path.write_text(text)
    return job.problems(job.read(path), step, save)


def test_a_good_script_has_no_problems(tmp_path: Path) -> None:
    assert found_in(tmp_path / "run.sbatch", GOOD) == found_in(tmp_path / "run.sbatch", GOOD, None) == []


@pytest.mark.parametrize("change", CHANGES)
def test_each_problem_is_found_alone(tmp_path: Path, change: str) -> None:
    before, after, expected = CHANGES[change]
    assert before in GOOD
    found = found_in(tmp_path / "run.sbatch", GOOD.replace(before, after))
    assert re.search(expected, "\n".join(found)) and len(found) == 1 + expected.count("\n"), found


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("30:15", 1815), ("2:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200), ("UNLIMITED", None)],
)
def test_times_as_slurm_writes_them(time: str, seconds: int | None) -> None:
    assert job.seconds_of(time) == seconds


@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")], ids=lambda path: path.name)
def test_the_examples_lose_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT", "/old/iter_0000001")
    monkeypatch.setenv("OUT", "/new/iter_0000001")
    read = job.read(path)
    assert int(read.words[0]) in (4, 8, 32, 64, 512) and read.grace == 600
    assert job.problems(read, 30, 60) == []
    assert "Use --signal=TERM@1400" in job.problems(read, 500, 100)[0]
    monkeypatch.setenv("GRACE", "70")  # which the scripts give to sbatch
    assert [found[:21] for found in job.problems(job.read(path), 60, 60)] == ["the grace of 70 s is "]


@pytest.mark.parametrize("extra", ["--save-interval 100000", "--save-interval=100000", "--exit-duration-in-mins=9999"])
def test_the_last_of_equal_flags_counts(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(tmp_path / "run.sbatch", GOOD.replace("mins 1400", f"mins 1400 {extra}"), 30, 0)
    expected = "--exit-duration-in-mins 9999 ends" if "duration" in extra else "a checkpoint takes 100000 steps"
    assert len(found) == 1 and found[0].startswith(expected)
    monkeypatch.setenv("EXTRA", f"--save-interval=500 {extra}")
    found = job.problems(job.read(EXAMPLES / "llama3_70b.sbatch"), 30)
    # The examples' tail puts a shorter duration behind it.
    assert [problem.startswith(expected) for problem in found] == ([] if "duration" in extra else [True])


@pytest.mark.parametrize(
    ("minutes", "arguments", "expected"),
    [
        (60, "--exit-signal-handler", 49),
        (60, "--exit-signal-handler --exit-duration-in-mins 20", 20),
        (60, "--exit-signal-handler --exit-duration-in-mins=235", 49),
        (60, "of a loop", None),
        (None, "--exit-signal-handler --exit-duration-in-mins 235", 235),
    ],
)
def test_the_tail_stops_a_job_before_the_signal(
    minutes: int | None, arguments: str, expected: int | None, tmp_path: Path
) -> None:
    run = in_the_tail(minutes, arguments, tmp_path, str(tmp_path))
    assert run.returncode == 0, run.stderr
    found = re.findall(r"--exit-duration-in-mins[ =](\d+)", run.stdout)
    assert found[-1:] == ([] if expected is None else [str(expected)]), run.stdout
    assert len((EXAMPLES / job.TAIL).read_text().splitlines()) <= 60


def in_the_tail(minutes: int | None, arguments: str, folder: Path, save: str) -> subprocess.CompletedProcess[str]:
    """Run a job whose time limit is in some minutes."""
    end = "Unknown"
    if minutes is not None:
        end = (datetime.now() + timedelta(minutes=minutes, seconds=30)).isoformat(timespec="seconds")
    for name, text in {
        "scontrol": f"echo '   StartTime=2026-11-28T09:00:00 EndTime={end} x'",
        "python": f'echo "$@"; echo finished > {folder}/outcome.txt',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    script = f"""set -euo pipefail
    NAME=job LOGS={folder} SAVE={save} NODES=1 GPUS=1 PYTHON={folder}/python SCRIPT={folder}/python
    ARGUMENTS=({arguments}) ENTRY=() PROFILER=() FILES=() THEN=() CONTAINER=() RENDEZVOUS=(--standalone)
    source {EXAMPLES}/{job.TAIL}"""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)


def test_a_time_limit_below_the_grace_is_refused_for_runs_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_the_tail(11, "--exit-signal-handler", tmp_path, str(tmp_path))
    assert run.returncode == 2
    assert "expected a time limit 2 minutes above GRACE=600 s, or a shorter GRACE; got an end at 20" in run.stderr
    run = in_the_tail(11, "convert", tmp_path, "''")
    assert run.returncode == 0 and run.stdout.splitlines()[0].endswith("python convert"), run.stderr
    monkeypatch.setenv("SBATCH_TIMELIMIT", "11")
    monkeypatch.setenv("CHECKPOINT", "/old/iter_0000001")
    monkeypatch.setenv("OUT", "/new/iter_0000001")
    assert "the signal comes after 1 minutes" in job.problems(job.read(EXAMPLES / "llama3_70b.sbatch"))[0]
    assert job.problems(job.read(EXAMPLES / "sbatch_checkpoint_convert.sh")) == []


@pytest.mark.parametrize(
    ("script", "variables", "expected"),
    [
        ("llama3_70b.sbatch", {"ITERATIONS": "20"}, ""),
        ("llama3_70b.sbatch", {"ITERATIONS": "1"}, ""),
        ("llama3_70b.sbatch", {"EXTRA": "--train-iters=100"}, "iters below 100, the end of the decay; got 100"),
        ("llama3_70b.sbatch", {"EXTRA": "--train-iters 100 --lr-decay-iters 101"}, ""),
        ("llama3_70b.sbatch", {"EXTRA": "--lr-decay-iters 99"}, "iters below 99, the end of the decay; got 100"),
        ("sbatch_mfsdp_deepseek_v3.sh", {"EXTRA": "--train-samples 9"}, ""),  # it sets the end of the decay
        ("sbatch_mfsdp_deepseek_v3.sh", {"EXTRA": "--lr-decay-samples=9"}, "samples below 9, the end of the decay"),
    ],
)
def test_a_warm_up_beyond_the_decay_is_not_queued(
    script: str, variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho queued\n")
    (tmp_path / "sbatch").chmod(0o755)
    for name, value in {**variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    run = subprocess.run(["bash", EXAMPLES / script], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == ((2, "") if expected else (0, "queued\n")), run.stderr
    assert f"expected --lr-warmup-{expected}" in run.stderr or not expected
    # Also for the doctor.
    assert [found[:12] for found in job.problems(job.read(EXAMPLES / script))] == ["--lr-warmup-"] * bool(expected)


def test_the_time_limit_of_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "10")
    assert "500 steps of 60 s" in "\n".join(found_in(tmp_path / "run.sbatch", GOOD))
    assert job.read(EXAMPLES / "llama3_70b.sbatch").time_limit == 600
    found = found_in(tmp_path / "run.sh", "python train.py --exit-signal-handler\n")
    assert not any("queue" in problem for problem in found), "without Slurm there is none"


def test_a_handler_in_the_loop_is_found(tmp_path: Path) -> None:
    script = GOOD.replace("--exit-signal-handler", "").replace("pretrain_gpt.py", "loop.py")
    assert "no handler" in found_in(tmp_path / "run.sbatch", script)[0]
    (tmp_path / "loop.py").write_text("with StopSignals() as signals: ...\n")
    assert found_in(tmp_path / "run.sbatch", script) == []


@pytest.mark.merge
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "run.sbatch"
    path.write_text(GOOD)
    command: tuple = ("-m", "megatron.fsdp.tools.doctor", "--script", path)
    assert python(*command).stdout.endswith("queued again; --step-seconds and --save-seconds say whether in time\n")
    command = (*command, "--step-seconds", "100")
    ended = python(*command)
    assert (ended.returncode, ended.stdout) == (0, "saves in time, and is queued again\n"), ended.stderr
    ended = python(*command, "--save-seconds", "500")
    assert ended.returncode == 1 and ended.stdout.startswith("LOSES WORK  the grace of 600 s is shorter")
    ended = python(*command[:2])
    assert ended.returncode == 2 and "expected either --script or a script" in ended.stderr
