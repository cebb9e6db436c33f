"""Writes a sharded model as safetensors files under the names of the original model, as ``save_pretrained`` does."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.checkpoint.coordination import agreed
from megatron.fsdp.checkpoint.lazy import of
from megatron.fsdp.comm.backends import HOST
from megatron.fsdp.dtensor.gathering import gather_full
from megatron.fsdp.helpers.codes import can_be_trained
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.runtime.engine import Engine, engines_of
from megatron.fsdp.state.loading import require_all_experts, unsharded_state

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
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@torch.no_grad()
def save_safetensors(
    model: nn.Module, folder: str | os.PathLike, dtype: torch.dtype | None = None, max_shard_size: int = 5 * GIB
) -> None:
    """Write the main weights and buffers. A collective: all ranks must call this, and rank 0 writes.

    A tied parameter is written once, under its first name, as Hugging Face's models expect. If the model has a
    ``config`` with ``save_pretrained()``, the configuration is written as well, with the dtype of the files, so that
    ``from_pretrained(folder)`` loads the model. Files of an earlier model in the folder are removed.

    Args:
        model: The sharded model; of FSDP2's interface, the outermost module that ``fully_shard`` was called on.
        folder: The folder to write to. It is created if it does not exist. A file is either complete or absent, and the
            index is written last.
        dtype: Dtype of the files. None: that of the compute weights.
        max_shard_size: Largest size of a file in bytes; a larger tensor gets a file alone. Rank 0 holds up to this many
            bytes in memory. Other ranks hold at most one full parameter.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: ``model`` is not a sharded model, or a finite weight would be infinite in ``dtype``.
        RuntimeError: Rank 0 could not write. All ranks raise it.
    """
    from safetensors.torch import save_file

    files = _Files(Path(folder), max_shard_size) if dist.get_rank() == 0 else None
    failed: list[Exception] = []
    for name, tensor in _full_tensors(model, dtype):
        if files is not None and not failed:
            try:
                files.add(name, tensor, save_file)
            except Exception as error:  # noqa: BLE001 - raised below: the other ranks gather to the end
                failed.append(error)

    def finish() -> None:
        if failed:
            raise failed[0]
        if files is not None:
            files.finish(save_file)
            for name in ("config", "generation_config"):
                config = getattr(_parts(model)[1], name, None)
                if hasattr(config, "save_pretrained"):
                    files.described(config).save_pretrained(folder)

    agreed(finish, "save_safetensors: ")


class _Files:
    """Writes tensors into files of limited size.

    Args:
        folder: The folder, which is created.
        limit: Bytes of a file.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._held: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []
        self._total = 0
        # Holds the values of all files.
        self._dtype: torch.dtype | None = None

    def described(self, config: Any) -> Any:
        """A copy of a configuration with the dtype of the files, in which transformers loads them by default."""
        described = copy.copy(config)
        for key in ("torch_dtype", "dtype"):  # of older versions, and of newer ones
            if key in vars(config):
                setattr(described, key, self._dtype)
        return described

    def add(self, name: str, tensor: torch.Tensor, save: Callable[..., None]) -> None:
        """Hold a tensor. ``save`` writes those that are held if the file would become too large."""
        if self._held and sum(t.nbytes for t in self._held.values()) + tensor.nbytes > self._limit:
            self._write(save)
        self._held[name] = tensor
        self._total += tensor.nbytes
        if can_be_trained(tensor.dtype):
            self._dtype = torch.promote_types(self._dtype or tensor.dtype, tensor.dtype)

    def _write(self, save: Callable[..., None]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save(self._held, self._folder / f"part-{len(self._written)}.unfinished", metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._held.clear()

    def finish(self, save: Callable[..., None]) -> None:
        """Write the rest, rename the files, whose names have their number, and write the index of several."""
        if self._held:
            self._write(save)
        count = len(self._written)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        # An earlier save's files would be read with these, or, as a single file, in their place.
        earlier = {path.name for path in self._folder.iterdir() if _WEIGHTS.fullmatch(path.name)} - set(names)
        for name in (INDEX, *earlier):
            (self._folder / name).unlink(missing_ok=True)
        for number, name in enumerate(names):
            os.replace(self._folder / f"part-{number}.unfinished", self._folder / name)
        if count > 1:
            places = {tensor: name for name, tensors in zip(names, self._written, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            unfinished = self._folder / f"{INDEX}.unfinished"
            unfinished.write_text(json.dumps(index, indent=2))
            os.replace(unfinished, self._folder / INDEX)


def adapt_pretrained(model: ShardedModel) -> None:
    """Make the methods of a Hugging Face model that need full tensors gather them, or say what to do instead."""
    for name, remedy in {"save_pretrained": "", **_REMEDIES}.items():
        method = getattr(model.module, name, None)
        if inspect.ismethod(method):
            itself: Any = weakref.proxy(model)
            takes_state = hasattr(model.module, "peft_config") or "state_dict" in inspect.signature(method).parameters
            save = _save_pretrained if takes_state else _save_as_its_class_does
            saving = functools.partial(save, itself, weak_method(method))
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
    given = {"is_main_process": first, **options}
    agreed(functools.partial(method, save_directory, **given), "save_pretrained: ")


def _save_as_its_class_does(model: ShardedModel, method: Callable[..., Any], *args: Any, **options: Any) -> None:
    """``save_pretrained`` of a class with files of its own, such as a SentenceTransformer's. A collective."""
    first = dist.get_rank() == 0
    whole = {name: tensor for name, tensor in _full_tensors(model, None) if first}
    # Its forward would wait for the other ranks.
    hooks = [each.register_forward_pre_hook(_refuse_forward, prepend=True) for each in model.module.modules() if first]

    def save() -> None:
        if first:
            with _reparametrize_module(model.module, whole, tie_weights=True):
                method(*args, **options)

    try:
        agreed(save, "save_pretrained: ")
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_forward(module: nn.Module, inputs: Any) -> None:
    raise RuntimeError(
        f"save_pretrained() has called {type(module).__name__}, as for examples on a model card. Rank 0 saves alone, "
        "and cannot run a sharded model: give the option that leaves this out, or run it before."
    )


def _call(message: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return method(*args, **options)
    except RuntimeError as error:  # also of an operation on shards
        raise RuntimeError(message) from error


def _parts(model: nn.Module) -> tuple[Engine, nn.Module]:
    """The engine of a model, and the module whose parameters have the engine's names.

    Raises:
        ValueError: The model is not sharded, or a part of a sharded one.
    """
    if isinstance(engine := getattr(model, "engine", None), Engine):
        return engine, model.module  # type: ignore[return-value]
    held = {id(parameter) for parameter in model.parameters()}
    engines = engines_of(model.parameters())
    if len(engines) != 1 or not all(held & {id(param.main), id(param.compute)} for param in engines[0].params()):
        raise ValueError(
            f"save_safetensors: expected a sharded model; got a {type(model).__name__}. Give what fully_shard "
            "returned, or the outermost module that fully_shard of FSDP2's interface was called on."
        )
    return engines[0], model


def _full_tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, in full and on the CPU, in the same order on all ranks. A collective."""
    engine, module = _parts(model)
    require_all_experts(engine, "save_safetensors")
    engine.reshard()
    seen: set[int] = set()
    param: ShardedParameter
    for param in engine.params():
        if id(param) not in seen:
            seen.add(id(param))
            whole = gather_full(param.main)  # type: ignore[arg-type]  # a Parameter that is a DTensor
            wanted = param.compute.dtype if dtype is None or param.key.codes else dtype
            yield param.name, of(whole).within(wanted, param.name).full_tensor().to(HOST, wanted).contiguous()
    for name, value in unsharded_state(module).items():
        if isinstance(value, torch.Tensor):
            kept = dtype if dtype is not None and value.is_floating_point() else value.dtype
            yield name, value.detach().to(HOST, kept).contiguous().clone()
