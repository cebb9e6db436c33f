"""``verify`` reports no difference in a correct run, and finds injected errors."""

from pathlib import Path

import pytest
import torch

from megatron.fsdp.tools.compare_runs import Step, compare, distance
from megatron.fsdp.tools.megatron_run import launch
from tests.functional_tests.injected import INJECTED
from tests.launch import ROOT, printed, python

SCRIPT = ROOT / "tests" / "functional_tests" / "injected.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --max-position-embeddings 32 --train-iters 50 --lr 1e-2 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --use-megatron-fsdp --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params"
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks over gloo on the CPU")


@pytest.mark.slow
def test_a_correct_run_agrees() -> None:
    flags = "--ranks 2 --steps 3 --layers 3 --hidden 48"
    output = printed(python("-m", "megatron.fsdp.tools.verify", *flags.split(), SCRIPT, *MODEL.split()))
    assert "equal:" in output, output


WHERE = {
    "missed_reduction": "step 1, gradient of",
    "wrong_divisor": "step 1, gradient of",
    "stale_weights": "step 2, loss",
    "skipped_parameter": "step 1, gradient of decoder.layers.1.mlp.linear_fc2.weight",
    "swapped_shard": "step 1,",
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "ddp"
    assert not launch(SCRIPT, MODEL.split(), ranks=2, steps=2, folder=folder, ddp=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("injected", [plant.__name__ for plant in INJECTED])
def test_injected_errors_are_found(injected: str, ddp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_INJECTED", injected)
    fsdp = tmp_path / "fsdp"
    assert not launch(SCRIPT, MODEL.split(), ranks=2, steps=2, folder=fsdp, ddp=False)
    found = compare(ddp, fsdp, precision="fp32").findings
    assert str(found[0]).startswith(WHERE[injected]), found[:5]


# Biases of queries, keys and values in bf16 -------------------------------------------------------------------------

BF16 = (
    f"{MODEL} --hidden-size 64 --ffn-hidden-size 256 --seq-length 64 --max-position-embeddings 64 --lr 1e-3 "
    "--bf16 --add-qkv-bias --disable-bias-linear"
)
BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Records of a bf16 model with these biases, trained with DDP and with FSDP."""
    folder = tmp_path_factory.mktemp("biased")
    for name in ("ddp", "fsdp"):
        assert not launch(SCRIPT, BF16.split(), ranks=2, steps=5, folder=folder / name, ddp=name == "ddp")
    return folder / "ddp", folder / "fsdp"


@pytest.mark.slow
def test_a_key_bias_whose_gradient_is_rounding_is_ignored_and_reported(biased: tuple[Path, Path]) -> None:
    result = compare(*biased, precision="bf16")
    assert not result.findings, result.findings[:5]
    # Rows are queries, keys and values of one head after the other; 64 of them belong to keys.
    assert result.noise.get(BIAS) == 64, result.noise
    a, b = (torch.load(folder / "000005.0.pt", weights_only=True)["weights"] for folder in biased)
    assert distance(a[BIAS], b[BIAS]) > 5e-2, "the biases agree anyway, so this test is meaningless"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "row", "where"),
    [
        ("weights", 0, f"step 5, weight of {BIAS}"),  # of a query
        ("weights", 32, f"step 5, weight of {BIAS}"),  # of a value
        ("gradients", 16, f"step 1, gradient of {BIAS}"),  # of a key
    ],
)
def test_an_error_in_such_a_bias_is_found(
    kind: str, row: int, where: str, biased: tuple[Path, Path], tmp_path: Path
) -> None:
    for file in biased[1].iterdir():
        step = Step(**torch.load(file, weights_only=True))
        if BIAS in getattr(step, kind):
            getattr(step, kind)[BIAS][row] += getattr(step, kind)[BIAS].abs().max() * 2
        number, rank = map(int, file.stem.split("."))
        step.save(tmp_path, number, rank)
    found = compare(biased[0], tmp_path, precision="bf16").findings
    assert str(found[0]).startswith(where), found[:5]


@pytest.mark.slow
def test_an_injected_error_in_such_a_model_is_found(
    biased: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_INJECTED", "skipped_parameter")
    assert not launch(SCRIPT, BF16.split(), ranks=2, steps=5, folder=tmp_path / "fsdp", ddp=False)
    found = compare(biased[0], tmp_path / "fsdp", precision="bf16").findings
    assert str(found[0]).startswith(WHERE["skipped_parameter"]), found[:5]
