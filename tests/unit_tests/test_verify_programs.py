"""``verify --model``: correct programs agree with the run without sharding, and injected mistakes are named."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.tools import compare_runs, plain_run, verify
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.models import Block, TinyModel, adamw, loss_of, shard_in_place
from tests.ranks import DEVICE, RankFailure, RankPool

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the command chooses its device itself")


# Programs ------------------------------------------------------------------------------------------------------


def tokens(count: int = 7) -> list[torch.Tensor]:
    """Batches, fewer than are used: they start again."""
    return [torch.randint(0, 31, (2, 5)) for _ in range(count)]


def as_dict() -> dict[str, Any]:
    model = TinyModel(tied=True)
    return {"model": model, "batches": tokens(), "loss": loss_of, "optimizer": adamw(model.parameters())}


def as_tuple() -> tuple[Any, ...]:
    return TinyModel(), ((batch,) for batch in tokens(100))


def alone() -> nn.Module:
    return TinyModel()


class Rich(Block):
    """With random numbers, statistics of the batch, and a layer that no step uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.statistics, self.unused = nn.BatchNorm1d(width), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(super().forward(x), 0.2)
        return self.statistics(x.transpose(1, 2)).transpose(1, 2)


def with_block(block: nn.Module) -> nn.Module:
    model = TinyModel()
    model.blocks[1] = block
    return model


def rich() -> nn.Module:
    return with_block(Rich(13))


class Attention(nn.Module):
    """Keys have a bias, whose exact gradient is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def attention() -> nn.Module:
    return with_block(Attention(13))


def own_sharding() -> dict[str, Any]:
    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return fully_shard(model, optimizer, fsdp_unit_modules=[], zero_dp_strategy=1)

    return {"model": TinyModel(), "shard": shard}


def compute_in_bf16() -> dict[str, Any]:
    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        return fully_shard(model, optimizer, fsdp_unit_modules=[Block], mixed_precision_policy=policy)

    return {"model": TinyModel(), "batches": tokens(), "loss": loss_of, "shard": shard}


def as_with_fsdp2() -> dict[str, Any]:
    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return shard_in_place(model), optimizer

    return {"model": TinyModel(), "shard": shard}


# Mistakes ------------------------------------------------------------------------------------------------------


class DependsOnRank(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * dist.get_rank())


def depends_on_rank() -> nn.Module:
    return with_block(DependsOnRank(13))


class Writes(Block):
    """Changes a weight where autograd and the engine do not see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.mul_(0.9)
        return super().forward(x)


def writes_in_forward() -> nn.Module:
    return with_block(Writes(13))


def writes_a_shard() -> dict[str, Any]:
    """One rank changes its part of a weight, after the second step."""
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0

    def write(*unused: Any) -> None:
        nonlocal steps
        steps += 1
        weight = model.blocks[1].up.weight
        if steps == 2 and hasattr(weight, "to_local") and dist.get_rank() == 1:
            with torch.no_grad():
                weight.to_local()[0, 0] += 0.5

    optimizer.register_step_post_hook(write)
    return {"model": model, "optimizer": optimizer}


def builds_differ() -> dict[str, Any]:
    """Ranks have other batches than the run without sharding."""
    return {"model": TinyModel(), "batches": [(batch + dist.get_rank()) % 31 for batch in tokens()], "loss": loss_of}


def without_gradients_of_a_layer() -> dict[str, Any]:
    """With several ranks, a layer gets no gradient."""
    model = TinyModel()

    if dist.get_world_size() > 1:
        model.blocks[2].up.register_forward_hook(lambda module, inputs, output: output.detach())
    return {"model": model}


def fails_when_sharded() -> nn.Module:
    assert dist.get_world_size() == 1, "this program knows no other rank"
    return TinyModel()


# Comparisons ---------------------------------------------------------------------------------------------------


