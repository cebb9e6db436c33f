"""Trains twice, without and with this FSDP, and reports the first number that differs.

    megatron-fsdp-verify --model FILE.py:FUNCTION [--ranks 2] [--steps 5] [--units CLASS ...]
    megatron-fsdp-verify [--ranks N] [--steps 5] [--layers L] [--hidden H] [-m] SCRIPT ARGS...

Both runs start from equal weights and train on equal data.

--model: a function that returns your model, or a tuple or dict with model, batches, loss, optimizer and shard, of which
all but the model may be missing. One process trains it without sharding and averages the gradients of the ranks'
batches by hand. Then ranks train it sharded. Losses, gradients and weights of every step are compared.

SCRIPT ARGS...: the command line of Megatron with FSDP. It is run with Megatron's DDP as well, without options that only
FSDP takes. Nothing is loaded or saved. Loss and gradient norm of every step, all gradients of the first step, and all
weights after the last step are compared.

Weights whose gradient is a rounding error, such as biases of attention keys, are left out and listed.

Exit codes: 0 the runs are equal; 1 they differ, or only the sharded one fails; 2 the command line, the function or the
run without FSDP fails.
"""

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools import compare_runs, script


def main() -> int:
    """Run both, compare, and print the result. Returns the exit code."""
    parser = script.parser("megatron-fsdp-verify", __doc__)
    add_options(parser)
    options = script.parse(parser, "model")
    if options.ranks < 1 or options.steps < 1:
        parser.error(f"expected at least 1 rank and 1 step; got {options.ranks} and {options.steps}")
    if compare_runs.RECORD in os.environ:
        _record(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trusted, sharded = Path(folder, "trusted"), Path(folder, "sharded")
        run = _run_program if options.model else _run_megatron
        precision, code = run(options, trusted, sharded)
        return code or _report(compare_runs.compare(trusted, sharded, precision), precision)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks, started here (or 2)")
    parser.add_argument("--steps", type=int, default=5, help="training steps (or 5)")
    plain = parser.add_argument_group("programs of plain PyTorch")
    plain.add_argument(
        "--model", metavar="TARGET", help="file.py:function or module:function, or a Hugging Face config"
    )
    plain.add_argument("--units", nargs="+", default=[], metavar="CLASS", help="classes of units (or the layers')")
    plain.add_argument("--strategy", choices=tuple(INNER), default="optim_grads_params", help="(or optim_grads_params)")
    plain.add_argument(
        "--dtype",
        choices=("bf16", "fp32", "fp64"),
        help="convert the model (or its own); fp64 has no rounding to allow for",
    )
    plain.add_argument("--device", choices=("cpu", "cuda"), help="(or cuda with a device for each rank, else cpu)")
    plain.add_argument("--timeout", type=float, default=300, help="seconds that ranks wait for each other (or 300)")
    megatron = parser.add_argument_group("training commands of Megatron")
    megatron.add_argument("--layers", type=int, help="overrides --num-layers")
    megatron.add_argument(
        "--hidden", type=int, help="overrides --hidden-size, and sets --ffn-hidden-size to 4 times it"
    )


def _record(options: argparse.Namespace) -> None:
    """Train as one of the ranks."""
    if options.model:
        from megatron.fsdp.tools.plain_run import record_sharded

        record_sharded(options)
        return
    script.prepare_megatron()
    from megatron.fsdp.tools.megatron_run import record

    record(options.script, options.arguments)


def _run_program(options: argparse.Namespace, trusted: Path, sharded: Path) -> tuple[str, int]:
    """Train a program of plain PyTorch twice. Returns the precision, and the exit code if a run fails, else 0."""
    from megatron.fsdp.tools import plain_run

    print("training without sharding ...", flush=True)
    try:
        plain_run.record_trusted(options, trusted)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return "", 2
    except Exception:  # noqa: BLE001 - any error of the user's program
        traceback.print_exc()
        print("The run without sharding failed.", file=sys.stderr)
        return "", 2
    print(f"training sharded over {options.ranks} ranks ...", flush=True)
    log = compare_runs.run_on_ranks(sys.argv[1:], options.ranks, sharded, options.steps)
    if log:
        print(
            f"{log}\nDIFFERENT. The sharded run failed, the run without sharding did not. Above is the end of the log."
        )
        return "", 1
    return (sharded / plain_run.PRECISION).read_text(), 0


def _run_megatron(options: argparse.Namespace, trusted: Path, sharded: Path) -> tuple[str, int]:
    """Train a command of Megatron twice. Returns the precision, and the exit code if a run fails, else 0."""
    script.prepare_megatron()
    from megatron.fsdp.tools.megatron_run import launch

    layers, hidden = options.layers, options.hidden or 0
    sizes = {"--num-layers": layers, "--hidden-size": hidden, "--ffn-hidden-size": 4 * hidden}
    arguments, _ = script.edited(options.arguments, {flag: str(size) for flag, size in sizes.items() if size})
    for name, folder, code in (("DDP", trusted, 2), ("FSDP", sharded, 1)):
        print(f"training with {name} ...", flush=True)
        log = launch(options.script, arguments, options.ranks, options.steps, folder, ddp=folder is trusted)
        if log:
            print(f"{log}\nThe run with {name} failed; above is the end of its log.")
            return "", code
    return "bf16" if {"--bf16", "--fp16"} & set(arguments) else "fp32", 0


def _report(result: compare_runs.RunComparison, precision: str) -> int:
    """Print the result. Returns the exit code."""
    print(
        f"{result.compared} losses, norms, gradients and weights compared; "
        f"fingerprint of the weights {result.fingerprint}"
    )
    for name, elements in result.noise.items():
        print(f"left out: {elements} elements of {name}, whose gradient is a rounding error, which Adam amplifies")
    if not result.findings:
        print(f"equal: the largest relative difference is {result.largest:.1e}")
        if precision == "bf16":  # a wrong weight decay is within the tolerances of a few steps
            print("bf16 hides differences of a few percent, which the same program shows in fp32 (--dtype fp32).")
        return 0
    print(f"DIFFERENT. First: {result.findings[0]}")
    for finding in result.findings[1:10]:
        print(f"           then: {finding}")
    if len(result.findings) > 10:
        print(f"           and {len(result.findings) - 10} more in this step")
    return 1


if __name__ == "__main__":
    sys.exit(main())
