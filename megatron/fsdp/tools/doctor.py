"""Checks a training command without GPUs: reports how it would be sharded, or why it cannot run with our FSDP.

    python -m megatron.fsdp.doctor [--world-size N] [--rank R] [--json] [-m] SCRIPT ARGS...

One process is enough for any number of ranks, and no memory is allocated for weights. The report lists the mesh, units,
dtypes, collectives and bytes per rank, or every unsupported setting with a remedy. The exit code is 0 if the command
would start to train, else 1.
"""

import os
import sys

from megatron.fsdp.tools import script


def main() -> int:
    """Examine the command and print the report. Returns the exit code."""
    parser = script.parser("megatron.fsdp.doctor", __doc__)
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "8")), help="ranks (or 8)")
    parser.add_argument("--rank", type=int, default=0, help="the rank to examine, because pipeline stages differ")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the output of the script")
    options = script.parse(parser)
    script.prepare_megatron()
    from megatron.fsdp.tools.examine import examine

    # Redirect the file descriptors: output of libraries and subprocesses does not go through sys.stdout.
    shown = os.dup(1)
    if not options.verbose:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    report = examine(options.script, options.arguments, options.world_size, options.rank)
    sys.stdout.flush()
    os.dup2(shown, 1)
    print(report.as_json() if options.json else report.as_text())
    return 0 if report.accepted else 1


if __name__ == "__main__":
    sys.exit(main())
