"""NVIDIA's functional recipes: the doctor accepts them in full, and reduced ones train and resume on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from scripts.real_loop import run
from tests.functional_tests.recipes import load, page, reduced, refused
from tests.launch import ROOT, python

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
        assert found["units"] == [{"TransformerLayer": recipe.flags["num-layers"]}]
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
