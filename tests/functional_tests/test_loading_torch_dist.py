"""A run with FSDP continues a run with Megatron's DDP from its checkpoint, exactly as after a conversion."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from megatron.fsdp.convert.cli import cli
from scripts.parity import fsdp_arguments
from scripts.parity_cases import ALLTOALL, EP, LLAMA, PP, TP
from tests.checkpoints import plain_objects, plain_tensors, same
from tests.functional_tests.test_convert import (
    BY_PARAMETER,
    ITERATION,
    LAST,
    MODELS,
    OURS,
    SAVED,
    TORCH_DIST,
    Model,
    converted,
    losses,
    save,
    train,
)
from tests.ranks import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="Megatron runs on the CPU here"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

TRACKER = "latest_checkpointed_iteration.txt"


class Change(NamedTuple):
    """A model that DDP trains and one that FSDP continues, the optimizer's format, the tolerance of losses."""

    before: Model
    after: Model
    format: tuple[str, ...] = ()
    tolerance: float = 1e-6
    strategy: str = "optim_grads_params"


MODEL = Model(LLAMA, 2)
QUICK = Model(LLAMA.replace("--swiglu", "--quick-geglu --glu-linear-offset 1.0"), 2)
LATENT = MODELS["latent attention, multi-token prediction"]
CHANGES = {
    "sharded optimizer state": Change(MODEL, MODEL, strategy="optim"),
    "another gate than SwiGLU": Change(QUICK, QUICK),
    "sharded weights": Change(MODEL, MODEL, (BY_PARAMETER,)),
    # Sums of bfloat16 gradients depend on their order.
    "bf16": Change(Model(f"{LLAMA} --bf16", 2), Model(f"{LLAMA} --bf16", 2), tolerance=1e-3),
    "no tensor parallelism": Change(Model(f"{LLAMA} {TP}", 2), MODEL),
    "no pipeline": Change(Model(f"{LLAMA} {PP}", 2), MODEL, (BY_PARAMETER,)),
    "tensor parallelism": Change(Model(f"{LLAMA} {TP} {PP}", 4), Model(f"{LLAMA} {TP}", 4)),
    "no spread experts": Change(Model(f"{ALLTOALL} {EP}", 2), Model(ALLTOALL, 2)),
    "spread experts": Change(Model(f"{ALLTOALL} {EP}", 2), Model(f"{ALLTOALL} {EP}", 2)),
    "interleaved stages": Change(MODELS["interleaved stages"], Model(LLAMA, 2, 4)),
    "multi-token prediction": Change(LATENT, LATENT, tolerance=2e-3),
}


def objects_of(folder: Path) -> dict[str, object]:
    """All but the arguments, which have the folder's name."""
    return {key: value for key, value in plain_objects(folder).items() if key != "args"}


@pytest.mark.parametrize("name", CHANGES)
def test_training_continues_as_after_a_conversion(corpus: Path, tmp_path: Path, name: str) -> None:
    change = CHANGES[name]
    source = save(corpus, change.before, tmp_path / "source", *change.format)
    expected = train(corpus, change.before, *TORCH_DIST, *change.format, "--load", str(source.parent))
    there = converted(source, tmp_path / "there", "fsdp_dtensor")
    saved = {}
    for folder in (source.parent, there.parent):
        target = tmp_path / f"from_{folder.name}"
        words = ("--load", str(folder), "--save", str(target), "--save-interval", "1")
        found = train(corpus, change.after, *fsdp_arguments(change.strategy), *words)
        assert losses(found) == pytest.approx(losses(expected), rel=change.tolerance)
        saved[folder.name] = target / f"iter_{SAVED + 1:07d}"
    tensors, wanted = plain_tensors(saved["source"]), plain_tensors(saved["there"])
    assert [key for key, tensor in wanted.items() if not same(tensors.get(key), tensor)] == []
    assert same(objects_of(saved["source"]), objects_of(saved["there"]))


@pytest.mark.parametrize("format", [(), (BY_PARAMETER,)], ids=["buffers", "by parameter"])
def test_the_loss_scale_goes_on(corpus: Path, tmp_path: Path, format: tuple[str, ...]) -> None:
    model = Model(f"{LLAMA} --fp16 --initial-loss-scale 65536 --loss-scale-window 1 --hysteresis 1", 1)
    source = save(corpus, model, tmp_path / "source", *format)
    there = converted(source, tmp_path / "there", "fsdp_dtensor")
    back = converted(there, tmp_path / "back", "torch_dist")
    own = ("--save", str(tmp_path / "own"), "--save-interval", "1", "--exit-interval", str(SAVED + 1))
    train(corpus, model, *OURS, "--load", str(there.parent), *own)
    scales = [
        re.findall(r"loss scale: ([\d.]+)", train(corpus, model, *wrapper, "--load", str(folder)).log)
        for wrapper, folder in (
            ((*TORCH_DIST, *format), source.parent),
            (OURS, source.parent),
            (OURS, there.parent),
            ((*TORCH_DIST, BY_PARAMETER), back.parent),
            (OURS, tmp_path / "own"),
        )
    ]
    assert len(scales[0]) == LAST - SAVED and float(scales[0][0]) > 65536
    assert scales == [*[scales[0]] * 4, scales[0][1:]]


