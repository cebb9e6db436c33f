"""--optimizer-cpu-offload in Megatron's training loop: equal training, and checkpoints that any setting resumes."""

from pathlib import Path

import pytest
import torch

from tests.functional_tests.test_training_loop import OURS, Run, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]

OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
HALF = f"{OFFLOAD} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads"


def _assert_continues(resumed: Run, whole: Run) -> None:
    assert list(resumed.iterations) == [3, 4]
    assert resumed.iterations[3] == whole.iterations[3]
    # Megatron logs the loss of the second iteration after a start as the mean of two.
    assert resumed.iterations[4][1] == whole.iterations[4][1]
    assert resumed.validation == whole.validation


@pytest.mark.parametrize("parallel", ["", "--tensor-model-parallel-size 2"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_trains_saves_and_resumes_as_without_it(strategy: str, parallel: str, tmp_path: Path) -> None:
    ours = f"{OURS.replace('optim_grads_params', strategy)} --bf16 {parallel}"
    whole = train(ours)
    offloaded = train(f"{ours} {HALF} --save {tmp_path}")
    assert offloaded.iterations == whole.iterations and len(whole.iterations) == 4
    assert offloaded.validation == whole.validation
    assert "50.0% requested" in offloaded.output
    assert "overlap_cpu_optimizer_d2h_h2d has no effect" in offloaded.output
    for settings in (OFFLOAD, "") if strategy == "optim_grads_params" else (OFFLOAD,):
        _assert_continues(train(f"{ours} {settings} --load {tmp_path} --ckpt-step 2"), whole)


def test_a_run_without_it_is_resumed_with_it(tmp_path: Path) -> None:
    ours = f"{OURS} --bf16"
    whole = train(f"{ours} --save {tmp_path}")
    _assert_continues(train(f"{ours} {HALF} --load {tmp_path} --ckpt-step 2"), whole)
