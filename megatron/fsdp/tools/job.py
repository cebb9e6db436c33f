"""Reads a launch script for Slurm: will the run save before it is stopped, and be queued again?

The ``#SBATCH`` lines and the command count. A script that prints its command if ``DRY_RUN`` is set, as the
examples do, is asked for it; of others, only the text is searched.
"""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

# Seconds from SIGTERM to SIGKILL, by Slurm at the time limit and by torchrun, unless told otherwise.
KILL_WAIT = 30
TAIL = "job.bash"
# From the start of a job to the signal, below which TAIL refuses to train.
LEAST_MINUTES = 2
HANDLER, CONVERTER = "StopSignals", "checkpoint_inspector"


@dataclass
class Job:
    """A script that starts a run.

    Attributes:
        folder: Where the script is.
        text: The script, without comments.
        options: Options of ``sbatch`` by name, without dashes.
        words: Number of ranks, training script and its arguments; empty if the script does not print them.
    """

    folder: Path
    text: str
    options: dict[str, str]
    words: list[str] = field(default_factory=list)

    @property
    def shares_tail(self) -> bool:
        """Whether it ends as the examples do, in ``job.bash``."""
        return TAIL in self.text

    @property
    def _command(self) -> list[str]:
        return re.split(r"[\n=]", "\n".join(self.words)) if self.words else re.split(r"[\s\"'=]+", self.text)

    def has(self, flag: str) -> bool:
        """Whether the command has a flag."""
        return flag in self._command

    @property
    def handles_signals(self) -> bool:
        """Whether SIGTERM loses nothing: Megatron or a loop saves then; an interrupted conversion resumes."""
        if self.has("--exit-signal-handler") or HANDLER in self.text or CONVERTER in self.text:
            return True
        named = re.findall(r"[\w./-]+\.py\b", self.text)
        paths = [path for name in named for path in (Path(name), self.folder / name) if path.is_file()]
        return any(HANDLER in path.read_text(errors="replace") for path in paths)

    def word(self, flag: str) -> str:
        """The word after a flag of the command, or after a variable and =; the last counts. Empty if there is none."""
        return dict(pairwise(self._command)).get(flag, "")

    def number(self, flag: str) -> float | None:
        """The number after a flag of the command; None if there is none."""
        value = self.word(flag)
        return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None

    @property
    def time_limit(self) -> float | None:
        """Seconds until Slurm ends the job; None if the script does not say."""
        return seconds_of(self.options.get("time", self.options.get("t", "")))

    @property
    def grace(self) -> float | None:
        """Seconds between the signal and the time limit; None if no signal is sent."""
        found = re.fullmatch(r"(?:([BR]+):)?\w+(?:@(\d+))?", self.options.get("signal", ""))
        only_batch = found is not None and "B" in (found[1] or "") and "trap" not in self.text
        return None if found is None or only_batch else float(found[2] or 60)

    @property
    def other_signal(self) -> str:
        """The name of the signal that Slurm sends, if it is not the one that is handled; else empty."""
        found = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?([A-Z]\w*)(?:@\d+)?", self.options.get("signal", ""))
        handled = self.word("--exit-signal") or "TERM"
        return found[1] if found and found[1] != handled.upper().removeprefix("SIG") else ""


def read(path: Path) -> Job:
    """Read a script. Runs it with ``DRY_RUN=1`` if it mentions that variable or ends in ``job.bash``."""
    lines = path.read_text().splitlines()
    options: dict[str, str] = {}
    for line in lines:
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH"), comments=True):
                if word.startswith("-"):
                    name, _, options[name] = word.lstrip("-").partition("=")
                elif options:  # the value of the option before it
                    options[list(options)[-1]] = word
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    job = Job(path.parent, text, options)
    if job.shares_tail:
        # What it gives to sbatch, which prefers that to the script's lines.
        grace = os.environ.get("GRACE") or f"{job.grace or 600:.0f}"
        job.options = {**options, "signal": f"TERM@{grace}", "requeue": "", "open-mode": "append"}
    if job.options and "SBATCH_TIMELIMIT" in os.environ:
        job.options["time"] = os.environ["SBATCH_TIMELIMIT"]
    if job.shares_tail or "DRY_RUN" in text:
        environment = {**os.environ, "DRY_RUN": "1"}
        run = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"{path}: expected it to print its command with DRY_RUN=1; got {run.stderr.strip()}")
        job.words = run.stdout.splitlines()
    return job


