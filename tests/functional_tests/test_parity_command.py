"""A small part of `make parity`: every strategy agrees with Megatron's DDP, and a run that differs is detected."""

from pathlib import Path

import pytest
import torch

from tools import parity
from tools.real_loop import RunFailure, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, strategies",
    [
        (parity.Case(ranks=2, micro_batches=1, kind="fp32"), parity.STRATEGIES),
        (parity.Case(ranks=3, micro_batches=2, kind="fp32"), ("optim_grads_params",)),
        (parity.Case(ranks=2, micro_batches=2, kind="bf16-unclipped"), ("optim", "optim_grads_params")),
    ],
)
def test_strategies_agree_with_ddp(case: parity.Case, strategies: tuple[str, ...], corpus: Path) -> None:
    comparison = parity.Comparison(corpus, iterations=4, report=lambda line: None)
    comparison.compare(case, strategies, original=False)
    assert comparison.table.row_count >= len(strategies)
    assert comparison.failed == 0


@pytest.mark.slow
def test_a_run_with_other_numbers_is_reported_as_different(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "fsdp_arguments", lambda strategy: [*parity.DDP, "--lr", "2.001e-3"])
    comparison = parity.Comparison(corpus, iterations=4, report=lambda line: None)
    comparison.compare(parity.Case(2, 1, "fp32"), ("optim",), original=False)
    assert comparison.failed == 1


def test_a_failed_run_raises_an_error_with_its_log(corpus: Path) -> None:
    case = parity.Case(1, 1, "fp32")
    with pytest.raises(RunFailure, match="lr-decay-style"):
        run([*parity.model_arguments(case, corpus, 1), "--lr-decay-style", "unheard-of"], ranks=1)
