"""Writes new checkpoints block by block: atomically, with several processes, and resuming after a crash."""

import hashlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

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

from megatron.fsdp.checkpoint import archive, safe_pickle
from megatron.fsdp.checkpoint.archive import Written
from megatron.fsdp.checkpoint.checksums import (
    METADATA,
    NAME,
    Checksums,
    FileSum,
    as_hex,
    require_own,
    sync_folder,
    write_file,
    write_files,
)
from megatron.fsdp.checkpoint.coordination import wait_until
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region

PROGRESS = ".progress"
# Names of everything in an unfinished checkpoint.
_OWN = (
    r"\.progress|\d+\.(journal|done)|__\d+_\d+\.distcp|\.metadata|checksums\.json|metadata\.json|common\.pt"
    r"|.+\.[0-9a-f]+\.tmp"
)

_VERIFIED_AT_ONCE = 4 << 20
_SECONDS_BETWEEN_SIGNS = 1.0


class RawObject(bytes):
    """A pickled object from ``CheckpointReader.object_bytes``, to be copied without unpickling it."""


class _Item(NamedTuple):
    """A block of a tensor."""

    key: str
    region: Region
    nbytes: int


class _Done(NamedTuple):
    """A written item: its number, its place in the data file, and the CRC-32 of the file up to the item's end."""

    number: int
    offset: int
    length: int
    crc32: int


def _ignore(nbytes: int) -> None:
    pass


