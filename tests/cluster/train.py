"""A loop that stops at signals and resumes from the newest complete checkpoint. Prints all digits of the losses."""

import argparse
import os
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.fsdp.checkpoint.backend import save
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.newest import newest_complete_checkpoint
from megatron.fsdp.checkpoint.stopping import StopSignals
from megatron_fsdp import fully_shard


def train(options: argparse.Namespace, signals: StopSignals) -> None:
    """Train and save as the command line says."""
    folder = options.folder
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model, optimizer = fully_shard(layers, torch.optim.AdamW(layers.parameters()), fsdp_unit_modules=[nn.Linear])

    def state(step: int) -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}

    first = 0
    if (newest := newest_complete_checkpoint(folder)) is not None:
        load(found := state(0), newest)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    for step in range(first, options.steps):
        time.sleep(40 if step == options.slow else options.seconds if first == 0 else 2)
        torch.manual_seed(step)
        loss = (model(torch.randn(4, 16)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item()!r}", flush=True)
        stop = signals.stop_requested()
        if stop or (step + 1) % options.every == 0:
            save(state(step + 1), folder / f"step_{step + 1}")
        if stop:
            return


@record
def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step, until the run is resumed")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--slow", type=int, default=-1, help="a step of 40 seconds")
    parser.add_argument("--fsync", type=float, help="seconds that it takes on rank 1")
    options = parser.parse_args()
    if options.fsync and os.environ["RANK"] == "1":
        mock.patch("os.fsync", lambda file: time.sleep(options.fsync)).start()
    with StopSignals(options.folder) as signals:
        dist.init_process_group("gloo")
        train(options, signals)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
