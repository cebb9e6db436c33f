"""Writes a sharded model as safetensors files under the names of the original model, as ``save_pretrained`` does."""

from __future__ import annotations

import functools
import inspect
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.backends import HOST
from megatron.fsdp.dtensor.gathering import gather_full
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.state.loading import ignored_parameters

if TYPE_CHECKING:
    from megatron.fsdp.module import ShardedModel

_MERGE = "the model is sharded. Load the adapters into an unsharded one, and merge them there."
_REMEDIES = {
    "resize_token_embeddings": "the model is sharded. Resize embeddings before.",
    "merge_and_unload": _MERGE,
    "merge_adapter": _MERGE,
}
INDEX = "model.safetensors.index.json"
GIB = 1 << 30


@torch.no_grad()
def save_safetensors(
    model: ShardedModel, folder: str | os.PathLike, dtype: torch.dtype | None = None, max_shard_size: int = 5 * GIB
) -> None:
    """Write the main weights and buffers. A collective: all ranks must call this, and rank 0 writes.

    A tied parameter is written once, under its first name, as Hugging Face's models expect. If the model has a
    ``config`` with ``save_pretrained()``, the configuration is written as well, so that ``from_pretrained(folder)``
    loads the model.

    Args:
        model: The sharded model.
        folder: The folder to write to. It is created if it does not exist. A file is either complete or absent, and the
            index is written last.
        dtype: Dtype of the files. None: that of the compute weights.
        max_shard_size: Largest size of a file in bytes; a larger tensor gets a file alone. Rank 0 holds up to this many
            bytes in memory. Other ranks hold at most one full parameter.

    Raises:
        ImportError: safetensors is not installed.
    """
    from safetensors.torch import save_file

    first, folder = dist.get_rank() == 0, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def write() -> None:
        if first and held:
            path = folder / f"part-{len(files)}.unfinished"
            save_file(held, path, metadata={"format": "pt"})
            files.append(list(held))
            held.clear()

    for name, tensor in _full_tensors(model, dtype):
        if not first:
            continue
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > max_shard_size:
            write()
        held[name] = tensor
        total += tensor.nbytes
    write()
    if first:
        _name_files(folder, files, total)
        for config in ("config", "generation_config"):
            save_config = getattr(getattr(model.module, config, None), "save_pretrained", None)
            if save_config is not None:
                save_config(folder)
    dist.barrier()


def adapt_pretrained(model: ShardedModel) -> None:
    """Make the methods of a Hugging Face model that need full tensors gather them, or say what to do instead."""
    for name, remedy in {"save_pretrained": "", **_REMEDIES}.items():
        method = getattr(model.module, name, None)
        if inspect.ismethod(method):
            itself: Any = weakref.proxy(model)
            saving = functools.partial(_save_pretrained, itself, weak_method(method))
            other = functools.partial(_call, f"{name}: {remedy}", weak_method(method))
            setattr(model.module, name, other if remedy else saving)


def _save_pretrained(
    model: ShardedModel, method: Callable[..., Any], save_directory: str | os.PathLike, **options: Any
) -> Any:
    """``save_pretrained`` of the original model. A collective, unless full tensors are given as ``state_dict``."""
    if not options and not hasattr(model.module, "peft_config"):
        return save_safetensors(model, save_directory)
    if options.get("state_dict") is not None:
        return method(save_directory, **options)
    first = dist.get_rank() == 0
    options["state_dict"] = {name: tensor for name, tensor in _full_tensors(model, None) if first}
    method(save_directory, **{"is_main_process": first, **options})
    dist.barrier()


def _call(message: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return method(*args, **options)
    except RuntimeError as error:  # also of an operation on shards
        raise RuntimeError(message) from error


def _full_tensors(model: ShardedModel, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, in full and on the CPU, in the same order on all ranks. A collective."""
    model.engine.reshard()
    seen: set[int] = set()
    param: ShardedParameter
    for param in model.engine.params():
        if id(param) not in seen:
            seen.add(id(param))
            whole = gather_full(param.main)  # type: ignore[arg-type]  # a Parameter that is a DTensor
            yield param.name, whole.to(HOST, dtype or param.compute.dtype).contiguous()
    persistent = model.module.state_dict().keys()
    unsharded = {**ignored_parameters(model.module), **dict(model.module.named_buffers())}
    for name, buffer in unsharded.items():
        if name in persistent:
            kept = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            yield name, buffer.detach().to(HOST, kept).contiguous().clone()


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Rename the files, whose names contain their number, and write the index if there are several."""
    count = len(files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        os.replace(folder / f"part-{number}.unfinished", folder / name)
    if count > 1:
        places = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        unfinished = folder / f"{INDEX}.unfinished"
        unfinished.write_text(json.dumps(index, indent=2))
        os.replace(unfinished, folder / INDEX)