def seconds_of(time: str) -> float | None:
    """Convert a time as Slurm writes it, ``minutes``, ``hours:minutes:seconds`` or ``days-hours``, to seconds."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        return None
    days, *rest = (int(part) for part in found.groups(default="0"))
    counts_hours = found[1] is not None or found[4] is not None
    units = (3600, 60, 1) if counts_hours else (60, 1, 0)
    return float(days * 86400 + sum(part * unit for part, unit in zip(rest, units, strict=True)))


def problems(job: Job, step: float | None = None, save: float = 0.0) -> list[str]:
    """List what would lose work, each with a remedy.

    Args:
        job: The script.
        step: Seconds of a step. None: not known.
        save: Seconds of a save.
    """
    found = []
    # The signal may arrive when a save begins.
    needed = None if step is None else step + 2 * save
    if job.grace is None:
        found.append(f"no signal to the ranks before the last {KILL_WAIT} s. Add #SBATCH --signal=TERM@600.")
    if job.handles_signals and job.other_signal:
        found.append(
            f"Slurm sends SIG{job.other_signal}, which nothing handles and ends the ranks. Use #SBATCH "
            "--signal=TERM@600."
        )
    if not job.handles_signals:
        found.append("no handler: SIGTERM ends the run without a save. Add --exit-signal-handler, or StopSignals.")
    if job.has("--exit-signal-handler") and not job.has("--save"):
        found.append("--exit-signal-handler without --save saves nothing. Add --save FOLDER.")
    if needed is not None and job.grace is not None and needed >= job.grace:
        found.append(
            f"the grace of {job.grace:.0f} s is shorter than a step between two saves, {needed:.0f} s. Use "
            f"--signal=TERM@{2 * needed:.0f} (GRACE={2 * needed:.0f} in the examples)."
        )
    keeps = job.shares_tail or re.search(r"SHUTDOWN_TIMEOUT|--shutdown-timeout|--signals-to-handle", job.text)
    runs = "torchrun" in job.text or "torch.distributed.run" in job.text
    waits = job.number("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or job.number("--shutdown-timeout")
    if runs and waits is not None and needed is not None and needed >= waits:
        found.append(f"torchrun kills ranks {waits:.0f} s after SIGTERM. Set its time to {2 * needed:.0f}.")
    if runs and not keeps and (needed is None or needed >= KILL_WAIT):
        found.append(
            f"torchrun kills ranks {KILL_WAIT} s after SIGTERM. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to the grace."
        )
    return [*found, *_of_schedule(job, step), *_of_queue(job)]


def _of_schedule(job: Job, step: float | None) -> list[str]:
    found = []
    for unit in ("iters", "samples"):
        warm_up = job.number(f"--lr-warmup-{unit}")
        end = job.number(f"--lr-decay-{unit}") or job.number(f"--train-{unit}")
        if warm_up is not None and end is not None and warm_up >= end:
            found.append(
                f"--lr-warmup-{unit} {warm_up:.0f} is not below {end:.0f}, the end of the decay. Use {end // 10:.0f}."
            )
    limit, duration, interval = job.time_limit, job.number("--exit-duration-in-mins"), job.number("--save-interval")
    signalled = None if limit is None else (limit - (job.grace or 0)) / 60
    # In TAIL, a conversion ignores the signal.
    if signalled is not None and signalled < LEAST_MINUTES and not (job.shares_tail and CONVERTER in job.text):
        found.append(
            f"the signal comes after {signalled:.0f} minutes, and again after each requeue. Use --time or "
            f"SBATCH_TIMELIMIT of at least {LEAST_MINUTES + (job.grace or 0) / 60:.0f} minutes, or a shorter grace."
        )
    elif signalled is not None and duration is not None and duration > signalled and not job.shares_tail:
        found.append(
            f"--exit-duration-in-mins {duration:.0f} ends after the signal at {signalled:.0f} minutes, or after the "
            f"time limit. Use at most {signalled - (step or 0) / 60:.0f}."
        )
    if limit is not None and interval is not None and step is not None and interval * step > limit:
        found.append(
            f"a checkpoint takes {interval:.0f} steps of {step:.0f} s, longer than the time limit: a killed run loses "
            f"everything. Use --save-interval {max(1, int(limit / step / 4))}."
        )
    return found


def _of_queue(job: Job) -> list[str]:
    found = []
    if job.options and not job.shares_tail and "scontrol requeue" not in job.text:
        found.append(
            "a job that has stopped and saved ends, and nothing queues it again. After srun, run scontrol requeue "
            "$SLURM_JOB_ID if outcome.txt says stopped, as examples/megatron_fsdp/job.bash does."
        )
    elif job.options and not job.shares_tail and not re.search(r"(?<![\w-])exit\b|set -\w*e", job.text):
        found.append("Slurm calls a job that has failed COMPLETED. After srun, exit with 1 if outcome.txt says failed.")
    if job.options and "requeue" not in job.options:
        found.append("a job whose node is lost is not queued again. Add #SBATCH --requeue.")
    if job.options and job.options.get("open-mode") != "append":
        found.append("a job that is queued again overwrites its log. Add #SBATCH --open-mode=append.")
    if "srun" in job.text and "--kill-on-bad-exit" not in job.text:
        found.append("other nodes wait for a node that has failed. Add srun --kill-on-bad-exit=1.")
    return found
