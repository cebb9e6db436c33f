"""A small part of `make parity`: our FSDP agrees with Megatron's DDP, and a run that differs is detected."""

from pathlib import Path

import pytest
import torch

from scripts import parity, random_lines
from scripts.parity_cases import CASES, STRATEGIES, Case
from scripts.real_loop import RunFailure, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here")

ZERO_3 = ("optim_grads_params",)
TRAINED = (
    ("2 ranks, 1 micro-batch, fp32", STRATEGIES),
    ("3 ranks, 4 micro-batches, fp32", ZERO_3),
    ("2 ranks, 4 micro-batches, bf16, not clipped", ("optim", *ZERO_3)),
    ("TP 2, sequence parallel", ZERO_3),
    ("PP 2, tied embeddings", ZERO_3),
    ("CP 2", ZERO_3),
    ("EP 2 x TP 2, ETP 1", ZERO_3),
    ("HSDP", ZERO_3),
    ("built on the meta device, TP 2, PP 2", ZERO_3),
)


def of_name(name: str) -> Case:
    (case,) = [case for case in CASES if case.name == name]
    return case


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategies"), TRAINED)
def test_loss_and_gradient_norm_agree_with_ddp(name: str, strategies: tuple[str, ...], corpus: Path) -> None:
    results = list(parity.compare(of_name(name), corpus, 4, strategies))
    assert len(results) == len(strategies)
    assert all(result.good for result in results), [result.text for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "state"), [("", "right"), ("--lr 2.01e-3", "DIFFERS"), ("--lr none", "ERROR")])
def test_a_random_line(more: str, state: str, corpus: Path, tmp_path: Path) -> None:
    line = {name: choices[0] for name, choices in random_lines.CHOICES.items()} | {"overlap": more}
    assert random_lines.train(line, corpus, tmp_path).state == state


@pytest.mark.slow
def test_a_run_with_other_numbers_is_reported_as_different(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "fsdp_arguments", lambda strategy: [*parity.DDP, "--lr", "2.001e-3"])
    (result,) = parity.compare(of_name(TRAINED[0][0]), corpus, 4, ("optim",))
    assert not result.good


def test_a_failed_run_raises_an_error_with_its_log(corpus: Path) -> None:
    case = Case("data parallel", "one rank", 1, "--lr-decay-style unheard-of")
    with pytest.raises(RunFailure, match="lr-decay-style"):
        run(parity.model_arguments(case, corpus, 1), ranks=1)
