"""In Megatron's training loop, with other kinds of parallelism, our FSDP trains like Megatron's DDP."""

from pathlib import Path

import pytest
import torch

from tools.parity import write_corpus
from tools.parity_nd import CASES, compare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")

# `make parity-nd` runs the complete table, which takes longer.
TRAINED = (
    "TP 2, sequence parallel",
    "PP 2, tied embeddings",
    "CP 2",
    "EP 2 x TP 2, ETP 1",
    "HSDP",
    "built on the meta device, TP 2, PP 2",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradient_norm_agree_with_ddp(name: str, corpus: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    (result,) = compare(case, corpus, iterations=4, strategies=("optim_grads_params",))
    assert result.good, result.text
