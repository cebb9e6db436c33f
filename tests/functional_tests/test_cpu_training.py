"""Megatron's training loop on the CPU: its DDP and its own FSDP agree, and a resumed run goes on as if not stopped."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron runs on CUDA here")

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --calculate-per-token-loss "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 1 --log-interval 1 --save-interval 2"
)
DDP = "--use-distributed-optimizer --ckpt-format torch_dist"
OWN_FSDP = (
    "--use-megatron-fsdp --fsdp-implementation megatron-core --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor"
)
KINDS = {"ddp": DDP, "own_fsdp": OWN_FSDP}


@dataclass(frozen=True)
class Run:
    """What a run logged, as printed.

    Attributes:
        iterations: iteration -> its loss and gradient norm.
        validation: losses of the validation and the test set after the last iteration.
    """

    iterations: dict[int, tuple[str, str]]
    validation: list[str]


def train(*arguments: str) -> Run:
    """Run pretrain_gpt.py on two ranks and return what it logged."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["pretrain_gpt.py", *MODEL.split(), *" ".join(arguments).split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-5000:]
    number = r"(\S+)"
    steps = re.findall(rf"iteration +{number}/.*?lm loss: {number} .*?grad norm: {number} ", output)
    validation = re.findall(rf"validation loss at .*?lm loss value: {number}", output)
    return Run({int(step): (loss, norm) for step, loss, norm in steps}, validation)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    """One uninterrupted run of each kind, which leave checkpoints of iterations 2 and 4."""
    return {kind: train(KINDS[kind], f"--save {folder / kind}") for kind in KINDS}


def test_fsdp_of_megatron_core_trains_as_ddp(runs: dict[str, Run]) -> None:
    assert list(runs["ddp"].iterations) == [1, 2, 3, 4]
    assert len(runs["ddp"].validation) == 2
    assert runs["own_fsdp"] == runs["ddp"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_as_if_not_stopped(kind: str, runs: dict[str, Run], folder: Path) -> None:
    whole = runs[kind]
    resumed = train(KINDS[kind], f"--load {folder / kind} --ckpt-step 2 --save {folder / kind}_resumed")
    assert list(resumed.iterations) == [3, 4]
    assert resumed.iterations[3] == whole.iterations[3]
    # The loss of the second iteration after a start is logged as the mean of two.
    assert resumed.iterations[4][1] == whole.iterations[4][1]
    assert resumed.validation == whole.validation
