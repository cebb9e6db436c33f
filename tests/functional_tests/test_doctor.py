"""The doctor reports the memory of a command line at any number of ranks, and the settings that are not supported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import all_but_slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "examples" / "megatron_fsdp").iterdir() if path.suffix in (".sh", ".sbatch"))
MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --max-position-embeddings 32 --train-iters 5 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 "
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
)


def doctor(arguments: str, world_size: int = 8, flags: str = "--json") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron.fsdp.doctor", "--world-size", str(world_size), *flags.split()]
    return subprocess.run(
        [*command, "pretrain_gpt.py", *arguments.split()], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


def test_bytes_of_a_command_line() -> None:
    result = doctor(
        MODEL + " --bf16 --global-batch-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["sizes"]["tensor"] == found["sizes"]["pipeline"] == 2 and found["sizes"]["data (with context)"] == 2
    assert found["units"] == [{"TransformerLayer": 2}]
    # The first stage has word embeddings (divided by 2), position embeddings, and two layers (matrices divided by 2).
    embeddings = 256 // 2 * 64 + 32 * 64
    matrices = (3 * 64 * 64 + 3 * 64 + 64 * 64 + 2 * 64 * 256 + 256) // 2
    layer = matrices + 2 * 64 + 4 * 64
    total = embeddings + 2 * layer
    (sizes,) = found["bytes"]
    assert sizes["elements"] == total
    assert sizes["main"] == 4 * (total + sizes["padding"]) // 2 and sizes["optimizer"] == 2 * sizes["main"]
    assert found["resting"] == 12 * (total + sizes["padding"]) // 2
    assert found["peak_without_activations"] > found["resting"]


def test_bytes_of_quantized_weights() -> None:
    """The first layer stays in bf16; embeddings, norms and biases do."""
    quantized = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --first-last-layers-bf16"
    layers = "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0"
    result = doctor(f"{MODEL} --bf16 --global-batch-size 8 {quantized} {layers}")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    (sizes,) = found["bytes"]
    matrices = 3 * (3 * 64 * 64 + 64 * 64 + 2 * 64 * 256)
    # This rank's shard of two planes, and scales of both, which are whole.
    assert sizes["compute"] == 2 * matrices // 8 + matrices // 16
    assert any(text.startswith("mxfp8 (as bfloat16) compute") for text in found["dtypes"])
    assert sizes["forward"] == sizes["backward"] == sizes["unsharded"] - matrices


def test_all_limits_are_reported_at_once() -> None:
    result = doctor(MODEL + " --global-batch-size 8 --optimizer-cpu-offload --delay-wgrad-compute", flags="")
    assert result.returncode == 1
    assert "NOT POSSIBLE  optimizer_cpu_offload" in result.stdout
    assert "NOT POSSIBLE  delay_wgrad_compute" in result.stdout


def test_errors_of_megatron_are_reported() -> None:
    result = doctor(MODEL + " --global-batch-size 7", flags="")
    assert result.returncode == 1 and "ERROR" in result.stdout


def test_mistakes_in_the_command_line_are_reported() -> None:
    result = doctor(f"{MODEL} --no-such-flag 3", flags="")
    assert result.returncode == 1 and "ERROR  unrecognized arguments: --no-such-flag 3" in result.stdout


def words_of(script: Path, **variables: str) -> list[str]:
    environment = {**os.environ, "DRY_RUN": "1", "SLURM_SUBMIT_DIR": str(ROOT), **variables}
    return subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    subprocess.run([Path(sys.executable).parent / "shellcheck", "--shell=bash", script], check=True)


@pytest.mark.parametrize("back", ["", "1"])
@pytest.mark.parametrize("script", [s for s in SCRIPTS if "convert" in s.name], ids=lambda path: path.name)
def test_conversion_scripts_pass_valid_arguments(script: Path, back: str, tmp_path: Path) -> None:
    _, tool, command, source, target = words_of(script, CHECKPOINT=str(tmp_path), OUT=str(tmp_path / "out"), BACK=back)
    assert (source, target) == (str(tmp_path), str(tmp_path / "out"))
    run = [sys.executable, tool, command, source, target]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1 and ".metadata" in result.stderr, "an empty folder is not a checkpoint"


@pytest.mark.parametrize("name", all_but_slow([s.name for s in SCRIPTS if "convert" not in s.name], "llama3_8b.sh"))
def test_launch_scripts_pass_valid_arguments(name: str) -> None:
    (script,) = [s for s in SCRIPTS if s.name == name]
    world_size, entry, *arguments = words_of(script)
    assert entry == "pretrain_gpt.py"
    command = [sys.executable, "-m", "megatron.fsdp.doctor", "--json", "--world-size", world_size, entry, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["world_size"] == int(world_size)
    # The number of parameters is the published one.
    expected = {"llama3_8b.sh": 8.03e9, "llama3_70b.sbatch": 70.6e9 / 4}
    if script.name in expected:
        assert found["bytes"][0]["elements"] == pytest.approx(expected[script.name], rel=0.01)
