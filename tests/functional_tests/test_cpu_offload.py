"""--optimizer-cpu-offload in Megatron's training loop: equal training, and checkpoints that any setting resumes."""

import functools
from pathlib import Path

import pytest
import torch

from scripts import real_loop
from tests.functional_tests.test_training_loop import MODEL, OURS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]

OFFLOAD = "--optimizer-cpu-offload --use-precision-aware-optimizer"
HALF = f"{OFFLOAD} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads"
ZERO_3 = "optim_grads_params"


def _run(strategy: str, arguments: str) -> real_loop.Run:
    ours = OURS.replace(ZERO_3, strategy)
    return real_loop.run(f"{MODEL} {ours} --bf16 --log-params-norm {arguments}".split(), ranks=2, timeout=280)


@functools.cache
def _whole(strategy: str, parallel: str, settings: str, folder: Path) -> real_loop.Run:
    """Four iterations, with checkpoints after two and four."""
    return _run(strategy, f"{parallel} {settings} --save {folder / settings[-1:]}")


TP = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(("strategy", "parallel"), [("optim", ""), ("optim_grads", ""), (ZERO_3, ""), (ZERO_3, TP)])
def test_trains_as_without_it_to_the_bit(strategy: str, parallel: str, folder: Path) -> None:
    place = folder / strategy / parallel[-1:]
    plain, offloaded = (_whole(strategy, parallel, settings, place) for settings in ("", HALF))
    assert len(plain.iterations) == 4 and plain.iterations[0].params_norm > 0
    assert offloaded.iterations == plain.iterations
    assert offloaded.validation == plain.validation
    assert "50.0% requested" in offloaded.log
    assert "overlap_cpu_optimizer_d2h_h2d has no effect" in offloaded.log


@pytest.mark.parametrize(("saved", "resumed"), [(HALF, ""), (HALF, OFFLOAD), ("", HALF)])
def test_a_resumed_run_continues_exactly(saved: str, resumed: str, folder: Path) -> None:
    place = folder / ZERO_3
    whole = _whole(ZERO_3, "", saved, place)
    found = _run(ZERO_3, f"{resumed} --load {place / saved[-1:]} --ckpt-step 2")
    assert found.iterations == whole.iterations[2:]
    assert found.validation == whole.validation
