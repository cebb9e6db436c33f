"""The memory command: its figures are the measured ones, and its table has all strategies."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools import memory
from megatron.fsdp.tools.by_strategy import bars
from megatron.fsdp.tools.estimate import outline
from scripts import memory_chart
from tests.models import FP32_GRADS, Block, TinyModel
from tests.ranks import DEVICE
from tests.tensor_bytes import build, call_counted
from tests.unit_tests.test_memory import STRATEGIES, _model

RANKS = 8


@pytest.mark.skipif(DEVICE == "cuda", reason="counts CPU tensors")
def test_bars_are_the_measured_bytes(tmp_path: Path) -> None:
    """One process trains as rank 0 of 8 on the fake process group, and every tensor is counted."""
    cases = [[strategy, "bf16", RANKS, 0.004, 0.01] for strategy in STRATEGIES]
    library = build(tmp_path)
    measured = call_counted(library, "tests.unit_tests.test_memory:measure_all", cases)
    model = outline(_model("bf16"), (Block,), FSDPConfig())
    found = bars(model, RANKS, FP32_GRADS)
    assert [bar.strategy for bar in found] == list(STRATEGIES)
    for bar, real in zip(found, measured, strict=True):
        used = bar.usage
        # AdamW counts steps, the mesh lists its ranks, and no_shard keeps its gradients' memory on a CPU.
        other = 4 * real["parameters"] + 4 * RANKS + (used.gradients if bar.strategy == "no_shard" else 0)
        resting = used.compute + used.main + used.optimizer
        assert real["resting"] == pytest.approx(resting + other, rel=0.01), bar.strategy
        peak = real["peak"] - real["activations"] - 4 * real["parameters"] - 4 * RANKS
        assert peak <= used.total * 1.01, bar.strategy
        # Sums of full gradients exist only with several micro-batches, and this step has one. With ZeRO-3, a CPU
        # frees the gradients of the unit that computes before the next unit is unsharded.
        if bar.strategy != "optim":
            assert peak > used.total * 0.7, bar.strategy


def model() -> nn.Module:
    """For --model."""
    return TinyModel(width=64, depth=4, vocabulary=32)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["memory", *words])
    return memory.main()


TARGET = f"{__name__}:model"


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "--model", TARGET, "--ranks", "4", "16", "--inner", "4") == 0
    text = capsys.readouterr().out
    assert "units: Block" in text
    assert [line.split()[0] for line in text.splitlines()[2:-1]] == ["4"] * 4 + ["16"] * 6
    assert "HSDP 4 x 4" in text and "hybrid FSDP" in text
    assert "bf16 weights, fp32 main weights, fp32 gradients" in text and "left" not in text


def test_what_a_device_leaves_for_activations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--model", f"{__file__}:model", "--ranks", "4", "--device-memory", "1GiB") == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()[1:6]]
    assert rows[0][-2:] == ["total", "left"] and "of 1.0 GiB" in text
    assert all(float(row[-1]) == pytest.approx(1 - float(row[-2]), abs=0.011) for row in rows[1:])


def test_json_and_a_huggingface_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    config |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert command(monkeypatch, "--model", str(tmp_path / "config.json"), "--ranks", "8", "--json") == 0
    found = {bar["strategy"]: bar for bar in json.loads(capsys.readouterr().out)}
    whole = 2 * 256 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert found["no_shard"]["usage"]["compute"] == pytest.approx(2 * whole, rel=0.01)
    assert found["optim_grads_params"]["usage"]["optimizer"] == pytest.approx(8 * whole / 8, rel=0.05)


@pytest.mark.parametrize("name", ["memory.svg", "memory.png"])
def test_chart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    assert command(monkeypatch, "--model", TARGET, "--ranks", "8", "16", "--json") == 0
    bars, path = tmp_path / "memory.json", tmp_path / name
    bars.write_text(capsys.readouterr().out)
    memory_chart.main([str(bars), str(path), "--device-memory", "1MB"])
    first = path.read_bytes()
    assert len(first) > 5000
    memory_chart.main([str(bars), str(path), "--device-memory", "1MB"])
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_colon", "expected module:function, or a config.json that exists (nothing is downloaded)"),
        ("no_such_module:f", "cannot call 'no_such_module:f'"),
        ("math:pi", "cannot call"),
        ("builtins:list", "expected builtins:list to return an nn.Module, or a tuple or dict with one; got list"),
    ],
)
def test_wrong_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command(monkeypatch, "--model", target)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_model_without_a_list_of_layers_needs_units() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match="--units"):
        memory.unit_classes(plain, [])
    assert memory.unit_classes(plain, ["Linear"]) == (nn.Linear,)
    assert torch.get_default_device().type == "cpu"
