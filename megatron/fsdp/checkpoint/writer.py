"""Writes new checkpoints of lazy tensors block by block, atomically, with several processes."""

import io
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.backend import complete, file_result, write_items
from megatron.fsdp.checkpoint.checksums import METADATA, NAME, read_json, write_file
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.staging import Staging

# Names of the files of an unfinished checkpoint.
_OWN = r"\d+\.done|__\d+_\d+\.distcp|\.metadata|checksums\.json|metadata\.json|common\.pt"


class RawObject(bytes):
    """A pickled object from ``CheckpointReader.object_bytes``, to be copied without unpickling it."""


@dataclass(frozen=True)
class Draft:
    """A checkpoint to write, or to load as if it had been written.

    Attributes:
        tensors: By key.
        objects: By key. A :class:`RawObject` is written as it is, any other object is pickled.
        planner_data: The path of each key in a nested dict; None if keys are flat.
        files: The contents of small files next to the data, such as ``metadata.json``, by name.
        attributes: Further attributes of ``.metadata``, such as the ``mcore_data`` of older Megatron-Core versions.
    """

    tensors: dict[str, LazyTensor]
    objects: dict[str, Any] = field(default_factory=dict)
    planner_data: dict[str, tuple[Any, ...]] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def metadata(self) -> Metadata:
        """A new description of what is written, but not of where."""
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), [])
            for key, tensor in self.tensors.items()
        }
        entries |= {key: BytesStorageMetadata() for key in self.objects}
        metadata = Metadata(entries, self.planner_data, version=CURRENT_DCP_VERSION)
        vars(metadata).update(self.attributes)
        return metadata

    def read_object(self, key: str) -> Any:
        """Return what is not a tensor."""
        value = self.objects[key]
        return safe_pickle.load_torch(io.BytesIO(value), key) if isinstance(value, RawObject) else value


class _Piece(NamedTuple):
    """A block of a tensor, and the process that writes it."""

    key: str
    region: Region
    nbytes: int
    process: int


def write_checkpoint(
    draft: Draft,
    path: Path,
    worker: tuple[int, int] = (0, 1),
    block: int = 64 << 20,
    source: str = "",
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a checkpoint into ``<path>.partial``, and rename that folder to ``path`` once it is complete.

    Several processes can share the work: each calls this with the same arguments except for ``worker``. If they are
    killed and started again, those that had written all of their share do not write it again.

    Args:
        draft: The contents. Only process 0 needs the values of objects, and the files.
        path: The folder to create.
        worker: Number of this process, from 0, and of the processes that share the work.
        block: Largest region of a tensor to hold in memory, in bytes.
        source: Identifies the source of the data, for instance ``CheckpointReader.fingerprint`` and the settings of a
            conversion.
        progress: Called with the size in bytes of each block that has been written.

    Raises:
        FileExistsError: The folder already exists and is not empty.
        RuntimeError: Another process makes no progress.
        ValueError: ``worker`` or ``block`` is out of range, or a file has a name that the checkpoint uses itself.
    """
    process, processes = worker
    if not 0 <= process < processes or block < 1:
        raise ValueError(
            f"expected 0 <= process < processes and a block of at least a byte; got {process}, {processes} and {block}."
        )
    taken = {METADATA, NAME, *(_data_name(p, number) for p in range(processes) for number in (0, 1))}
    if taken & set(draft.files):
        raise ValueError(f"{path}: expected other names of files; got {sorted(taken & set(draft.files))}.")
    blocks = _divide(draft.tensors, processes, block)
    facts = [(key, tensor.shape, str(tensor.dtype)) for key, tensor in draft.tensors.items()]
    staging = Staging(path, process, [source, processes, block, facts, sorted(draft.objects)], _OWN)
    mine = [each for each in blocks if each.process == process]
    if (process and not mine) or not staging.begin():
        return
    mark = staging.partial / _mark_name(process)
    if mark.exists():
        progress(sum(each.nbytes for each in mine))
    elif mine:
        items = ((_index(each), _read(draft.tensors[each.key], each, progress)) for each in mine)
        results = write_items(staging.partial / _data_name(process, 0), items)
        write_file(mark, json.dumps([_numbers(result) for result in results]).encode())
    if process == 0:
        _finish(draft, staging, blocks)


def _divide(tensors: Mapping[str, LazyTensor], processes: int, limit: int) -> list[_Piece]:
    """Divide the tensors into blocks. Each process gets consecutive ones, and about as many bytes as the others."""
    blocks = [
        (key, region, math.prod(region.sizes) * tensor.dtype.itemsize)
        for key, tensor in tensors.items()
        for region in tensor.blocks(limit)
    ]
    starts = itertools.accumulate((nbytes for _, _, nbytes in blocks), initial=0)
    total = max(sum(nbytes for _, _, nbytes in blocks), 1)
    return [
        _Piece(*each, min(start * processes // total, processes - 1))
        for each, start in zip(blocks, starts, strict=False)
    ]


def _read(tensor: LazyTensor, block: _Piece, progress: Callable[[int], None]) -> torch.Tensor:
    found = tensor.read(block.region)
    progress(block.nbytes)
    return found


def _finish(draft: Draft, staging: Staging, blocks: list[_Piece]) -> None:
    """Collect what the processes have written, write everything else, and complete the checkpoint."""
    folder, metadata = staging.partial, draft.metadata
    results: list[WriteResult] = []
    for process, of_process in itertools.groupby(blocks, lambda each: each.process):
        staging.wait_for([_mark_name(process)])
        results += _results(folder, process, of_process)
    for key, region, *_ in blocks:
        chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
        vars(metadata.state_dict_metadata[key])["chunks"].append(chunk)
    if draft.objects:
        pickled = ((MetadataIndex(key), _pickled(value)) for key, value in draft.objects.items())
        results += write_items(folder / _data_name(0, 1), pickled)
    for name, data in draft.files.items():
        write_file(folder / name, data)
        results.append(file_result(name, len(data), zlib.crc32(data)))
    sums, data = complete(metadata, results)
    sums.fingerprint = staging.plan
    sums.save(folder)
    write_file(folder / METADATA, data)  # last: on object storage this completes the checkpoint
    staging.finish({METADATA, NAME, *sums.files})


def _pickled(value: Any) -> bytes:
    return value if isinstance(value, RawObject) else safe_pickle.save_torch(value)


def _index(block: _Piece) -> MetadataIndex:
    return MetadataIndex(block.key, block.region.offsets)


def _numbers(result: WriteResult) -> list[Any]:
    """The fields of a result that :func:`_results` reads."""
    place = result.storage_data
    return [place.offset, place.length] if isinstance(place, _StorageInfo) else [result.size_in_bytes, place]


def _results(folder: Path, process: int, blocks: Iterable[_Piece]) -> Iterator[WriteResult]:
    """Read what a process has noted about the blocks in its data file, and about the file."""
    name, (*places, (size, crc32)) = _data_name(process, 0), read_json(folder / _mark_name(process))
    for block, (offset, length) in zip(blocks, places, strict=True):
        yield WriteResult(_index(block), length, _StorageInfo(name, offset, length))
    yield file_result(name, size, int(crc32, 16))


def _data_name(process: int, number: int) -> str:
    return f"__{process}_{number}.distcp"


def _mark_name(process: int) -> str:
    return f"{process}.done"
