"""Says what a training command would do with our FSDP, or why it cannot, before a GPU is asked for.

    python -m megatron.fsdp.doctor [--world-size N] [--rank R] [--json] SCRIPT ARGS...

It needs one process and no GPU, for any number of ranks; the model is built without memory for its weights. Printed are
the mesh, units, dtypes, collectives and bytes per rank; or every setting that does not fit, with what to do. Exits with
0 if the command would start to train, else with 1.
"""

import os
import sys

from megatron.fsdp.mcore import cpu
from megatron.fsdp.tools import script


def main() -> int:
    """Examine the command, print the report, return the exit code."""
    parser = script.parser("megatron.fsdp.doctor", __doc__)
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "8")), help="ranks; or 8")
    parser.add_argument("--rank", type=int, default=0, help="the rank to look at: pipeline stages differ")
    parser.add_argument("--json", action="store_true", help="print the report for programs")
    parser.add_argument("--verbose", action="store_true", help="let the script print what it prints")
    options = script.parse(parser)
    cpu.enable()
    from megatron.fsdp.tools.examine import examine

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
