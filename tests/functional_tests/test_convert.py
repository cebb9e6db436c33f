"""Converting checkpoints of Megatron's training loop loses nothing, and training resumes from the result."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.fsdp.convert.run import read_state, write_state
from scripts.parity import DDP, DDP_ENVIRONMENT, fsdp_arguments, model_arguments, original_arguments, write_corpus
from scripts.parity_cases import ALLTOALL, EP, LLAMA, MLA, PP, TP, Case
from scripts.real_loop import Run, run
from tests.checkpoints import plain_common, plain_metadata, plain_objects, plain_tensors, same
from tests.ranks import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here")

SAVED, LAST = 2, 4
ITERATION = f"iter_{SAVED:07d}"
TORCH_DIST = [*DDP, "--ckpt-format", "torch_dist"]
BY_PARAMETER = "--dist-ckpt-optim-fully-reshardable"


class Model(NamedTuple):
    """A model and its parallelism."""

    arguments: str
    ranks: int
    layers: int = 2


MODELS = {
    "tensor and pipeline parallelism": Model(f"{LLAMA} {TP} {PP}", 4),
    "interleaved stages": Model(f"{LLAMA} {PP} --num-layers-per-virtual-pipeline-stage 1", 4, 4),
    "spread experts": Model(
        f"{ALLTOALL} {EP} {TP} --sequence-parallel --expert-tensor-parallel-size 1 --moe-layer-freq [0,1] "
        "--moe-shared-expert-intermediate-size 32",
        4,
    ),
    "latent attention, multi-token prediction": Model(f"{MLA} --qk-layernorm --mtp-num-layers 1 --bf16", 2),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The dataset."""
    yield write_corpus(tmp_path_factory.mktemp("corpus"))


def train(corpus: Path, model: Model, *options: str) -> Run:
    case = Case("convert", "", model.ranks, model.arguments, layers=model.layers, batch=12)
    words = [word for word in model_arguments(case, corpus, LAST) if word != "--no-save-optim"]
    environment = {} if "--use-megatron-fsdp" in options else DDP_ENVIRONMENT
    return run([*words, *options], model.ranks, environment=environment)


def save(corpus: Path, model: Model, folder: Path, *options: str) -> Path:
    """Train and save with Megatron's DDP; return the checkpoint's folder."""
    words = ("--save", str(folder), "--save-interval", str(SAVED), "--exit-interval", str(SAVED))
    train(corpus, model, *TORCH_DIST, *words, *options)
    return folder / ITERATION


def converted(source: Path, folder: Path, format: str) -> Path:
    write_state(read_state(source), folder / ITERATION, format)
    return folder / ITERATION


