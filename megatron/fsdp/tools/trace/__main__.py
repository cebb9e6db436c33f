"""Writes a timeline of one training step of a small transformer or of your own training script.

    python -m megatron.fsdp.trace --ranks 2 --out trace
    torchrun --nproc-per-node 2 -m megatron.fsdp.trace --out trace --strategy optim_grads --layers 6
    torchrun --nproc-per-node 2 -m megatron.fsdp.trace --out trace --script train.py --steps 5 -- arguments of train.py

Each command writes trace.json (for https://ui.perfetto.dev) and prints a table.
"""

import argparse
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.api.fully_shard import fully_shard
from megatron.fsdp.comm.backends import local_device
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools.script import run
from megatron.fsdp.tools.trace import Timeline, trace_step
from megatron.fsdp.tools.trace.watch import StepWatcher

VOCABULARY = 1024
SEQUENCE = 128


def transformer(layers: int, width: int) -> nn.Module:
    """The model that is traced if no script is given: an encoder that predicts its own input. Each layer is a unit."""
    heads = max(width // 64, 1)
    encoder = (
        nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
    )
    parts = {
        "embedding": nn.Embedding(VOCABULARY, width),
        "layers": nn.Sequential(*encoder),
        "head": nn.Linear(width, VOCABULARY, bias=False),
    }
    return nn.Sequential(OrderedDict(parts))


def demonstrate(arguments: argparse.Namespace) -> Timeline:
    """Train the transformer for some steps and trace the next one."""
    device = local_device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        torch.manual_seed(0)
        model = transformer(arguments.layers, arguments.width).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sharded, _ = fully_shard(
            model, optimizer, fsdp_unit_modules=[nn.TransformerEncoderLayer], zero_dp_strategy=arguments.strategy
        )
        torch.manual_seed(1 + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (max(arguments.tokens // SEQUENCE, 1), SEQUENCE), device=device)

        def step() -> None:
            loss = nn.functional.cross_entropy(sharded(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(arguments.steps):
            step()
        with trace_step(sharded) as timeline:
            step()
    finally:
        dist.destroy_process_group()
    return timeline


def trace_script(arguments: argparse.Namespace) -> None:
    """Run a script as ``python SCRIPT`` does, and trace one of its steps."""
    watcher = StepWatcher(trace_step, arguments.steps, lambda timeline: write(timeline, arguments.out))
    script = Path(arguments.script)
    run(script, arguments.arguments)
    if not watcher.done:
        raise SystemExit(
            f"{script} ended before a step could be traced: expected an optimizer of a sharded model to take at least "
            f"{arguments.steps + 1} steps. --steps sets how many of them are skipped."
        )


def write(timeline: Timeline, out: str) -> None:
    """Write and print the timeline. Does nothing on ranks other than the first of each data-parallel group."""
    if not timeline.ranks:
        return
    first = timeline.ranks[0].rank
    file = f"{out}-{first}.json" if first else f"{out}.json"
    timeline.print()
    timeline.save(file)
    print(f"wrote {file}, for https://ui.perfetto.dev", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Arguments after ``--`` are those of the script."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser("megatron.fsdp.trace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="trace", help="file to write, without extension (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps before the traced one (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start without torchrun (default: %(default)s)")
    parser.add_argument("--script", help="training script to run; the options below apply to the transformer only")
    parser.add_argument("--strategy", default="optim_grads_params", help=f"{', '.join(INNER)}, or 0 to 3")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="per rank and step (default: %(default)s)")
    arguments = parser.parse_args(argv[:end])
    arguments.arguments = argv[end + 1 :]
    if arguments.script is None and arguments.arguments:
        parser.error("arguments after -- are for a script, so --script is needed")
    if arguments.script is not None and not Path(arguments.script).is_file():
        parser.error(f"no such script: {arguments.script}")
    if arguments.steps < 2:
        parser.error(f"--steps: expected at least 2, to allocate memory and record the plan; got {arguments.steps}")
    if arguments.strategy.isdigit():
        arguments.strategy = int(arguments.strategy)
    return arguments


def main() -> None:
    """Run the command. Without torchrun, it starts ranks and runs itself on them."""
    argv = sys.argv[1:]
    arguments = parse(argv)
    if "RANK" not in os.environ:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        sys.exit(subprocess.run([sys.executable, "-m", *launch, "-m", "megatron.fsdp.trace", *argv]).returncode)
    if arguments.script is not None:
        trace_script(arguments)
    else:
        write(demonstrate(arguments), arguments.out)


if __name__ == "__main__":
    main()