def options(program: Callable[[], Any], *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verify.add_options(parser)
    return parser.parse_args(["--model", f"{__file__}:{program.__name__}", "--steps", "3", *words])


def compare(ranks: RankPool, tmp_path: Path, chosen: argparse.Namespace) -> compare_runs.RunComparison:
    trusted, sharded = tmp_path / "trusted", tmp_path / "sharded"
    sharded.mkdir()
    plain_run.record_trusted(chosen, trusted)
    ranks.run(chosen.ranks, plain_run.train_sharded, chosen, sharded)
    return compare_runs.compare(trusted, sharded, (sharded / plain_run.PRECISION).read_text())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (as_dict, ""),
        (as_dict, "--ranks 3 --dtype fp64"),
        (as_dict, "--dtype bf16"),
        (as_tuple, "--strategy optim --units Linear"),
        (alone, "--strategy no_shard --ranks 1"),
        (rich, "--ranks 2"),
        (attention, "--ranks 2"),
        (own_sharding, ""),
        (compute_in_bf16, ""),
        (as_with_fsdp2, "--dtype fp64"),
    ],
)
def test_correct_programs_are_equal(program: Callable[[], Any], words: str, ranks: RankPool, tmp_path: Path) -> None:
    result = compare(ranks, tmp_path, options(program, *words.split()))
    assert not result.findings, [str(finding) for finding in result.findings]
    assert result.compared > 30


@pytest.mark.parametrize(
    ("program", "where", "parameter"),
    [
        (depends_on_rank, "step 1, loss of rank 1", "blocks.1.down.weight"),
        (writes_a_shard, "step 2, weight of blocks.1.up.weight", "blocks.1.up.weight"),
        (builds_differ, "step 1, loss of rank 1", "embedding.weight"),
        (without_gradients_of_a_layer, "step 1, gradient of blocks.2.up.bias", "blocks.2.up.weight"),
    ],
)
def test_mistakes_are_named(
    program: Callable[[], Any], where: str, parameter: str, ranks: RankPool, tmp_path: Path
) -> None:
    found = compare(ranks, tmp_path, options(program)).findings
    assert found and str(found[0]).startswith(where), [str(finding) for finding in found]
    assert any(finding.where.endswith(parameter) for finding in found)


def test_a_finding_says_what_was_expected(ranks: RankPool, tmp_path: Path) -> None:
    (finding,) = compare(ranks, tmp_path, options(writes_a_shard)).findings
    assert finding.got.endswith(" at [0, 0]"), finding
    assert float(finding.got.split()[0]) == pytest.approx(float(finding.wanted) + 0.5, abs=1e-5)


def test_a_weight_that_forward_writes_is_refused_or_named(ranks: RankPool, tmp_path: Path) -> None:
    try:
        found = compare(ranks, tmp_path, options(writes_in_forward)).findings
        assert found
    except RankFailure as failure:
        assert "blocks.1" in str(failure)


# The command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "expected either --model or a script"),
        ("--model a.py:build script.py", "expected either --model or a script"),
        ("--model nowhere.py:build", "cannot call 'nowhere.py:build': No module named 'nowhere'"),
        ("--model FILE:nothing", "has no attribute 'nothing'"),
        ("--model FILE:not_a_model", "to return an nn.Module, or a tuple or dict with one; got int"),
        ("--model FILE:misspelled", "Did you mean 'batches'?"),
        ("--model FILE:convolution", "its input cannot be made up: return batches as well"),
        ("--model FILE:alone --units Nowhere", "the model has no Nowhere"),
        ("--model FILE:fails", "The run without sharding failed."),
        ("--ranks 0 --model FILE:alone", "expected at least 1 rank and 1 step; got 0 and 5"),
    ],
)
def test_bad_input(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", *words.replace("FILE", __file__).split()])
    try:
        code = verify.main()
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_bf16_is_said_to_hide_differences(capsys: pytest.CaptureFixture[str]) -> None:
    for precision in compare_runs.TOLERANCES:
        assert verify._report(compare_runs.RunComparison(), precision) == 0
        assert ("--dtype fp32" in capsys.readouterr().out) is (precision == "bf16")


def not_a_model() -> int:
    return 3


def misspelled() -> dict[str, Any]:
    return {"model": TinyModel(), "batch": tokens()}


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3))


def fails() -> dict[str, Any]:
    return {"model": TinyModel(), "batches": [torch.zeros(2, 5)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        (as_dict, 0, "equal: the largest relative difference is"),
        (depends_on_rank, 1, "DIFFERENT. First: step 1, loss of rank 1: got"),
        (writes_in_forward, 1, "DIFFERENT."),
        (fails_when_sharded, 1, "The sharded run failed, the run without sharding did not."),
    ],
)
def test_the_command(program: Callable[[], Any], code: int, text: str) -> None:
    words = ["-m", "megatron.fsdp.tools.verify", "--model", f"{__file__}:{program.__name__}", "--steps", "2"]
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == code and text in result.stdout, result.stdout + result.stderr
