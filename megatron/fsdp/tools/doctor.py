"""Checks a training command without GPUs: reports how it would be sharded, or why it cannot run with our FSDP.

    megatron-fsdp-doctor [--world-size N] [--gpu NAME | --device-memory SIZE] [--rank R] [--json] [-m] SCRIPT ARGS...
    megatron-fsdp-doctor --script run.sbatch [--step-seconds S] [--save-seconds S]

One process is enough for any number of ranks, and no memory is allocated for weights. The report lists the mesh, units,
dtypes, collectives and bytes per rank, or every unsupported setting with a remedy. With --gpu or --device-memory, it
judges the arguments as on a GPU, says whether the command fits into the device's memory, and which changes would make
it fit: a training step runs on tensors without memory, and if the GPU's speed is known, its time is simulated. Progress
is shown on stderr. With --script, it says whether a launch script for Slurm saves in time and is
queued again; the scripts in examples/megatron_fsdp print their command with DRY_RUN=1, for the first form.

Exit codes: 0 the command would start to train; 1 it would not; 2 these options or the script's path are wrong; 3 it
would start, and is estimated not to fit into the device's memory.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.fsdp.tools import job, script
from megatron.fsdp.tools.devices import add_device, positive, reported
from megatron.fsdp.tools.predict.machine import SPEEDS, cluster_of
from megatron.fsdp.tools.progress import Progress


def main() -> int:
    """Examine the command and print the report. Returns the exit code."""
    parser = script.parser("megatron-fsdp-doctor", __doc__)
    size = os.environ.get("WORLD_SIZE", "8")
    parser.add_argument("--world-size", type=reported(positive), default=size, help="ranks (or 8)")
    parser.add_argument("--rank", type=int, help="the rank to examine (or one of the fullest pipeline stage)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the output of the script")
    parser.add_argument("--script", dest="job", type=Path, metavar="FILE", help="a launch script for Slurm")
    parser.add_argument("--step-seconds", type=float, help="seconds of a step, for --script")
    parser.add_argument("--save-seconds", type=float, default=0.0, help="seconds of a save, for --script")
    options = script.parse(parser, "job")
    if options.job is not None:
        return _read_job(parser, options)
    if not 0 <= (options.rank or 0) < options.world_size:
        parser.error(f"argument --rank: expected a rank below {options.world_size} (--world-size); got {options.rank}")
    script.prepare_megatron()
    with os.fdopen(os.dup(2), "w") as errors, _silent(not options.verbose):
        progress = Progress(errors)
        from megatron.fsdp.tools.examine import examine
        from megatron.fsdp.tools.predict.command import judge

        report = examine(
            options.script, options.arguments, options.world_size, options.rank, options.device_memory, progress
        )
        if options.device_memory is not None and report.accepted:
            progress.start("running a step on tensors without memory")
            known = getattr(options.device_memory, "gpu", "") in SPEEDS
            cluster = cluster_of(options.device_memory.gpu if known else "h100")  # bytes depend on no speed
            report = judge(options.script, options.arguments, report, cluster, options.device_memory)
            report.timed = known and not (report.config is not None and report.config.offload_optimizer)
            progress.end()
    print(report.as_json() if options.json else report.as_text())
    return report.exit_code


def _read_job(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print what would lose work. Returns the exit code."""
    try:
        read = job.read(options.job)
        found = job.problems(read, options.step_seconds, options.save_seconds)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    again = ", and is queued again" if read.options else ""
    fits = f"saves in time{again}"
    if options.step_seconds is None:
        fits = f"saves{again}; --step-seconds and --save-seconds say whether in time"
    lines = [f"LOSES WORK  {problem}" for problem in found] or [fits]
    print(json.dumps({"problems": found}, indent=2) if options.json else "\n".join(lines))
    return 1 if found else 0


@contextmanager
def _silent(active: bool) -> Iterator[None]:
    """Discard what is written to stdout and stderr, also by libraries and subprocesses, which bypass ``sys.stdout``."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    if active:
        silence = os.open(os.devnull, os.O_WRONLY)
        for number, _ in kept:
            os.dup2(silence, number)
        os.close(silence)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


if __name__ == "__main__":
    sys.exit(main())