class CheckpointWriter:
    """Streams a new checkpoint into ``<path>.partial``, and renames that folder to ``path`` once it is complete.

    Several processes can share the work. Each creates a writer of the same checkpoint, calls :meth:`write` with the
    same arguments, and then :meth:`finish`. A killed process that is started again with the same arguments resumes
    where it stopped. If an argument differs, everything is written again.

    Args:
        path: The folder to create.
        process: Number of this process, from 0.
        processes: Number of processes that share the work.
        block: Largest region of a tensor to hold in memory, in bytes.
        source: Identifies the source of the data, for instance ``CheckpointReader.fingerprint`` and the settings of a
            conversion. Blocks that were written from another source are not reused.

    Raises:
        FileExistsError: The folder already exists and is not empty.
        ValueError: ``process``, ``processes`` or ``block`` is out of range.
    """

    def __init__(
        self, path: Path, process: int = 0, processes: int = 1, block: int = 64 << 20, source: str = ""
    ) -> None:
        if not 0 <= process < processes or block < 1:
            raise ValueError(
                f"CheckpointWriter: expected 0 <= process < processes and a block of at least a byte; "
                f"got {process}, {processes} and {block}."
            )
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._process, self._processes, self._block, self._source = process, processes, block, source
        self._tensors: Mapping[str, LazyTensor] = {}
        self._items: list[_Item] = []
        self._fingerprint = ""
        self._objects: dict[str, _StorageInfo] = {}
        self._sums: dict[str, FileSum] = {}
        if process == 0:
            self._require_absent()

    def write(
        self,
        tensors: Mapping[str, LazyTensor],
        objects: Mapping[str, Any],
        progress: Callable[[int], None] = _ignore,
    ) -> None:
        """Write this process's share of the tensors' blocks. Process 0 also writes the objects.

        Args:
            tensors: By key; the same on all processes, in the same order.
            objects: By key. A :class:`RawObject` is written as it is, any other object is pickled.
            progress: Called with the size in bytes of each block that has been written, now or by an earlier run.

        Raises:
            FileExistsError: The folder already exists and is not empty.
            RuntimeError: The method was called before.
        """
        if self._fingerprint:
            raise RuntimeError(f"{self._path}: expected one call of write; got another.")
        self._tensors = tensors
        self._items = [
            _Item(key, region, math.prod(region.sizes) * tensor.dtype.itemsize)
            for key, tensor in tensors.items()
            for region in tensor.blocks(self._block)
        ]
        self._fingerprint = self._identity(objects)
        if self._is_complete():
            return
        self._require_absent()
        require_own(self._partial, _OWN)
        (self._partial / PROGRESS).mkdir(parents=True, exist_ok=True)
        _mark(self._partial, self._process).unlink(missing_ok=True)
        with _DataFile(self._partial, self._process, self._fingerprint) as file:
            for number in self._share():
                item = self._items[number]
                if number not in file.done:
                    file.append(number, tensors[item.key].read(item.region).contiguous())
                progress(item.nbytes)
            file.sync()
        if self._process == 0:
            self._write_objects(objects)

    def finish(
        self,
        planner_data: dict[str, tuple[Any, ...]] | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Mark this process's share as written. Process 0 then waits for the others and completes the checkpoint.

        Args:
            planner_data: For ``.metadata``: the path of each key in the nested state dict.
            files: Small files to add to the checkpoint, such as ``metadata.json``, by name.
            attributes: Further attributes of ``.metadata``, such as the ``mcore_data`` of older Megatron-Core versions.

        Raises:
            RuntimeError: :meth:`write` was not called, or another process makes no progress.
            ValueError: A file's name is one that the checkpoint uses itself.
        """
        if not self._fingerprint:
            raise RuntimeError(f"{self._path}: expected a call of write before finish; got none.")
        if self._is_complete():
            return
        write_file(_mark(self._partial, self._process), self._fingerprint.encode())
        if self._process:
            return
        taken = {METADATA, NAME, PROGRESS, *self._sums, *(_data_name(p) for p in range(self._processes))}
        if taken & set(files):
            raise ValueError(f"{self._path}: expected other names of files; got {sorted(taken & set(files))}.")
        wait_until(
            lambda: not self._unfinished(),
            lambda: [_size_and_time(_journal(self._partial, p)) for p in self._unfinished()],
            lambda: f"{self._partial}: processes {self._unfinished()}",
        )
        places = self._merge()
        self._remove_leftovers({*taken, *files})
        self._sums |= write_files(self._partial, files)
        content = self._metadata(places, planner_data)
        vars(content).update(attributes)
        metadata = pickle.dumps(content)
        write_file(self._partial / METADATA, metadata)
        Checksums(self._sums, [as_hex(zlib.crc32(metadata))], self._fingerprint).save(self._partial)
        self._require_absent()
        self._partial.rename(self._path)
        sync_folder(self._path.parent)
        # Last, because a crash before the rename needs the journals to resume. Readers ignore a leftover.
        shutil.rmtree(self._path / PROGRESS, ignore_errors=True)

    def _identity(self, objects: Mapping[str, Any]) -> str:
        """Fingerprint of everything that decides which bytes are written where."""
        tensors = [(key, tensor.shape, str(tensor.dtype)) for key, tensor in self._tensors.items()]
        settings = [self._source, self._processes, self._block, tensors, sorted(objects)]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _is_complete(self) -> bool:
        """Whether process 0 has already completed the checkpoint with what this process wrote before it was killed."""
        if not self._process or not (self._path / METADATA).is_file():
            return False
        checksums = Checksums.load(self._path)
        return checksums is not None and checksums.fingerprint == self._fingerprint

    def _require_absent(self) -> None:
        if self._path.exists() and not (self._path.is_dir() and not any(self._path.iterdir())):
            raise FileExistsError(f"{self._path}: expected no such folder yet, or an empty one; it has contents.")

    def _share(self) -> Iterator[int]:
        """Return the numbers of this process's items: consecutive, and about as many bytes as for other processes."""
        starts = itertools.accumulate((item.nbytes for item in self._items), initial=0)
        total = max(sum(item.nbytes for item in self._items), 1)
        for number, start in zip(range(len(self._items)), starts, strict=False):
            if min(start * self._processes // total, self._processes - 1) == self._process:
                yield number

    def _write_objects(self, objects: Mapping[str, Any]) -> None:
        name, written = _data_name(0, 1), Written(0, 0)
        if not objects:
            return
        with open(self._partial / name, "wb") as file:
            for key, value in objects.items():
                data = value if isinstance(value, RawObject) else _pickled(value)
                self._objects[key] = _StorageInfo(name, written.length, len(data))
                written = written.then(archive.write(file, data))
            file.flush()
            os.fsync(file.fileno())
        self._sums[name] = FileSum(written.length, as_hex(written.crc32))

    def _unfinished(self) -> list[int]:
        return [process for process in range(self._processes) if not self._has_finished(process)]

    def _has_finished(self, process: int) -> bool:
        try:
            return _mark(self._partial, process).read_text() == self._fingerprint
        except FileNotFoundError:
            return False

    def _merge(self) -> dict[int, _StorageInfo]:
        """Collect the place of each item and the checksum of each data file from the journals."""
        places: dict[int, _StorageInfo] = {}
        for process in range(self._processes):
            done, name = _read_journal(_journal(self._partial, process), self._fingerprint), _data_name(process)
            places |= {d.number: _StorageInfo(name, d.offset, d.length) for d in done}
            end = done[-1] if done else _Done(0, 0, 0, 0)
            self._sums[name] = FileSum(end.offset + end.length, as_hex(end.crc32))
        if len(places) != len(self._items):
            raise RuntimeError(f"{self._partial}: expected {len(self._items)} blocks; got {len(places)}.")
        return places

    def _remove_leftovers(self, wanted: set[str]) -> None:
        """Remove empty data files, and files of runs with other arguments."""
        for name in [name for name, entry in self._sums.items() if not entry.bytes]:
            del self._sums[name]
            wanted.discard(name)
        for path in self._partial.iterdir():
            if path.name not in wanted:
                path.unlink()

    def _metadata(self, places: dict[int, _StorageInfo], planner_data: dict[str, tuple[Any, ...]] | None) -> Metadata:
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [])
            for key, tensor in self._tensors.items()
        }
        storage = {}
        for number, item in enumerate(self._items):
            chunks = entries[item.key].chunks
            storage[MetadataIndex(item.key, item.region.offsets, len(chunks))] = places[number]
            chunks.append(ChunkStorageMetadata(torch.Size(item.region.offsets), torch.Size(item.region.sizes)))
        for key, place in self._objects.items():
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = place
        return Metadata(entries, planner_data, storage, version=CURRENT_DCP_VERSION)


