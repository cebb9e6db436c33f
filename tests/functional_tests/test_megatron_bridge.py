"""Megatron-Bridge trains, saves, resumes, exports and imports through our adapter, on the CPU.

Its wheel is installed, without its dependencies, in a folder of its own. Mocks replace what has no build for a CPU.
"""

import functools
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from megatron.fsdp.checkpoint.reader import open_checkpoint
from megatron.fsdp.convert.cli import cli
from megatron.fsdp.mcore.patches import MEGATRON_BRIDGE
from tests.launch import printed, python, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="several ranks over gloo; Megatron runs on CUDA here"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Megatron-Bridge."""
    folder = tmp_path_factory.mktemp("site")
    package = f"megatron-bridge=={MEGATRON_BRIDGE.checked[-1]}"
    installed = python("-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package)
    if installed.returncode:
        pytest.skip(f"cannot install {package}: {installed.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    # Tensor-parallel ranks split the vocabulary.
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(site: Path, *arguments: object, ranks: int = 2) -> str:
    """Run ``tests/bridge_runs.py`` and return what it prints."""
    result = torchrun(["-m", "tests.bridge_runs", *arguments], ranks, packages=str(site))
    return printed(result) + result.stderr


@functools.cache
def steps(site: Path, *arguments: object, ranks: int = 2) -> dict[int, list[float]]:
    """The loss and the gradient norm of every step."""
    lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", run(site, *arguments, ranks=ranks))
    return {int(step): [float(loss), float(norm)] for step, loss, norm in lines}


def exported(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """The export of Megatron-Bridge at the end of a run."""
    return safetensors.torch.load_file(f"{folder}_{iteration}.safetensors")


def test_prints_what_ddp_prints_and_resumes(site: Path, tmp_path: Path) -> None:
    whole = steps(site, "train", "optim_grads_params", tmp_path / "whole", 4)
    ddp = steps(site, "train", "ddp", "", 4)
    assert list(whole) == [1, 2, 3, 4]
    # Norms are printed with three digits.
    assert [number for step in whole.values() for number in step] == pytest.approx(
        [number for step in ddp.values() for number in step], rel=5e-7
    )
    assert (tmp_path / "whole" / "iter_0000002" / "checksums.json").exists(), "saved by another backend than ours"
    run(site, "train", "optim_grads_params", tmp_path / "parts", 2)
    assert steps(site, "train", "optim_grads_params", tmp_path / "parts", 4) == {3: whole[3], 4: whole[4]}


def test_imports_and_exports(site: Path, llama: Path, tmp_path: Path) -> None:
    run(site, "copy", llama, tmp_path / "copy", 2, ranks=4)
    original = safetensors.torch.load_file(llama / "model.safetensors")
    copied = safetensors.torch.load_file(tmp_path / "copy" / "model.safetensors")
    assert copied.keys() == original.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in original.items())


def test_exports_what_our_command_exports(site: Path, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(site, "train", "optim_grads_params", folder, 2, llama, "full", 2, ranks=4)
    words = [str(folder), str(tmp_path / "ours"), "--config", str(llama), "--dtype", "float32"]
    CliRunner().invoke(cli, ["export-safetensors", *words], catch_exceptions=False)
    ours, theirs = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors"), exported(folder, 2)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_adapters(site: Path, llama: Path, tmp_path: Path) -> None:
    """They train as with DDP; a checkpoint has nothing else; a different number of ranks continues and merges them."""
    folder = tmp_path / "lora"
    found = steps(site, "train", "optim_grads_params", folder, 2, llama, "lora", 2, ranks=4)
    ddp = steps(site, "train", "ddp", tmp_path / "ddp", 4, llama, "lora", 2)
    assert [*found[1], *found[2]] == pytest.approx([*ddp[1], *ddp[2]], rel=5e-7)
    metadata = open_checkpoint(folder / "iter_0000002").metadata.state_dict_metadata
    keys = [key for key in metadata if key.startswith(("model.", "optimizer."))]
    assert keys and all(".adapter." in key for key in keys)
    rest = steps(site, "train", "optim", folder, 4, llama, "lora", 1)
    assert [*rest[3], *rest[4]] == pytest.approx([*ddp[3], *ddp[4]], rel=1e-6)
    merged = exported(folder, 4)
    for name, tensor in exported(tmp_path / "ddp", 4).items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)


def test_contradictory_settings_are_refused(site: Path) -> None:
    output = run(site, "refused", ranks=1)
    assert "refused: use_tp_pp_dp_mapping is not supported with Megatron FSDP" in output
    assert "refused: use_megatron_fsdp and use_torch_fsdp2 are mutually exclusive." in output
