"""Checkpoints for tests of the conversion: samples that Megatron wrote, made-up ones, and independent readers."""

import argparse
import hashlib
import io
import json
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT.parent / "shared" / "samples"
ITERATION = "iter_0000003"

FULLY_RESHARDABLE = ("torch_dist_dp2", "torch_dist_dp2_main", "torch_dist_moe_ep2")
TORCH_DIST = (*FULLY_RESHARDABLE, "torch_dist_dp2_dp_reshardable", "torch_dist_tp2dp2_legacy_fsms_mcore013")
FSDP_DTENSOR = ("fsdp_dtensor_dp2", "fsdp_dtensor_moe_ep2")

# A group as Megatron's optimizer has it.
DECAYED: dict[str, Any] = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "max_lr": 0.01,
}
DECAYED |= {"min_lr": 0.001, "lr": 0.005, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 7}
DECAYED["default_config"] = True
PLAIN = DECAYED | {"wd_mult": 0.0, "weight_decay": 0.0}
EXPERTS = DECAYED | {"is_expert_parallel": True}


def sample(name: str) -> Path:
    """The folder of a sample, which holds ``meta.json`` and the checkpoint; skips where there are no samples."""
    folder = SAMPLES / name
    if not folder.is_dir():
        pytest.skip(f"the sample checkpoint {name} is not on this machine")
    return folder


def meta(name: str) -> dict[str, Any]:
    """The facts about a sample: hashes of its tensors and of the model's parameters, settings, losses."""
    found: dict[str, Any] = json.loads((sample(name) / "meta.json").read_text())
    return found


def sha256(tensor: torch.Tensor) -> str:
    """Of the tensor's bytes in row order."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class _Named:
    """Stands for an object of a class of Megatron."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            return type(name, (_Named,), {"__module__": module})
        return super().find_class(module, name)


class _Pickle:
    Unpickler = _Unpickler
    load = staticmethod(lambda file, **options: _Unpickler(file, **options).load())


def plain_metadata(path: Path) -> Metadata:
    """The content of ``.metadata``, read with pickle."""
    with open(path / ".metadata", "rb") as file:
        found: Metadata = _Unpickler(file).load()
    return found


def plain_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by torch; each element must be there once."""
    metadata = plain_metadata(path)
    params = {k: e for k, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in params.items()}
    covered = {key: torch.zeros(entry.size, dtype=torch.uint8) for key, entry in params.items()}
    for index, info in metadata.storage_data.items():
        if index.fqn in params:
            part = torch.load(_item(path, info), weights_only=True)
            where = tuple(slice(o, o + n) for o, n in zip(index.offset, part.shape, strict=True))
            tensors[index.fqn][where] = part
            covered[index.fqn][where] += 1
    assert all(bool((count == 1).all()) for count in covered.values())
    return tensors


def _item(path: Path, info: Any) -> io.BytesIO:
    with open(path / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


def plain_objects(path: Path) -> dict[str, Any]:
    """Every object of a checkpoint, unpickled freely: these checkpoints are our own."""
    metadata = plain_metadata(path)
    return {
        index.fqn: torch.load(_item(path, info), weights_only=False, pickle_module=_Pickle)
        for index, info in metadata.storage_data.items()
        if not isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata)
    }


def plain_common(path: Path) -> dict[str, Any]:
    """The common state of a torch_dist checkpoint."""
    if (path / "common.pt").is_file():
        found: dict[str, Any] = torch.load(path / "common.pt", weights_only=False, pickle_module=_Pickle)
        return found
    (common,) = plain_objects(path)["common_state/shard_0_1"]
    return dict(common)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in every bit and have the same types all the way down."""
    if type(a).__name__ != type(b).__name__:
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (argparse.Namespace, _Named)):
        return same(vars(a), vars(b))
    return bool(a == b)


def write_torch_dist(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    common: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """A torch_dist checkpoint, written by torch alone.

    Args:
        path: The folder to be.
        tensors: By key.
        common: The common state; ``args`` and ``iteration`` are added if they are missing.
        objects: By key.
    """
    whole = {"args": argparse.Namespace(), "iteration": 7, "checkpoint_version": 3.0, **common}
    items = {**tensors, **(objects or {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(items, checkpoint_id=path, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    torch.save(whole, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors of different values."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def with_optimizer(model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model in bfloat16 with main weights and Adam's state by parameter, as fully_reshardable has them.

    Args:
        model: The main weights, by stored key.
    """
    found = {key: tensor.bfloat16() for key, tensor in model.items()}
    for key, tensor in model.items():
        found[f"optimizer.state.param.{key}"] = tensor
        found[f"optimizer.state.exp_avg.{key}"] = tensor * 3 + 1
        found[f"optimizer.state.exp_avg_sq.{key}"] = tensor * tensor
    return found


def optimizer_of(*groups: Mapping[str, Any]) -> dict[Any, Any]:
    """Common state of one optimizer, or of a chain of two if some groups are the experts'."""
    parts = [[g for g in groups if g["is_expert_parallel"] == expert] for expert in (False, True)]
    made = [
        {"optimizer": {"param_groups": [dict(g) for g in part]}, "param_state_sharding_type": "fully_reshardable"}
        for part in parts
        if part
    ]
    return made[0] if len(made) == 1 else dict(enumerate(made))
