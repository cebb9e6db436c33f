"""Megatron's training loop with --fp8-param-gather. Simulated: a reference format replaces Transformer Engine's."""

import functools
from pathlib import Path

import pytest

from scripts.parity_cases import ALLTOALL, EP, TP
from tests.functional_tests.test_training_loop import DDP, KINDS, MODEL, OURS, Run, numbers, train
from tests.ranks import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

BF16 = KINDS["ours_bf16"]
# Which recipe it is does not matter: the script decides on the format.
FP8 = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
QUANTIZED = f"{BF16} {FP8}"
SCRIPT = "tests/functional_tests/quantized.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def uninterrupted(folder: Path) -> Run:
    """A run with quantized weights that saves checkpoints at iterations 2 and 4."""
    return train(f"{QUANTIZED} --save {folder / 'quantized'}", SCRIPT)


@pytest.mark.slow
def test_settings_reach_the_model(folder: Path) -> None:
    whole = uninterrupted(folder)
    assert whole.output.count("reuse_grad_buf_for_mxfp8_param_ag is set to False: ") == 1
    assert whole.output.count("disable_parameter_transpose_cache is set to True: ") == 1
    plain = train(BF16)
    assert plain.iterations[1] != whole.iterations[1]
    assert numbers(whole) == pytest.approx(numbers(plain), rel=0.03)


@pytest.mark.slow
def test_a_resumed_run_continues_exactly(folder: Path) -> None:
    whole = uninterrupted(folder)
    resumed = train(f"{QUANTIZED} --load {folder / 'quantized'} --ckpt-step 2", SCRIPT)
    assert resumed.iterations[3] == whole.iterations[3]
    assert resumed.iterations[4][1] == whole.iterations[4][1]
    assert resumed.validation == whole.validation


@pytest.mark.slow
def test_another_number_of_ranks_resumes(folder: Path) -> None:
    whole = uninterrupted(folder)
    resumed = train(f"{QUANTIZED} --load {folder / 'quantized'} --ckpt-step 2", SCRIPT, ranks=3)
    for ours, reference in zip(resumed.iterations[3], whole.iterations[3], strict=True):
        assert float(ours) == pytest.approx(float(reference), rel=2e-4)


@pytest.mark.slow
def test_bf16_runs_load_and_are_loaded(folder: Path) -> None:
    quantized = uninterrupted(folder)
    plain = train(f"{BF16} --save {folder / 'bf16'}")
    for run, script, options in ((plain, SCRIPT, QUANTIZED), (quantized, "pretrain_gpt.py", BF16)):
        source = folder / ("bf16" if run is plain else "quantized")
        resumed = train(f"{options} --load {source} --ckpt-step 2", script)
        assert resumed.iterations[3] != run.iterations[3]
        assert float(resumed.iterations[3][0]) == pytest.approx(float(run.iterations[3][0]), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["", TP, f"{ALLTOALL} {EP}"], ids=["data", "tensor", "expert"])
def test_prints_what_ddp_prints(parallelism: str) -> None:
    """DDP has plain weights, which every forward rounds in the same way."""
    model = MODEL.replace("--global-batch-size 6", "--global-batch-size 4")
    ddp = train(f"{DDP} {parallelism}", SCRIPT, ranks=4, model=model)
    ours = train(f"{OURS} {FP8} {parallelism}", SCRIPT, ranks=4, model=model)
    assert numbers(ours) == pytest.approx(numbers(ddp), rel=5e-7)
