"""A torch_dist checkpoint that is loaded as it is gives what its conversion would give, and reads no more."""

import argparse
from pathlib import Path

import pytest
import torch

from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.checkpoint.loading import load
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.checkpoint.writer import Draft
from megatron.fsdp.convert.fsdp_dtensor import KEPT
from megatron.fsdp.convert.options import ReadOptions
from megatron.fsdp.convert.run import converted, read_state, write_state
from tests.checkpoints import (
    DECAYED,
    ITERATION,
    PLAIN,
    TORCH_DIST,
    optimizer_of,
    plain_objects,
    plain_tensors,
    random_tensors,
    same,
    sample,
    with_optimizer,
    write_torch_dist,
)

NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
GROUPS = {"optimizer": optimizer_of(DECAYED, PLAIN)}


def view_of(folder: Path, **options: object) -> Draft:
    return converted(CheckpointReader(folder), ReadOptions(keeps_rest=False, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TORCH_DIST)
def test_view_equals_the_conversion(tmp_path: Path, name: str) -> None:
    source = sample(name) / ITERATION
    write_state(read_state(source), tmp_path / "converted", "fsdp_dtensor")
    tensors, objects = plain_tensors(tmp_path / "converted"), plain_objects(tmp_path / "converted")
    del objects[KEPT]
    view = view_of(source)
    assert set(view.metadata.state_dict_metadata) == {*tensors, *objects}
    assert [key for key, tensor in tensors.items() if not same(view.tensors[key].full_tensor(), tensor)] == []
    assert [key for key, value in objects.items() if not same(view.read_object(key), value)] == []


def test_view_reads_only_the_rows_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = random_tensors({EMBEDDING: (4096, 64), NORM: (64,)})
    folder = write_torch_dist(tmp_path / "source", with_optimizer(main), GROUPS)
    view = view_of(folder, verify=False)
    elements = []
    original = CheckpointReader._read

    def counting(reader: CheckpointReader, key: str, region: Region) -> torch.Tensor:
        found = original(reader, key, region)
        elements.append(found.numel())
        return found

    monkeypatch.setattr(CheckpointReader, "_read", counting)
    found = view.tensors[f"model.module.{EMBEDDING}"].read(Region((100, 0), (10, 64)))
    assert same(found, main[EMBEDDING][100:110])
    # The main weights, and the model's weights that they are compared with.
    assert elements == [640, 640]


def test_arguments_of_the_run_are_used_if_there_are_none(tmp_path: Path) -> None:
    experts = "decoder.layers.0.mlp.experts.experts."
    shapes = {f"{experts}linear_fc1.weight": (4, 8, 6), f"{experts}linear_fc2.weight": (4, 6, 8)}
    folder = write_torch_dist(tmp_path / "source", random_tensors(shapes), {"args": None})
    with pytest.raises(ValueError, match="--transformer-impl"):
        view_of(folder)
    run = argparse.Namespace(transformer_impl="transformer_engine", moe_grouped_gemm=True, swiglu=False)
    keys = view_of(folder, args=run).tensors
    assert "model.module.decoder.layers.0.mlp.experts.linear_fc1.weight3" in keys
    saved = argparse.Namespace(transformer_impl="transformer_engine", moe_grouped_gemm=False, swiglu=False)
    folder = write_torch_dist(tmp_path / "says", random_tensors(shapes), {"args": saved})
    keys = view_of(folder, args=run).tensors
    assert "model.module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight" in keys


def test_loading_through_a_view(tmp_path: Path) -> None:
    main = random_tensors({EMBEDDING: (16, 8), NORM: (8,)})
    folder = write_torch_dist(tmp_path / "source", with_optimizer(main), GROUPS)
    key = f"module.{EMBEDDING}"
    state = {"model": {key: torch.zeros(16, 8)}, "iteration": 0}
    load(state, folder, view=lambda opened: converted(opened, ReadOptions()))
    assert same(state["model"][key], main[EMBEDDING]) and state["iteration"] == 7  # type: ignore[index]
    with pytest.raises(RuntimeError, match="no embedding"):
        load(state, folder, view=lambda opened: _fails("no embedding"))


def _fails(text: str) -> Draft:
    raise ValueError(text)
