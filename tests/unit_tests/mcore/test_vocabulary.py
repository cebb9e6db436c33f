"""A vocabulary with a different padding is loaded as Megatron's DDP loads it; tensors of other vocabularies raise."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tests.megatron_models as mm
from megatron.core import parallel_state
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore.load import strictness_of
from megatron.fsdp.mcore.vocabulary import padding_of
from megatron.fsdp.naming.keys import other_names
from tests.ranks import RankPool

EMBEDDING = "model.module.embedding.word_embeddings.weight"


def run_with(size: int, tensor_parallel: int = 1, multiple: int = 128, padded: int | None = None) -> dict[str, Any]:
    """Arguments of a run whose vocabulary has this true size."""
    rows = padded or -(-size // (multiple * tensor_parallel)) * multiple * tensor_parallel
    return {
        "vocab_size": size,
        "tensor_model_parallel_size": tensor_parallel,
        "make_vocab_size_divisible_by": multiple,
        "padded_vocab_size": rows,
        "tokenizer_type": "NullTokenizer",
    }


def judged(own: dict[str, Any], saved: dict[str, Any], stored: int, key: str = EMBEDDING) -> str | None:
    """The objection to loading ``stored`` rows into this run; None if there is none."""
    return padding_of(own, lambda: saved)(key, (own["padded_vocab_size"], 8), (stored, 8))


@pytest.fixture
def two_tensor_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)


pytestmark = pytest.mark.usefixtures("two_tensor_parallel_ranks")


@pytest.mark.parametrize(("size", "rows"), [(128, (128, 256)), (50_257, (50_304, 50_432)), (257, (384, 512))])
def test_padding_of_megatrons_rule(size: int, rows: tuple[int, int]) -> None:
    one, two = run_with(size), run_with(size, 2)
    assert (one["padded_vocab_size"], two["padded_vocab_size"]) == rows
    assert judged(one, two, rows[1]) is None and judged(two, one, rows[0]) is None
    optimizer = "optimizer.state.module.module.output_layer.weight.exp_avg"
    assert judged(one, two, rows[1], optimizer) is None
    for key in ("model.module.decoder.layers.0.mlp.linear_fc1.weight", "model.module.my_output_layer.weight"):
        assert judged(one, two, rows[1], key) == ""


def test_a_tensor_of_another_vocabulary_is_refused() -> None:
    own = run_with(257, 2)
    for size in (100, 513):
        saved = run_with(size)
        found = judged(own, saved, saved["padded_vocab_size"])
        assert (
            found and "A run with --make-vocab-size-divisible-by 128, --tensor-model-parallel-size 1 does not" in found
        )
    assert judged(own, run_with(257), 640), "not the rows that the run had"
    other_width = padding_of(own, lambda: run_with(257))(EMBEDDING, (512, 8), (384, 9))
    assert other_width == ""


def test_an_explicit_size_needs_the_same_tokenizer() -> None:
    own, saved = run_with(257, 2), run_with(257, padded=1024)
    assert judged(own, saved, 1024) is None
    assert judged(own, saved | {"tokenizer_type": "TikTokenizer"}, 1024)
    assert judged(run_with(257, 2, padded=1024), run_with(257), 384) is None


@pytest.mark.parametrize(
    ("own", "saved", "reason"),
    [({"vocab_size": None}, {}, "this run has no tokenizer"), ({}, None, "does not say how its vocabulary was padded")],
)
def test_an_unknown_size_names_the_flag(own: dict[str, Any], saved: dict[str, Any] | None, reason: str) -> None:
    found = judged(run_with(257, 2) | own, {} if saved is None else run_with(257), 384)
    assert found and reason in found and "--make-vocab-size-divisible-by 192 pads it to 384 rows here" in found


# Loading -------------------------------------------------------------------------------------------------------------


def _pass_on(source: str, target: str, size: int, tensor_parallel: int, tied: bool) -> None:
    """Train, or load another run's checkpoint over ones; save."""
    own, saved = run_with(size, tensor_parallel), run_with(size, 3 - tensor_parallel)
    with mm.megatron(tensor_model_parallel_size=tensor_parallel):
        model = mm.wrapped("optim_grads_params", lambda config: mm.gpt(config, tied, own["padded_vocab_size"]))
        optimizer = mm.optimizer_of(model)
        mm.run_steps(model, optimizer, 1, 1)
        state = mm.checkpoint_state(model, optimizer, saving=True)
        if source:
            for param, moments in optimizer.optimizer.state.items():
                for tensor in (param, moments["exp_avg"], moments["exp_avg_sq"]):
                    local_shard(tensor).data.fill_(1)
            load(state, source, other_names, strictness_of(SimpleNamespace(**own), lambda: saved))
        dcp.save(state, checkpoint_id=target)


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    return {key: tensor.full_tensor() for key, tensor in CheckpointReader(Path(folder)).tensors.items()}


@pytest.mark.parametrize(
    ("size", "first", "tied"), [(128, 1, True), (50_257, 2, False), (50_257, 1, False), (128, 2, True)]
)
def test_rows_that_both_have_are_loaded(ranks: RankPool, size: int, first: int, tied: bool) -> None:
    with TemporaryDirectory() as before, TemporaryDirectory() as after:
        ranks.run(2, _pass_on, "", before, size, first, tied)
        ranks.run(2, _pass_on, before, after, size, 3 - first, tied)
        expected, found = _tensors(before), _tensors(after)
    assert found.keys() == expected.keys()
    padded = [key for key, tensor in found.items() if tensor.shape != expected[key].shape]
    assert len(padded) == (3 if tied else 6), "weights and two moments"
    both, more = (run_with(size, ranks)["padded_vocab_size"] for ranks in (1, 2))
    for key, tensor in found.items():
        if key not in padded:
            assert torch.equal(tensor, expected[key]), key
            continue
        assert {len(tensor), len(expected[key])} == {both, more}, key
        assert torch.equal(tensor[:both], expected[key][:both]) and tensor[:size].count_nonzero(), key
        assert not tensor[both:].count_nonzero(), f"{key}: new rows of padding are not zero"
