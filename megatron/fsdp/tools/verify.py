"""Trains with Megatron's DDP and with our FSDP, and reports the first difference.

    megatron-fsdp-verify [--ranks N] [--steps 5] [--layers L] [--hidden H] [-m] SCRIPT ARGS...

It compares loss and gradient norm of every step, all gradients of the first step, and all weights after the last step.
Give the command line of the FSDP run; options that only FSDP takes are removed for DDP. Nothing is loaded or saved.
Weights whose gradient is a rounding error, such as biases of attention keys, are left out and listed. The exit code is
0 if the runs agree, else 1.
"""

import os
import sys
import tempfile
from pathlib import Path

from megatron.fsdp.tools import script


def main() -> int:
    """Run the command with both, compare, and print the result. Returns the exit code."""
    if sys.argv[1:2] == ["--record"]:
        script.prepare_megatron()
        from megatron.fsdp.tools.compare_runs import record

        record(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = script.parser("megatron-fsdp-verify", __doc__)
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")), help="ranks (or 2)")
    parser.add_argument("--steps", type=int, default=5, help="training steps")
    parser.add_argument("--layers", type=int, help="overrides --num-layers")
    parser.add_argument("--hidden", type=int, help="overrides --hidden-size, and sets --ffn-hidden-size to 4 times it")
    options = script.parse(parser)
    script.prepare_megatron()
    from megatron.fsdp.tools.compare_runs import compare, launch, with_value

    arguments = options.arguments
    if options.layers:
        arguments = with_value(arguments, "--num-layers", options.layers)
    if options.hidden:
        arguments = with_value(arguments, "--hidden-size", options.hidden)
        arguments = with_value(arguments, "--ffn-hidden-size", 4 * options.hidden)
    with tempfile.TemporaryDirectory() as folder:
        ddp, fsdp = Path(folder, "ddp"), Path(folder, "fsdp")
        for name, into in (("DDP", ddp), ("FSDP", fsdp)):
            print(f"training with {name} ...", flush=True)
            log = launch(options.script, arguments, options.ranks, options.steps, into, ddp=into is ddp)
            if log:
                print(f"{log}\nThe run with {name} failed; above is the end of its log.")
                return 1
        precision = "bf16" if {"--bf16", "--fp16"} & set(arguments) else "fp32"
        result = compare(ddp, fsdp, options.ranks, precision)
    print(
        f"{result.compared} losses, norms, gradients and weights compared; "
        f"fingerprint of the weights {result.fingerprint}"
    )
    for name, elements in result.noise.items():
        print(f"left out: {elements} elements of {name}, whose gradient is a rounding error, which Adam amplifies")
    if not result.findings:
        print(f"equal: the largest relative difference is {result.largest:.1e}")
        return 0
    print(f"DIFFERENT. First: {result.findings[0]}")
    for finding in result.findings[1:10]:
        print(f"           then: {finding}")
    if len(result.findings) > 10:
        print(f"           and {len(result.findings) - 10} more")
    return 1


if __name__ == "__main__":
    sys.exit(main())
