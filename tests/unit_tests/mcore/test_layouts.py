"""A checkpoint describes the rows of fused parameters and stores them in the same order at any tensor-parallel size."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import tests.megatron_models as mm
from megatron.fsdp.buffers import parameter as names
from megatron.fsdp.checkpoint.reader import CheckpointReader
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.mcore import load
from megatron.fsdp.mcore.parameter_names import described, layouts
from megatron_fsdp import fully_shard_model
from tests.ranks import RankPool

SIZES = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "hidden_size": 32}
ATTENTION = {"sections": {"query": 16, "key": 8, "value": 8}, "groups": 2, "stored apart": False}
GATED = {"sections": {"w": 36, "v": 36}, "groups": 1, "stored apart": True}
TIED = {"tied to": "embedding.word_embeddings.weight"}


def _save(folder: str, tied: bool, changes: dict[str, Any]) -> None:
    with mm.megatron():
        model = mm.wrapped("optim_grads_params", lambda config: mm.gpt(config, tied), **changes)
        dcp.save(mm.checkpoint_state(model, saving=True), checkpoint_id=folder)


def _described(folder: str) -> dict[str, Any]:
    reader = CheckpointReader(Path(folder))
    keys = [key for key in reader.objects if key.startswith("layouts.")]
    return {key.removeprefix("layouts."): json.loads(reader.read_object(key)) for key in keys}


def test_a_checkpoint_describes_itself(ranks: RankPool) -> None:
    with TemporaryDirectory() as folder:
        ranks.run(2, _save, folder, True, {**SIZES, "gated_linear_unit": True})
        assert _described(folder) == {
            "decoder.layers.{}.self_attention.linear_qkv.weight": ATTENTION,
            "decoder.layers.{}.self_attention.linear_qkv.bias": ATTENTION,
            "decoder.layers.{}.mlp.linear_fc1.weight": GATED,
            "decoder.layers.{}.mlp.linear_fc1.bias": GATED,
            "output_layer.weight": TIED,
        }


def test_parameters_with_rows_of_one_kind_are_not_described(ranks: RankPool) -> None:
    with TemporaryDirectory() as folder:
        ranks.run(2, _save, folder, False, {})
        assert set(_described(folder)) == {
            f"decoder.layers.{{}}.self_attention.linear_qkv.{k}" for k in ("weight", "bias")
        }


LATENT = SimpleNamespace(
    multi_latent_attention=True,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=6,
    v_head_dim=10,
)


def _layouts(config: Any, **parameters: tuple[int, ...]) -> dict[str, Any]:
    model, shapes = nn.Module(), {}
    model.config = config
    for name, shape in parameters.items():
        model.add_module(name, nn.Linear(*reversed(shape), bias=False))
        shapes[f"{name}.weight"] = shape
    return layouts(model, shapes)


def test_latent_attention() -> None:
    found = _layouts(
        LATENT,
        linear_qkv_down_proj=(46, 3),
        linear_kv_down_proj=(22, 3),
        linear_q_up_proj=(56, 24),
        linear_kv_up_proj=(72, 16),
        linear_proj=(32, 40),
    )
    assert {name: (dict(layout.sections), layout.groups) for name, layout in found.items()} == {
        "linear_qkv_down_proj.weight": ({"query": 24, "key and value": 16, "rope": 6}, 1),
        "linear_kv_down_proj.weight": ({"key and value": 16, "rope": 6}, 1),
        "linear_q_up_proj.weight": ({"query": 8, "rope": 6}, 4),
        "linear_kv_up_proj.weight": ({"key": 8, "value": 10}, 4),
    }


def test_parameters_with_a_different_number_of_rows_have_no_layout() -> None:
    assert not _layouts(LATENT, linear_kv_down_proj=(23, 3))


def test_descriptions_that_differ_keep_their_indices() -> None:
    facts = {"layers.0.a.weight": {"x": 1}, "layers.1.a.weight": {"x": 2}, "layers.0.b.weight3": {}}
    assert set(described(facts)) == {"layers.0.a.weight", "layers.1.a.weight", "layers.{}.b.weight{}"}
    assert set(described(facts, by_number=True)) == set(facts)


# Local rows of two sections. A tensor-parallel rank has a shard of each.
SECTIONS = (3, 2)
COLUMNS = 5


def _whole() -> torch.Tensor:
    return torch.arange(2.0 * sum(SECTIONS) * COLUMNS).view(-1, COLUMNS)


def _part(rank: int, ranks: int) -> torch.Tensor:
    """The shard of both sections on one of several tensor-parallel ranks."""
    first, second = _whole().split([2 * rows for rows in SECTIONS])
    return torch.cat([first.chunk(ranks)[rank], second.chunk(ranks)[rank]])


def _model(tensor_parallel: int) -> tuple[Any, nn.Parameter, torch.Tensor]:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp")
    )
    value = _part(mesh["tp"].get_local_rank(), tensor_parallel)
    layer = nn.Linear(COLUMNS, len(value), bias=False)
    layer.weight.data.copy_(value)
    if tensor_parallel > 1:
        setattr(layer.weight, names.TENSOR_PARALLEL, (mesh["tp"], (Shard(0),)))
        setattr(layer.weight, names.SECTIONS, tuple(2 * rows // tensor_parallel for rows in SECTIONS))
    model = fully_shard_model(
        nn.Sequential(layer), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp", fsdp_unit_modules=[nn.Linear]
    )
    (main,) = [entry.main for entry in model.engine.params()]
    return model, main, value


def _write(folder: str, tensor_parallel: int) -> None:
    dcp.save(_model(tensor_parallel)[0].state_dict(), checkpoint_id=folder)


def _read(folder: str, tensor_parallel: int) -> None:
    model, main, value = _model(tensor_parallel)
    local = local_shard(main)
    expected = local.detach().clone()
    local.data.fill_(-1)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    assert torch.equal(local, expected)


@pytest.mark.parametrize(("tensor_parallel", "world_size"), [(1, 1), (2, 2), (2, 4)])
def test_sections_have_the_same_position_at_any_tensor_parallel_size(
    ranks: RankPool, tensor_parallel: int, world_size: int
) -> None:
    with TemporaryDirectory() as folder:
        ranks.run(world_size, _write, folder, tensor_parallel)
        (stored,) = CheckpointReader(Path(folder)).tensors.values()
        assert torch.equal(stored.full_tensor(), _whole())
        for others in ((1, 1), (1, 3), (2, 2), (2, 4)):
            ranks.run(others[1], _read, folder, others[0])


@pytest.mark.parametrize(
    ("keys", "ranks", "raises"),
    [
        (["args", "model.a"], 2, True),
        (["args", "model.a"], 1, False),
        (["model.a"], 2, False),
        (["args", "layouts.a"], 2, False),
        (["args", "torch_dist"], 2, False),
    ],
)
def test_rows_in_an_unknown_order_raise(
    keys: list[str], ranks: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = SimpleNamespace(chunks=["chunk"])
    written = {"args": SimpleNamespace(tensor_model_parallel_size=ranks if "args" in keys else None)}
    monkeypatch.setattr(load, "Names", lambda chunk: SimpleNamespace(spread=["in_proj.weight"]))
    monkeypatch.setattr(load.loading, "load_objects", lambda folder, names: written)
    if not raises:
        load.check_sections(state, keys, Path("x"))
        return
    with pytest.raises(RuntimeError, match=r"x: .* the rows of in_proj.weight .* tensor_model_parallel_size 2"):
        load.check_sections(state, keys, Path("x"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fused_projection_of_tensor_parallel_ranks_raises(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = SimpleNamespace(chunks=[])
    written = {"args": SimpleNamespace(tensor_model_parallel_size=ranks)}
    monkeypatch.setattr(load.loading, "load_objects", lambda folder, names: written)
    keys = ["args", "layouts.a", "model.module.decoder.layers.0.self_attention.linear_qkv_down_proj.weight"]
    if ranks == 1:
        load.check_sections(state, keys, Path("x"))
        return
    with pytest.raises(RuntimeError, match="x: expected linear_q_down_proj and linear_kv_down_proj; got model.module"):
        load.check_sections(state, keys, Path("x"))
