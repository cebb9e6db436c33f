"""Hugging Face model folders: config.json, safetensors files with an index, and tokenizer files."""

import fnmatch
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fsdp.checkpoint.checksums import read_json, write_file
from megatron.fsdp.checkpoint.lazy import LazyTensor
from megatron.fsdp.checkpoint.staging import Staging
from megatron.fsdp.convert.canonical import Tensors
from megatron.fsdp.convert.huggingface.model import Model
from megatron.fsdp.convert.huggingface.safetensors_file import read_tensors, write_tensors
from megatron.fsdp.convert.options import WriteOptions

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Files to copy along with the weights. Python files are left out: no conversion needs them, and a copied folder should
# not run code when it is loaded.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
)
_UNFINISHED = ".unfinished"
# Names of the other files in an unfinished folder.
_OWN = r"config\.json|model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors|model.*\.unfinished"


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        FileNotFoundError: The folder has no config.json.
        ValueError: The file is not a JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a Hugging Face folder with {CONFIG}.")
    return _json_object(path)


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the tensors of all files, by name. Only headers are read.

    Raises:
        FileNotFoundError: There is no safetensors file, or the index names one that is missing.
        ValueError: A file is damaged or contradicts the index.
    """
    if (folder / SINGLE).is_file():  # transformers, too, then ignores an index
        return read_tensors(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}; other formats are not supported.")
    index = _json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX}: expected a weight_map from names to files.")
    tensors: dict[str, LazyTensor] = {}
    for file in sorted(set(index.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / INDEX}: expected a file of this folder; got {file!r}.")
        found = read_tensors(folder / file)
        if wrong := {name for name, place in index.items() if place == file} ^ set(found):
            raise ValueError(f"{folder / file}: file and index disagree about tensors such as {min(wrong)}.")
        tensors |= found
    return tensors


def _json_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object; got {type(value).__name__}.")
    return value


def companions(folder: Path) -> list[Path]:
    """Return the files to copy along with the weights: tokenizer, chat template, generation settings."""
    found = {path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.suffix != ".py")


@dataclass(frozen=True)
class Export:
    """A Hugging Face folder to write. Only metadata has been read for it.

    Attributes:
        tensors: By Hugging Face name, in order.
        config: Contents of config.json.
        files: Files to copy.
        model: Description of the model.
        notes: Remarks for the user.
        source: Identifies the checkpoint that it is made from.
    """

    tensors: Tensors
    config: dict[str, Any]
    files: list[Path]
    model: Model
    notes: list[str]
    source: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def export(
    plan: Export,
    path: Path,
    largest_file: int,
    options: WriteOptions,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a folder into ``<path>.partial``, and rename it to ``path`` once it is complete.

    Several processes can share the work, file by file; process 0 returns when the folder is complete. A killed process
    that is started again resumes: complete files are kept, provided that names, sizes and source are as before.

    Args:
        plan: What to write. If its source differs, everything is written again.
        path: The folder to create. It may exist if it is empty.
        largest_file: Most bytes of tensors per file, except for single tensors that are larger.
        options: How processes share the work, and how many bytes each holds in memory.
        progress: Called with the number of tensor bytes that have been written, now or by an earlier run.

    Raises:
        FileExistsError: The folder already exists and is not empty.
        RuntimeError: Another process makes no progress.
    """
    tensors, shards = plan.tensors, divide(plan.tensors, largest_file)
    mine = [name for number, name in enumerate(shards) if number % options.processes == options.process]
    companion = "|".join(fnmatch.translate(pattern) for pattern in _COMPANIONS)
    facts = {name: f"{name} {tensor.shape} {tensor.dtype}" for name, tensor in tensors.items()}
    content = {file: [facts[name] for name in names] for file, names in shards.items()}
    staging = Staging(path, options.process, [plan.source, content], rf"{companion}|{_OWN}")
    if (options.process and not mine) or not staging.begin():
        return
    for file in mine:
        target = staging.partial / file
        if target.exists():
            progress(sum(tensors[name].nbytes for name in shards[file]))
            continue
        unfinished = target.with_suffix(_UNFINISHED)
        write_tensors(unfinished, {name: tensors[name] for name in shards[file]}, options.block, progress)
        unfinished.rename(target)
    if options.process == 0:
        staging.wait_for(shards)
        for source in plan.files:
            shutil.copyfile(source, staging.partial / source.name)
        _write_json(staging.partial / CONFIG, plan.config)
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {name: file for file, names in shards.items() for name in names}
            _write_json(staging.partial / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        staging.finish({*shards, CONFIG, INDEX, *(file.name for file in plan.files)})


def divide(tensors: Mapping[str, LazyTensor], largest: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order: the names of the tensors by the name of their file.

    Args:
        tensors: By name.
        largest: Most bytes of tensors per file, except for single tensors that are larger.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())