def assert_equal(found: Path, expected: Path) -> None:
    tensors, wanted = plain_tensors(found), plain_tensors(expected)
    assert set(tensors) == set(wanted)
    assert [key for key, tensor in wanted.items() if not same(tensors[key], tensor)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flat_buffers_equal_the_state_by_parameter(corpus: Path, tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    flat = save(corpus, model, tmp_path / "flat")
    by_parameter = save(corpus, model, tmp_path / "by_parameter", BY_PARAMETER)
    assert any("gbuf_idx" in key for key in plain_metadata(flat).state_dict_metadata)
    one = converted(flat, tmp_path / "one", "fsdp_dtensor")
    other = converted(by_parameter, tmp_path / "other", "fsdp_dtensor")
    assert_equal(one, other)
    groups = [
        {key: value for key, value in plain_objects(path).items() if ".param_to_group_meta." in key}
        for path in (one, other)
    ]
    assert groups[0] and same(*groups)
    back = converted(other, tmp_path / "back", "torch_dist")
    assert_equal(back, by_parameter)
    assert same(plain_objects(back), plain_objects(by_parameter))
    assert plain_common(back)["iteration"] == SAVED


OURS, MEGATRONS = fsdp_arguments("optim_grads_params"), original_arguments("optim_grads_params")


@pytest.mark.slow
def test_buckets_and_tied_embeddings(corpus: Path, tmp_path: Path) -> None:
    # Tied embeddings cause padding between buckets. Megatron-Core then writes wrong state by parameter, so the expected
    # values come from FSDP, which adds gradients in a different order.
    tied = Model(f"{PP} --num-layers-per-virtual-pipeline-stage 1", 4, 4)
    flat = save(corpus, tied, tmp_path / "flat", "--overlap-grad-reduce", "--ddp-bucket-size", "3000")
    assert any("bucket_idx_3" in key for key in plain_metadata(flat).state_dict_metadata)
    words = ("--save", str(tmp_path / "right"), "--save-interval", str(SAVED), "--exit-interval", str(SAVED))
    train(corpus, tied, *OURS, *words)
    found = plain_tensors(converted(flat, tmp_path / "found", "fsdp_dtensor"))
    expected = plain_tensors(tmp_path / "right" / ITERATION)
    names = [key for key in expected if not key.startswith("rng_state")]
    assert {key for key in found if not key.startswith("rng_state")} == set(names)
    for key in names:
        scale = float(expected[key].abs().max())
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5 * scale, msg=key)
    wrong = save(corpus, tied, tmp_path / "wrong", BY_PARAMETER)
    with pytest.raises(ValueError, match="do not round to the model's weights"):
        converted(wrong, tmp_path / "failed", "fsdp_dtensor")


# Megatron-Core's FSDP cannot save or load SwiGLU in float32. Sums of bfloat16 gradients depend on their order.
GOES_ON = {
    "Llama-like": (LLAMA, [OURS], 1e-6),
    "GPT-like": ("", [OURS, MEGATRONS], 1e-6),
    "Llama-like, bf16": (f"{LLAMA} --bf16", [OURS, MEGATRONS], 1e-3),
}


def losses(found: Run) -> list[float]:
    return [iteration.loss for iteration in found.iterations]


@pytest.mark.slow
@pytest.mark.parametrize("name", GOES_ON)
def test_training_resumes_in_every_direction(corpus: Path, tmp_path: Path, name: str) -> None:
    arguments, wrappers, tolerance = GOES_ON[name]
    model = Model(arguments, 2)
    source = save(corpus, model, tmp_path / "source", BY_PARAMETER)
    there = converted(source, tmp_path / "there", "fsdp_dtensor")
    back = converted(there, tmp_path / "back", "torch_dist")
    expected = train(corpus, model, *TORCH_DIST, BY_PARAMETER, "--load", str(source.parent))
    assert len(expected.iterations) == LAST - SAVED
    again = train(corpus, model, *TORCH_DIST, BY_PARAMETER, "--load", str(back.parent))
    assert again.iterations == expected.iterations
    for wrapper in wrappers:
        found = train(corpus, model, *wrapper, "--load", str(there.parent))
        assert losses(found) == pytest.approx(losses(expected), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [OURS, MEGATRONS], ids=["ours", "Megatron's"])
def test_ddp_resumes_what_fsdp_trained(corpus: Path, tmp_path: Path, wrapper: list[str]) -> None:
    model = Model("", 2)
    words = ("--save", str(tmp_path / "source"), "--save-interval", str(SAVED))
    whole = train(corpus, model, *wrapper, *words)
    back = converted(tmp_path / "source" / ITERATION, tmp_path / "back", "torch_dist")
    found = train(corpus, model, *TORCH_DIST, BY_PARAMETER, "--load", str(back.parent))
    assert len(found.iterations) == LAST - SAVED
    assert losses(found) == pytest.approx(losses(whole)[SAVED:], rel=1e-6)
    # Our FSDP resumes it without a conversion, with the optimizer's state, whichever FSDP wrote it.
    words = ("--load", str(tmp_path / "source"), "--ckpt-step", str(SAVED), "--calculate-per-token-loss")
    assert losses(train(corpus, model, *OURS, *words)) == pytest.approx(losses(whole)[SAVED:], rel=1e-6)
