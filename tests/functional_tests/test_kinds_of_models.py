"""Checkpoints of every kind of model: a run continues exactly, and one rank without parallelism continues it, too."""

import re
from pathlib import Path

import pytest

from scripts.parity import fsdp_arguments, model_arguments
from scripts.parity_cases import CASES, Case
from scripts.real_loop import Run, run
from tests.ranks import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here"),
    pytest.mark.slow,
]

SAVED, LAST = 2, 4
NAMES = (
    "gated attention, TP 2",
    "softmax sinks, EP 2",
    "heterogeneous layers, PP 2",
    "shared expert with a gate, TP 2",
    "like DeepSeek-V3, EP 2",
    "Mamba hybrid, PP 2",
    "Mamba hybrid with experts, EP 2",
    "gated delta networks, TP 2",
)


def train(case: Case, corpus: Path, ranks: int, *options: str) -> Run:
    words = [word for word in model_arguments(case, corpus, LAST) if word != "--no-save-optim"]
    if ranks == 1:
        # The bar of a hybrid model's pattern divides pipeline stages.
        text = re.sub(r"--\w+-model-parallel-size 2|--sequence-parallel|(?<=\*)\|", "", " ".join(words))
        words = text.split()
    return run([*words, *fsdp_arguments("optim_grads_params"), *options], ranks)


@pytest.mark.parametrize("name", NAMES)
def test_training_resumes(corpus: Path, tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    folder = str(tmp_path / "checkpoints")
    whole = train(case, corpus, case.ranks, "--save", folder, "--save-interval", str(SAVED))
    load = ("--load", folder, "--ckpt-step", str(SAVED))
    same = train(case, corpus, case.ranks, *load)
    assert same.iterations == whole.iterations[SAVED:]
    alone = train(case, corpus, 1, *load)
    assert len(alone.iterations) == LAST - SAVED
    for found, expected in zip(alone.iterations, whole.iterations[SAVED:], strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-6)