class _DataFile:
    """The data file of one process, and the journal of the items in it. Resumes the file of an earlier run.

    An item is journaled after it is written. After a crash, the items in the journal are verified, because the disk may
    have received the journal but not the data. The file is truncated after the last valid item.
    """

    def __init__(self, folder: Path, process: int, fingerprint: str) -> None:
        data, journal = folder / _data_name(process), _journal(folder, process)
        kept = _verified(data, journal, _read_journal(journal, fingerprint))
        self.done = {done.number for done in kept}
        end = kept[-1] if kept else _Done(0, 0, 0, 0)
        self._written = Written(end.offset + end.length, end.crc32)
        self._file: IO[bytes] = open(data, "r+b" if kept else "wb", buffering=0)
        self._file.truncate(self._written.length)
        self._file.seek(self._written.length)
        lines = [json.dumps(fingerprint), *(json.dumps(done) for done in kept)]
        write_file(journal, "".join(f"{line}\n" for line in lines).encode())
        self._journal = open(journal, "ab", buffering=0)

    def __enter__(self) -> "_DataFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._journal.close()

    def append(self, number: int, block: torch.Tensor) -> None:
        """Write an item, then journal it."""
        before = self._written
        written = archive.write_tensor(self._file, block)
        self._written = before.then(written)
        done = _Done(number, before.length, written.length, self._written.crc32)
        self._journal.write(f"{json.dumps(done)}\n".encode())

    def sync(self) -> None:
        """Make everything that was written survive a power failure."""
        os.fsync(self._file.fileno())
        os.fsync(self._journal.fileno())


def _verified(data: Path, journal: Path, done: list[_Done]) -> list[_Done]:
    """Return the leading items of the journal that the data file holds undamaged."""
    kept: list[_Done] = []
    if not done or not data.is_file():
        return kept
    crc, last = 0, time.monotonic()
    with open(data, "rb", buffering=0) as file:
        for item in done:
            left = item.length
            while left and (piece := file.read(min(left, _VERIFIED_AT_ONCE))):
                crc = zlib.crc32(piece, crc)
                left -= len(piece)
                if time.monotonic() - last > _SECONDS_BETWEEN_SIGNS:
                    # Process 0 watches the journal for progress.
                    os.utime(journal)
                    last = time.monotonic()
            if left or crc != item.crc32:
                return kept
            kept.append(item)
    return kept


def _read_journal(path: Path, fingerprint: str) -> list[_Done]:
    """Read a journal; empty if it is of other arguments. The last line may be incomplete."""
    try:
        first, *lines = path.read_bytes().split(b"\n")
        if json.loads(first) != fingerprint:
            return []
    except (FileNotFoundError, ValueError):
        return []
    done: list[_Done] = []
    for line in lines[:-1]:
        try:
            item = _Done(*json.loads(line))
        except (ValueError, TypeError):
            break
        if item.offset != (done[-1].offset + done[-1].length if done else 0):
            break
        done.append(item)
    return done


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    safe_pickle.save_torch(value, stream)
    return stream.getvalue()


def _data_name(process: int, number: int = 0) -> str:
    return f"__{process}_{number}.distcp"


def _journal(folder: Path, process: int) -> Path:
    return folder / PROGRESS / f"{process}.journal"


def _mark(folder: Path, process: int) -> Path:
    return folder / PROGRESS / f"{process}.done"


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
