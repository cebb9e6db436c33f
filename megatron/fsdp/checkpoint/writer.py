"""Writes new checkpoints as streams: whole or not at all, by several processes, and on after a kill."""

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
from megatron.fsdp.checkpoint.checksums import METADATA, NAME, Checksums, FileSum, as_hex, sync_folder, write_file
from megatron.fsdp.checkpoint.checksums import write_files as write_small_files
from megatron.fsdp.checkpoint.lazy import Box, LazyTensor

# How long the first process waits for another that shows no sign of life, in seconds.
PATIENCE = 600.0
PROGRESS = ".progress"

_VERIFIED_AT_ONCE = 4 << 20
_SECONDS_BETWEEN_SIGNS = 1.0


class RawObject(bytes):
    """An object as it lies in a checkpoint, see ``CheckpointReader.object_bytes``: it is copied, not unpickled."""


class _Item(NamedTuple):
    """A block of a tensor."""

    key: str
    box: Box
    nbytes: int


class _Done(NamedTuple):
    """An item in a data file: its number, where it lies, and the CRC-32 of the file up to its end."""

    number: int
    offset: int
    length: int
    crc32: int


def _ignore(nbytes: int) -> None:
    pass


class CheckpointWriter:
    """Streams a new checkpoint into ``<path>.partial``, which becomes ``path`` when it is whole.

    Several processes may share the work: each makes a writer of the same checkpoint, calls :meth:`write` with the same
    arguments and then :meth:`finish`. Processes that were killed go on where they stopped, if they are started again
    with the same arguments; after any change of them, everything is written anew.

    Args:
        path: The folder to be.
        process: Number of this process, from 0 on.
        processes: How many share the work.
        block: Largest part of a tensor that is in memory at a time, in bytes.
        source: Tells what the checkpoint is made of, such as ``CheckpointReader.fingerprint`` and the settings of a
            conversion. What was written from another source is not used.

    Raises:
        FileExistsError: The folder is there already.
        ValueError: The numbers make no sense.
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
            self._refuse_to_replace()

    def write(
        self,
        tensors: Mapping[str, LazyTensor],
        objects: Mapping[str, Any],
        progress: Callable[[int], None] = _ignore,
    ) -> None:
        """Write this process's share of the blocks of the tensors; the first process writes the objects too.

        Args:
            tensors: By key; each process gives the same, in the same order.
            objects: By key: what is not a tensor, or a :class:`RawObject`.
            progress: Called with the bytes of each block once it is written, or found to be.

        Raises:
            FileExistsError: The folder is there already.
            RuntimeError: It was called before.
        """
        if self._fingerprint:
            raise RuntimeError(f"{self._path}: expected one call of write; got another.")
        self._tensors = tensors
        self._items = [
            _Item(key, box, math.prod(box.sizes) * tensor.dtype.itemsize)
            for key, tensor in tensors.items()
            for box in tensor.blocks(self._block)
        ]
        self._fingerprint = self._identity(objects)
        if self._is_whole():
            return
        self._refuse_to_replace()
        (self._partial / PROGRESS).mkdir(parents=True, exist_ok=True)
        _mark(self._partial, self._process).unlink(missing_ok=True)
        with _Part(self._partial, self._process, self._fingerprint) as part:
            for number in self._share():
                item = self._items[number]
                if number not in part.done:
                    part.append(number, tensors[item.key].read(item.box).contiguous())
                progress(item.nbytes)
            part.sync()
        if self._process == 0:
            self._write_objects(objects)

    def finish(
        self,
        planner_data: dict[str, tuple[Any, ...]] | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Say that this process's share is written; in the first one, wait for the others and complete the checkpoint.

        Args:
            planner_data: What ``.metadata`` keeps of the nesting of the keys: the path of each.
            files: Small files to lie beside, such as ``metadata.json``, by name.
            attributes: What else ``.metadata`` holds, such as the ``mcore_data`` of older versions of Megatron-Core.

        Raises:
            RuntimeError: Nothing was written before, or another process shows no sign of life.
            ValueError: A file has the name of one that the checkpoint has anyway.
        """
        if not self._fingerprint:
            raise RuntimeError(f"{self._path}: expected a call of write before finish; got none.")
        if self._is_whole():
            return
        write_file(_mark(self._partial, self._process), self._fingerprint.encode())
        if self._process:
            return
        taken = {METADATA, NAME, PROGRESS, *self._sums, *(_data_name(p) for p in range(self._processes))}
        if taken & set(files):
            raise ValueError(f"{self._path}: expected other names of files; got {sorted(taken & set(files))}.")
        self._wait()
        places = self._merge()
        self._remove_leftovers({*taken, *files})
        self._sums |= write_small_files(self._partial, files)
        content = self._metadata(places, planner_data)
        vars(content).update(attributes)
        metadata = pickle.dumps(content)
        write_file(self._partial / METADATA, metadata)
        Checksums(self._sums, [as_hex(zlib.crc32(metadata))], self._fingerprint).save(self._partial)
        self._refuse_to_replace()
        self._partial.rename(self._path)
        sync_folder(self._path.parent)
        # The checkpoint is whole; what may be left of this is not part of it.
        shutil.rmtree(self._path / PROGRESS, ignore_errors=True)

    def _identity(self, objects: Mapping[str, Any]) -> str:
        what = [(key, tensor.shape, str(tensor.dtype)) for key, tensor in self._tensors.items()]
        settings = [self._source, self._processes, self._block, what, sorted(objects)]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _is_whole(self) -> bool:
        """Whether the first process has completed the checkpoint already, with what this one wrote before a kill."""
        if not self._process or not (self._path / METADATA).is_file():
            return False
        checksums = Checksums.load(self._path)
        return checksums is not None and checksums.fingerprint == self._fingerprint

    def _refuse_to_replace(self) -> None:
        if self._path.exists():
            raise FileExistsError(f"{self._path}: expected no such folder yet; it is there.")

    def _share(self) -> Iterator[int]:
        """Numbers of this process's items: a run of them, with as many bytes as any other's."""
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

    def _wait(self) -> None:
        """Until every process has said that its share is written."""
        signs: dict[int, tuple[int, int] | None] = {}
        last = time.monotonic()
        while missing := [p for p in range(self._processes) if not self._has_finished(p)]:
            found = {p: _sign_of_life(_journal(self._partial, p)) for p in missing}
            if found != signs:
                signs, last = found, time.monotonic()
            if time.monotonic() - last > PATIENCE:
                raise RuntimeError(f"{self._partial}: no sign of life of processes {missing} for {PATIENCE:.0f} s.")
            time.sleep(0.05)

    def _has_finished(self, process: int) -> bool:
        try:
            return _mark(self._partial, process).read_text() == self._fingerprint
        except FileNotFoundError:
            return False

    def _merge(self) -> dict[int, _StorageInfo]:
        """Where each item lies."""
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
        """Of runs with other arguments, and of this one's processes that had nothing to write."""
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
            storage[MetadataIndex(item.key, item.box.offsets, len(chunks))] = places[number]
            chunks.append(ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes)))
        for key, place in self._objects.items():
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = place
        return Metadata(entries, planner_data, storage, version=CURRENT_DCP_VERSION)


class _Part:
    """The data file of one process and the journal of what is in it; what an earlier run left is taken up."""

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

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._journal.close()

    def append(self, number: int, block: torch.Tensor) -> None:
        """Write an item, and then that it is written."""
        before = self._written
        written = archive.write_tensor(self._file, block)
        self._written = before.then(written)
        done = _Done(number, before.length, written.length, self._written.crc32)
        self._journal.write(f"{json.dumps(done)}\n".encode())

    def sync(self) -> None:
        """Make what was written last through a power failure."""
        os.fsync(self._file.fileno())
        os.fsync(self._journal.fileno())


def _verified(data: Path, journal: Path, done: list[_Done]) -> list[_Done]:
    """The items that are in the data file as the journal says: the first so many of it."""
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
                    os.utime(journal)
                    last = time.monotonic()
            if left or crc != item.crc32:
                return kept
            kept.append(item)
    return kept


def _read_journal(path: Path, fingerprint: str) -> list[_Done]:
    """What is written already; nothing if that was something else. The last line may be torn."""
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


def _sign_of_life(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns
