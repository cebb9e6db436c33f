"""The doctor finds what would lose work in a launch script for Slurm."""

import re
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
def test_the_last_of_equal_flags_counts(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTRA", f"--exit-duration-in-mins 1400 --save-interval=500 {extra}")
    found = job.problems(job.read(EXAMPLES / "llama3_70b.sbatch"), 30)
    assert [problem.split(" of 30 s")[0] for problem in found] == [
        "--exit-duration-in-mins 9999 ends after the signal at 1430 minutes, or after the time limit. Use at most 1430."
        if "duration" in extra
        else "a checkpoint takes 100000 steps"
    ]


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
