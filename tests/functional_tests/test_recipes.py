"""NVIDIA's functional recipes and the launch scripts: reduced ones train on a CPU. The doctor accepts full recipes."""

import json
import re
from pathlib import Path

import pytest
import torch

from scripts.real_loop import run
from tests.functional_tests.recipes import load, page, reduced, refused
from tests.launch import ROOT, printed, python, start

RECIPES = load()


def test_what_is_reduced_is_printed() -> None:
    printed = page()
    assert all(f"## {name}, {recipe.ranks} ranks" in printed for name, recipe in RECIPES.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Megatron finds a tokenizer with GPT-2's number of tokens instead of downloading it."""
    path = tmp_path_factory.mktemp("doctor")
    (path / "gpt2").mkdir()
    vocabulary = {**{f"t{number}": number for number in range(50256)}, "<|endoftext|>": 50256}
    (path / "gpt2" / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "gpt2" / "merges.txt").write_text("#version: 0.2\n")
    (path / "gpt2" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_doctor_accepts_recipes_in_full(name: str, folder: Path) -> None:
    recipe = RECIPES[name]
    words = [ROOT / "pretrain_gpt.py", *recipe.words(), "--vocab-file", "gpt2/vocab.json"]
    flags = ("--json", "--world-size", recipe.ranks, *words, "--merge-file", "gpt2/merges.txt")
    found = json.loads(python("-m", "megatron.fsdp.tools.doctor", *flags, folder=folder, **recipe.environment).stdout)
    assert {limit["setting"] for limit in found["limits"]} == refused(recipe)
    assert found["accepted"] or found["limits"], found["refusal"]
    if found["accepted"]:
        (units,) = found["units"]
        assert units.pop("TransformerLayer") == recipe.flags["num-layers"]
        # Tied ones are a unit together, or part of the root.
        assert units in ({}, {"LanguageModelEmbedding": 1, "ColumnParallelLinear": 1})
        assert found["sizes"]["tensor"] == recipe.flags["tensor-model-parallel-size"]
        assert found["sizes"]["expert"] == recipe.flags.get("expert-model-parallel-size", 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron runs on CUDA here")
@pytest.mark.parametrize("name", RECIPES)
def test_reduced_recipes_train_and_resume(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    words, _ = reduced(recipe)

    def train(*more: str) -> tuple[list[tuple[float, float]], list[float]]:
        result = run([*words, *more], recipe.ranks, timeout=600, environment=recipe.environment)
        return [(step.loss, step.grad_norm) for step in result.iterations], result.validation

    saved = str(tmp_path / "saved")
    whole, validation = train("--save", saved)
    resumed, validation_resumed = train("--load", saved, "--ckpt-step", "2", "--save", str(tmp_path / "more"))
    assert len(whole) == 4 and all(norm > 0 for _, norm in whole)
    assert resumed == whole[2:] and validation_resumed == validation


SCRIPTS = ("train_llama3_8b_fsdp_h100_fp8.sh", "llama3_70b.sbatch", "sbatch_mfsdp_deepseek_v3.sh")
# Flags of the scripts that have other values here.
SMALL = {
    **{f"--{name}": 64 for name in ("hidden-size", "seq-length", "max-position-embeddings")},
    **{f"--{name}": 16 for name in ("kv-channels", "kv-lora-rank", "qk-head-dim", "v-head-dim")},
    **{f"--{name}": 32 for name in ("q-lora-rank", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size")},
    **{f"--{name}": 2 for name in ("num-query-groups", "moe-router-topk", "moe-router-num-groups")},
    **{f"--{name}": 1 for name in ("tensor-model-parallel-size", "moe-router-group-topk", "eval-iters")},
    **{"--num-layers": 6, "--ffn-hidden-size": 128, "--num-attention-heads": 4, "--qk-pos-emb-head-dim": 8},
    **{"--make-vocab-size-divisible-by": 128, "--vocab-size": 1023, "--global-batch-size": 4, "--num-workers": 0},
    **{"--num-experts": 8, "--moe-layer-freq": "[0]*2+[1]*4", "--expert-model-parallel-size": 2, "--log-interval": 1},
    **{"--train-iters": 3, "--lr-warmup-iters": 1},
    **{"--train-samples": 12, "--lr-decay-samples": 12, "--lr-warmup-samples": 0, "--lr-warmup-init": 0},
}
OF_FSDP = (
    r"--(use-megatron-fsdp|use-nccl-ub|init-model-with-meta-device|fsdp-\S+"
    r"|(data-parallel-sharding-strategy|ckpt-format|megatron-fsdp-\S+) \S+) "
)


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron runs on CUDA here")
@pytest.mark.parametrize("name", SCRIPTS)
def test_reduced_launch_scripts_train_as_with_ddp(name: str, tmp_path: Path) -> None:
    script = ["bash", ROOT / "examples" / "megatron_fsdp" / name]
    words = printed(start(script, folder=tmp_path, DRY_RUN="1", SLURM_SUBMIT_DIR=str(ROOT))).split("\n")[2:-1]
    small = [word for flag, value in SMALL.items() if flag in words for word in (flag, str(value))]

    def train(words: list[str], folder: Path) -> list[float]:
        paths = [f"--{name}={folder}" for name in ("save", "load", "tensorboard-dir", "data-cache-path")]
        return [step.loss for step in run([*words, *small, *paths], ranks=2, timeout=280).iterations]

    losses = train(words, tmp_path / "fsdp")
    without = re.sub(OF_FSDP, "", " ".join(words)).split()
    assert len(losses) == 3 and losses == pytest.approx(train(without, tmp_path / "ddp"), rel=2e-5)
