"""A conversion takes memory for a few blocks, however large the checkpoint, and can be repeated after a kill."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.convert.canonical import TrainingState
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.run import read_state, write_state
from tests.checkpoints import DECAYED, ROOT

# Size in GiB of a large checkpoint to convert; unset by default.
LARGE = os.environ.get("FSDP_TEST_LARGE_CHECKPOINT")
MIB = 1 << 20

SCRIPT = """
import json, resource, sys
from pathlib import Path
from megatron.fsdp.convert.options import WriteOptions
from megatron.fsdp.convert.run import read_state, write_state

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

state = read_state(Path(sys.argv[1]))
before = peak()
written = write_state(state, Path(sys.argv[2]), sys.argv[3], WriteOptions(block=int(sys.argv[4])))
print(json.dumps({"before": before, "after": peak(), "bytes": written.nbytes}))
"""


# Loads an eighth of the rows of every tensor, as one of eight ranks does.
RANK = """
import json, resource, sys
from pathlib import Path
import torch
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.run import converted

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def have_read():
    return int(Path("/proc/self/io").read_text().split()[1])

view = converted(CheckpointReader(Path(sys.argv[1]), verify=False), ReadOptions(verify=False, keeps_rest=False))
before, start, shards = peak(), have_read(), []
for tensor in view.tensors.values():
    rows, *rest = tensor.shape
    shards.append(torch.empty(rows // 8, *rest))
    tensor.read_into(shards[-1], (rows // 8 * 3, *(0 for _ in rest)), int(sys.argv[2]))
held = sum(shard.nbytes for shard in shards)
print(json.dumps({"growth": peak() - before - held, "read": have_read() - start, "held": held}))
"""


def pattern(shape: tuple[int, ...], seed: float) -> LazyTensor:
    """A tensor that takes no memory, whose elements are a function of their row."""

    def read(region: Region) -> torch.Tensor:
        rows = torch.arange(region.offsets[0], region.offsets[0] + region.sizes[0], dtype=torch.float32)
        return (rows * 0.5 + seed).view(-1, *(1 for _ in shape[1:])).expand(region.sizes)

    return LazyTensor(shape, torch.float32, read)


def large_checkpoint(folder: Path, nbytes: int) -> Path:
    """A torch_dist checkpoint of about ``nbytes`` bytes, with all layers and experts in one tensor."""
    hidden, experts = 1024, 8
    # An element takes 14 bytes: a weight in bfloat16 and three tensors in float32.
    rows = nbytes // 14 // hidden // experts // 3 // 2
    weights: dict[str, LazyTensor] = {}
    for layer in range(2):
        for expert in range(experts):
            prefix = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
            weights |= {f"{prefix}linear_fc1.weight_{half}": pattern((rows, hidden), expert) for half in "wv"}
            weights |= {f"{prefix}linear_fc2.weight": pattern((hidden, rows), layer)}
    states = {n: {kind: pattern(w.shape, 3.0) for kind in ("exp_avg", "exp_avg_sq")} for n, w in weights.items()}
    args = argparse.Namespace(bf16=True, swiglu=True, transformer_impl="local", num_layers=2)
    group_of = {name.removesuffix("_w").removesuffix("_v"): dict(DECAYED) for name in weights}
    state = TrainingState(weights, {"args": args, "iteration": 7}, {}, states, group_of)
    write_state(state, folder / "source", "torch_dist")
    return folder / "source"


def convert(source: Path, target: Path, format: str, block: int) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, str(source), str(target), format, str(block)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=1000)
    found: dict[str, int] = json.loads(output.stdout)
    return found


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    block = 8 * MIB
    growth = []
    for nbytes in (64 * MIB, 512 * MIB):
        source = large_checkpoint(tmp_path / str(nbytes), nbytes)
        there = convert(source, source.with_name("there"), "fsdp_dtensor", block)
        back = convert(source.with_name("there"), source.with_name("back"), "torch_dist", block)
        assert there["bytes"] > 0.8 * nbytes
        growth.append([found["after"] - found["before"] for found in (there, back)])
    assert max(growth[1]) < 10 * block, growth
    assert all(large < small + 2 * block for small, large in zip(*growth, strict=True)), growth


@pytest.mark.slow
def test_a_rank_reads_its_share(tmp_path: Path) -> None:
    block = 4 * MIB
    source = large_checkpoint(tmp_path, 512 * MIB)
    output = subprocess.run(
        [sys.executable, "-c", RANK, str(source), str(block)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = json.loads(output.stdout)
    # Three tensors in float32 are loaded; the weights in bfloat16 are read to compare the main weights with them.
    assert found["held"] > 0.8 * 512 * MIB / 8 * 12 / 14
    assert found["read"] < 1.02 * found["held"] * 14 / 12
    assert found["growth"] < 10 * block


@pytest.mark.skipif(LARGE is None, reason="set FSDP_TEST_LARGE_CHECKPOINT to a size in GiB, such as 4")
def test_a_large_checkpoint_is_converted_in_a_gibibyte(tmp_path: Path) -> None:
    source = large_checkpoint(tmp_path, int(float(LARGE or 0) * 1024) * MIB)
    there = convert(source, tmp_path / "there", "fsdp_dtensor", 64 * MIB)
    back = convert(tmp_path / "there", tmp_path / "back", "torch_dist", 64 * MIB)
    assert max(there["after"], back["after"]) < 1024 * MIB


def test_a_killed_conversion_can_be_repeated(tmp_path: Path) -> None:
    source = large_checkpoint(tmp_path, 256 * MIB)
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "there"), "fsdp_dtensor", str(MIB)]
    partial = tmp_path / "there.partial"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not (written(partial) > 20 * MIB or process.poll() is not None):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "there").exists()
    before = written(partial)
    assert before > 20 * MIB
    seen: list[int] = []
    state = read_state(source)
    write_state(state, tmp_path / "there", "fsdp_dtensor", WriteOptions(block=MIB), seen.append)
    assert sum(seen) > 200 * MIB and not partial.exists()
    found = read_state(tmp_path / "there")
    assert set(found.weights) == set(state.weights)
    for name in sorted(state.weights)[::10]:
        assert torch.equal(found.weights[name].full_tensor(), state.weights[name].full_tensor()), name


def written(partial: Path) -> int:
    try:
        return (partial / "__0_0.distcp").stat().st_size
    except FileNotFoundError:
        return 0
