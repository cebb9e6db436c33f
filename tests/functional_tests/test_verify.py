"""``verify`` agrees where nothing is wrong, and finds errors that were planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.fsdp.mcore.verify import compare, launch
from tests.functional_tests.planted import PLANTED
from tests.slow import all_but_slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "functional_tests" / "planted.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --max-position-embeddings 32 --train-iters 50 --lr 1e-2 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --use-megatron-fsdp --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params"
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks over gloo on the CPU")


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong() -> None:
    flags = "--ranks 2 --steps 3 --layers 3 --hidden 48"
    result = subprocess.run(
        [sys.executable, "-m", "megatron.fsdp.verify", *flags.split(), str(SCRIPT), *MODEL.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0 and "equal:" in result.stdout, result.stdout + result.stderr


WHERE = {
    "missed_reduction": "iteration 1, gradient of",
    "wrong_divisor": "iteration 1, gradient of",
    "stale_weights": "iteration 2, loss",
    "skipped_parameter": "iteration 1, gradient of decoder.layers.1.mlp.linear_fc2.weight",
    "swapped_shard": "iteration 1,",
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "ddp"
    assert not launch(SCRIPT, MODEL.split(), ranks=2, steps=2, folder=folder, ddp=True)
    return folder


@pytest.mark.parametrize("planted", all_but_slow([plant.__name__ for plant in PLANTED], "swapped_shard"))
def test_planted_errors_are_found(planted: str, ddp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_PLANTED", planted)
    fsdp = tmp_path / "fsdp"
    assert not launch(SCRIPT, MODEL.split(), ranks=2, steps=2, folder=fsdp, ddp=False)
    found = compare(ddp, fsdp, ranks=2, precision="fp32").findings
    assert str(found[0]).startswith(WHERE[planted]), found[:5]