def test_both_kinds_of_checkpoints_in_one_folder(corpus: Path, tmp_path: Path) -> None:
    folder = save(corpus, MODEL, tmp_path / "run").parent
    words = (*OURS, "--load", str(folder), "--save", str(folder), "--save-interval", "1")
    whole = train(corpus, MODEL, *words)
    assert (folder / TRACKER).read_text() == str(SAVED + len(whole.iterations))
    for iteration, killed in ((SAVED + 1, SAVED + 2), (SAVED, SAVED + 1)):
        # Killed while it saved: the newest checkpoint is incomplete. The tracker file may name it or the one before.
        (folder / f"iter_{killed:07d}" / ".metadata").unlink()
        (folder / TRACKER).write_text(str(killed))
        again = train(corpus, MODEL, *words)
        assert losses(again) == losses(whole)[iteration - SAVED :]
        for later in range(iteration + 1, SAVED + len(whole.iterations) + 1):
            if later > killed:
                (folder / f"iter_{later:07d}" / ".metadata").unlink()
    assert (folder / ITERATION / "metadata.json").exists(), "that of DDP is still there"


def test_options_of_loading(corpus: Path, tmp_path: Path) -> None:
    folder = save(corpus, MODEL, tmp_path / "run").parent
    whole = losses(train(corpus, MODEL, *OURS, "--load", str(folder)))
    strict = train(corpus, MODEL, *OURS, "--load", str(folder), "--dist-ckpt-strictness", "raise_all")
    assert losses(strict) == whole
    assert losses(train(corpus, MODEL, *OURS, "--load", str(folder), "--no-load-rng")) == whole, "there is no dropout"
    fresh = losses(train(corpus, MODEL, *OURS, "--load", str(folder), "--no-load-optim"))
    assert fresh[0] == whole[0] and fresh[1] != whole[1]
    finetuned = losses(train(corpus, MODEL, *OURS, "--load", str(folder), "--finetune"))
    assert len(finetuned) == SAVED + len(whole)
    pretrained = losses(train(corpus, MODEL, *OURS, "--pretrained-checkpoint", str(folder)))
    assert pretrained == finetuned
    (folder / ITERATION).rename(folder / "release")
    (folder / TRACKER).write_text("release")
    released = losses(train(corpus, MODEL, *OURS, "--load", str(folder)))
    assert len(released) == SAVED + len(whole) and released[:2] == fresh


def test_a_folder_that_is_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    source, output = save(corpus, MODEL, tmp_path / "run"), tmp_path / "output"
    whole = losses(train(corpus, MODEL, *OURS, "--load", str(source.parent)))
    words = ["convert-torch-dist-to-fsdp-dtensor", "--swiglu", str(source), str(output)]
    assert f"--load {output}" in CliRunner().invoke(cli, words).output
    for folder in (output, source):
        assert losses(train(corpus, MODEL, *OURS, "--load", str(folder))) == whole


def test_another_model_raises(corpus: Path, tmp_path: Path) -> None:
    from scripts.real_loop import RunFailure

    folder = save(corpus, MODEL, tmp_path / "run").parent
    with pytest.raises(RunFailure, match=r"expected \(\d+, 64\)|does not fit the model"):
        train(corpus, MODEL._replace(arguments=f"{LLAMA} --ffn-hidden-size 96"), *OURS, "--load", str(folder))


# With 128, 257 tokens are padded to 384 rows by one tensor-parallel rank and to 512 by two; 256 to 256 and to 512.
VOCABULARIES = {
    "untied": f"{LLAMA} --vocab-size 257 --make-vocab-size-divisible-by 128",
    "tied": "--vocab-size 257 --make-vocab-size-divisible-by 128",
    "no padding": f"{LLAMA} --make-vocab-size-divisible-by 256",
}


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_with_a_different_padding(corpus: Path, tmp_path: Path, name: str, first: int) -> None:
    models = [Model(f"{VOCABULARIES[name]} --tensor-model-parallel-size {size}", size) for size in (first, 3 - first)]
    source = save(corpus, models[0], tmp_path / "source", BY_PARAMETER).parent
    expected = losses(train(corpus, models[1], *TORCH_DIST, BY_PARAMETER, "--load", str(source)))
    words = ("--save", str(tmp_path / "ours"), "--save-interval", str(SAVED), "--exit-interval", str(SAVED))
    train(corpus, models[0], *OURS, *words)
    for folder in (source, tmp_path / "ours"):
        found = losses(train(corpus, models[1], *OURS, "--load", str(folder)))
        assert found == pytest.approx(expected, rel=1e-6), f"{folder.name}: DDP has other losses"
