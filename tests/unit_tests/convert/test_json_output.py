"""The keys that each command prints with ``--json``, which scripts rely on."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from megatron.fsdp.convert.cli import cli
from tests.checkpoints import DECAYED, optimizer_of, random_tensors, with_optimizer, write_torch_dist
from tests.huggingface_models import save
from tests.small_checkpoints import numbers, write_checkpoint

KEYS = "only_in_1 only_in_2 tensor_in_one_only different_objects"
DIFFERENT = " ".join(
    f"different_tensors.{key}"
    for key in ("key", "shapes", "dtypes", "close", "different_elements", "max_absolute", "max_relative")
)
CONVERSION = """input input_format output output_format iteration tensors objects bytes parameters swiglu_parameters
    optimizer_state optimizer_groups"""
# The words of a command, and its keys; those inside of a key follow it after a dot.
CASES = {
    "inspect a": """path format bytes files common_state total_tensors total_elements tensors objects
        ignored_param_to_group_meta mcore_data files.__0_0.distcp tensors.w tensors.w.dtype tensors.w.shape
        tensors.w.bytes tensors.w.chunks common_state.o""",
    "print-tensor a w": "key dtype shape chunks minimum maximum mean norm values chunks.offsets chunks.sizes",
    "print-tensor a o": "key object",
    "print-torch-dcp-in-json a": "w o",
    "modify-state-dict a out --op 'remove o'": "input output bytes kept removed renamed",
    "verify a": """path complete files checked_by tensors objects problems unused
        files.__0_0.distcp.bytes files.__0_0.distcp.problem""",
    "diff a b": f"same {KEYS} {DIFFERENT.replace('different_tensors', 'tensors')} same_tensors {DIFFERENT}",
    "compare-two-checkpoint a b": f"{KEYS} {DIFFERENT}",
    "convert-torch-dist-to-fsdp-dtensor ddp fsdp": f"{CONVERSION} optimizer_groups.parameters optimizer_groups.lr",
    "convert-fsdp-dtensor-to-torch-dist fsdp again": CONVERSION,
    "convert fsdp third": CONVERSION,
    "import-safetensors llama megatron": "out checkpoint format flags architecture tensors bytes notes",
    "export-safetensors megatron llama2": "out files architecture tensors bytes notes",
}


def has(found: Any, path: str) -> bool:
    """Whether a path of keys leads anywhere; keys may contain dots, and a list stands for its first entry."""
    if isinstance(found, list):
        return bool(found) and has(found[0], path)
    if not isinstance(found, dict):
        return False
    return path in found or any(
        has(value, path.removeprefix(f"{key}.")) for key, value in found.items() if path.startswith(f"{key}.")
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "a", {"w": numbers((4, 3))}, {"o": 1})
    write_checkpoint(folder / "b", {"w": torch.ones(4, 3)}, {"o": 2})
    names = [f"decoder.layers.0.mlp.linear_fc{k}.weight" for k in (1, 2)]
    tensors = with_optimizer(random_tensors({name: (8, 4) if "fc1" in name else (4, 4) for name in names}))
    args = argparse.Namespace(transformer_impl="local", bf16=True, swiglu=True)
    write_torch_dist(folder / "ddp", tensors, {"args": args, "optimizer": optimizer_of(DECAYED)})
    save("llama", folder / "llama")
    return folder


def test_every_command_keeps_the_keys_of_its_json_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert set(cli.commands) <= {case.split()[0] for case in CASES}
    for case, keys in CASES.items():
        words = [word for part in case.split("'")[::2] for word in part.split()] + case.split("'")[1::2]
        result = CliRunner().invoke(cli, [*words, "--json"])
        assert result.exit_code == 0, (case, result.output)
        found = json.loads(result.stdout)
        assert not [key for key in keys.split() if not has(found, key)], case
