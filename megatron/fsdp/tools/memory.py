"""Shows the memory of your model on each rank, by sharding strategy.

    megatron-fsdp-memory --model mymodule:build --units Block --ranks 8 64
    megatron-fsdp-memory --model path/of/a/config.json --gpu h100 --json

The model is built on the meta device: no weights are allocated, and one process stands for any number of ranks. The
engine's own planner shards it. Activations are not part of the result. The exit code is 0, or 2 for wrong arguments.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools import program
from megatron.fsdp.tools.by_strategy import Bar, bars
from megatron.fsdp.tools.devices import GIB, add_device
from megatron.fsdp.tools.estimate import outline
from megatron.fsdp.tools.program import DTYPES, unit_classes


def table(found: Sequence[Bar], capacity: int | None = None) -> str:
    """The bars as text, in GiB per rank, and what they leave of a device with ``capacity`` bytes."""
    header = ["ranks", "strategy", "weights", "main", "gradients", "optimizer", "in flight", "total"]
    rows = [header if capacity is None else [*header, "left"]]
    for bar in found:
        u = bar.usage
        sizes = [u.compute, u.main, u.gradients, u.optimizer, u.buffers, u.total]
        sizes += [] if capacity is None else [capacity - u.total]
        rows.append([str(bar.ranks), bar.strategy, *(f"{size / GIB:.2f}" for size in sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if i == 1 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-fsdp-memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="module:function, or a Hugging Face config.json or its folder")
    parser.add_argument("--units", nargs="+", default=[], metavar="CLASS", help="classes of units (or the layers')")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="numbers of ranks (or 8 64)")
    parser.add_argument("--inner", type=int, default=8, help="ranks that HSDP shards over (or 8)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the compute weights (or bf16)")
    parser.add_argument("--main-dtype", choices=DTYPES, default="fp32", help="of the main weights (or fp32)")
    parser.add_argument(
        "--grad-dtype", choices=DTYPES, default="fp32", help="of summed and reduced gradients (or fp32)"
    )
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def main() -> int:
    """Print the table. Returns the exit code."""
    parser = _parser()
    options = parser.parse_args()
    policy = MixedPrecisionPolicy(
        main_params_dtype=DTYPES[options.main_dtype], main_grads_dtype=DTYPES[options.grad_dtype]
    )
    try:
        with torch.device("meta"):
            model = program.load(options.model).model.to(DTYPES[options.dtype])
        classes = unit_classes(model, options.units)
    except ValueError as error:
        parser.error(str(error))
    units = outline(model, classes, FSDPConfig())
    found = [bar for ranks in options.ranks for bar in bars(units, ranks, policy, options.inner)]
    elements = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}, {elements / 1e9:.2f} billion parameters, {options.dtype} weights, "
        f"{options.main_dtype} main weights, {options.grad_dtype} gradients"
    )
    if options.json:
        print(json.dumps([{**asdict(bar), "total": bar.usage.total} for bar in found], indent=2))
    else:
        print(f"{title}; units: {', '.join(cls.__name__ for cls in classes)}; GiB per rank")
        print(table(found, options.device_memory))
        print("Peak of a step without activations, which come on top.")
        if options.device_memory is not None:
            print(f"'left' is what remains for them of {options.device_memory / GIB:.1f} GiB.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
