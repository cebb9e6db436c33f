"""Saves through ``torch.distributed.checkpoint``: atomically, and with checksums."""

import concurrent.futures
import fcntl
import io
import os
import pickle
import re
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.archive import ChecksummedFile
from megatron.fsdp.checkpoint.checksums import (
    METADATA,
    NAME,
    Checksums,
    DamagedCheckpoint,
    FileSum,
    as_hex,
    crc32_of,
    naming,
    sync_folder,
    write_file,
)
from megatron.fsdp.checkpoint.reader import COMMON, FORMAT_FILE, format_of
from megatron.fsdp.checkpoint.storage import as_path, is_remote, writing

# Bytes to write before the disk is asked to flush them.
BLOCK = 32 << 20
# Small items are collected into writes of this size; larger ones are not copied.
_BUFFER = 1 << 20
# A rank reports a file's size and checksum as the result of saving an item whose name begins with this.
_FILE = "checksum of file "
# Pattern of the names of data files.
_DATA = "*.distcp"


def file_result(name: str, size: int, crc32: int) -> WriteResult:
    """Report a file that this rank has written to the rank that finishes the save."""
    return WriteResult(index=MetadataIndex(_FILE + name), size_in_bytes=size, storage_data=as_hex(crc32))


def write_items(path: Path, items: Iterable[tuple[MetadataIndex, Any]]) -> list[WriteResult]:
    """Write a data file and flush it to the disk.

    Args:
        path: The file. An existing one is replaced.
        items: Tensors, and the bytes of pickled objects.

    Returns:
        The place of each item, then the file's size and checksum.
    """
    results, flushed = [], 0
    flushing: list[concurrent.futures.Future[None]] = []
    # A thread flushes to the disk while this one writes more: otherwise everything would wait for the final fsync.
    with naming(path), writing(path, _BUFFER) as file, concurrent.futures.ThreadPoolExecutor(1) as flusher:
        output = ChecksummedFile(file)
        for index, data in items:
            start = output.length
            if isinstance(data, torch.Tensor):
                plain = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
                if plain.numel() and not plain.data_ptr():
                    raise ValueError(
                        f"{index.fqn}: expected a tensor with memory of its own; got a {type(data).__name__}, which "
                        "consists of other tensors. Save those, or the tensor that it stands for."
                    )
                output.write_tensor(plain)
            else:
                output.write(data.getbuffer() if isinstance(data, io.BytesIO) else data)
            place = _StorageInfo(path.name, start, output.length - start)
            results.append(WriteResult(index, place.length, place))
            if not is_remote(path) and output.length - flushed >= BLOCK and all(flush.done() for flush in flushing):
                flushing.append(flusher.submit(os.fdatasync, file.fileno()))
                flushed = output.length
        # The kernel reports a disk error to one fsync only, which may have been one of these.
        for flush in flushing:
            flush.result()
        if not is_remote(path):
            file.flush()
            os.fsync(file.fileno())
    return [*results, file_result(path.name, output.length, output.crc32)]


def complete(metadata: Metadata, results: Iterable[WriteResult]) -> tuple[Checksums, bytes]:
    """Add the places of items to a checkpoint's metadata; return the checksums of its files, and it as a pickle."""
    metadata.storage_data, files = {}, {}
    for result in results:
        if result.index.fqn.startswith(_FILE):
            files[result.index.fqn.removeprefix(_FILE)] = FileSum(result.size_in_bytes, result.storage_data)
        else:
            metadata.storage_data[result.index] = result.storage_data
    data = pickle.dumps(metadata)
    return Checksums(files, [as_hex(zlib.crc32(data))]), data


class AtomicSaveMixin:
    """Mixin for a ``FileSystemWriter`` that replaces a checkpoint atomically. Inherit from it first.

    Every save into a folder uses new file names. The files of the earlier save stay until the new ``.metadata`` is in
    place, so that the folder always holds one complete checkpoint.
    """

    path: str | os.PathLike
    save_id: str
    # Data files that existed when this save began, which it may remove. None if this rank did not plan the save.
    _earlier: Collection[str] | None = None
    _reserved: Collection[str] = ()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder. The base class would also warn that it overwrites files, which this class does not."""
        as_path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose file names that no other save into this folder has, including saves that are under way."""
        folder = as_path(self.path)
        self._earlier = {path.name for path in folder.glob(_DATA)}
        # Never reuse a name: another job may be reading the file, and would find other data at the same offsets.
        generation = 1 + max((found for name in self._earlier if (found := _generation(name)) is not None), default=-1)
        if is_remote(folder):  # without locks, only a name that no other job can think of is not used twice
            generation = max(generation, time.time_ns())
        else:
            while not _reserve(folder, generation):
                generation += 1
            self._reserved = (_first_file(generation),)
        return [replace(plan, storage_data=_StoragePrefix(_name(rank, generation))) for rank, plan in enumerate(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checksums and metadata, which completes the checkpoint, then remove the files of the earlier one."""
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
        folder = as_path(self.path)
        sums, data = complete(metadata, (result for of_rank in results for result in of_rank))
        with _locked(folder):
            _require_all(folder, sums)
            before = _earlier_sums(folder)
            # A crash must leave valid checksums. Until .metadata is replaced they must match the earlier checkpoint,
            # afterwards the new one, so in between they list both.
            good = before or Checksums(metadata=[crc32_of(folder / METADATA)] if (folder / METADATA).is_file() else [])
            Checksums({**good.files, **sums.files}, [*good.metadata, *sums.metadata]).save(folder)
            try:
                write_file(folder / METADATA, data)
            except BaseException:
                _restore_sums(folder, before)
                raise
            # The folder itself may be new, too.
            for parent in () if is_remote(folder) else folder.absolute().parents[:2]:
                with suppress(OSError):
                    sync_folder(parent)
            if good.metadata:
                sums.save(folder)
            self._remove_earlier(folder, sums.files)

    def _remove_earlier(self, folder: Path, files: Collection[str]) -> None:
        """Remove the files of the earlier save, and this save's reserved file if rank 0 had nothing to write."""
        earlier = {path.name for path in folder.glob(_DATA)} if self._earlier is None else self._earlier
        for name in {*earlier, *self._reserved} - set(files):
            _remove(folder / name)
        if _is_torch_dist(folder):
            # Otherwise readers would take the new checkpoint for a torch_dist one.
            for name in (FORMAT_FILE, COMMON):
                (folder / name).unlink(missing_ok=True)


def _name(rank: int, generation: int) -> str:
    """Return the prefix of a rank's file names."""
    return f"__{rank}_{generation}_" if generation else f"__{rank}_"


def _first_file(generation: int) -> str:
    return f"{_name(0, generation)}0.distcp"


def _generation(name: str) -> int | None:
    """Return which save into its folder a file belongs to; None if its name is of another form."""
    found = re.fullmatch(r"__\d+_(?:(\d+)_)?\d+\.distcp", name)
    return None if found is None else int(found[1] or 0)


def _reserve(folder: Path, generation: int) -> bool:
    """Claim a generation by creating its first file. False if another job has claimed it."""
    try:
        with open(folder / _first_file(generation), "xb"):
            return True
    except FileExistsError:
        return False


def remove_save(file: Path) -> None:
    """Remove all files of a failed save, given one of them. Files that ``checksums.json`` lists are kept."""
    listed = _earlier_sums(file.parent) or Checksums()
    for path in file.parent.glob(_DATA):
        if _generation(path.name) == _generation(file.name) and path.name not in listed.files:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a data file. A folder of such a name is somebody else's."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context that excludes other jobs, where the file system supports locks."""
    if is_remote(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_all(folder: Path, sums: Checksums) -> None:
    """Raise RuntimeError if another job has removed or changed files of this save."""
    for name, entry in sums.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            raise RuntimeError(
                f"{folder / name}: expected the {entry.bytes} bytes that were written; got {size}. Does another job "
                "save into this folder? Give each job its own folder."
            )


def _earlier_sums(folder: Path) -> Checksums | None:
    """Read the checksums of the checkpoint to replace. None if there are none, or only damaged ones."""
    try:
        return Checksums.load(folder)
    except DamagedCheckpoint:
        return None


def _restore_sums(folder: Path, before: Checksums | None) -> None:
    """Restore the earlier checksums. If that fails too, the new files stay, because :func:`remove_save` keeps them."""
    with suppress(OSError):
        if before is None:
            (folder / NAME).unlink(missing_ok=True)
        else:
            before.save(folder)


def _is_torch_dist(folder: Path) -> bool:
    try:
        return format_of(folder) == "torch_dist"
    except DamagedCheckpoint:
        return False


class Writer(AtomicSaveMixin, FileSystemWriter):
    """Writes one file per rank straight from the tensors' memory, and computes its checksum meanwhile.

    If a rank fails, for example because the disk is full, it removes the files of all ranks; see :func:`save`.

    Args:
        path: Folder of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self._written: Path | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        self._written = as_path(self.path) / f"{plan.storage_data.prefix}0.distcp"
        items = ((item.index, planner.resolve_data(item)) for item in plan.items)
        try:
            results = write_items(self._written, items)
        except BaseException:
            self.discard()
            raise
        done.set_result(results)
        return done

    def discard(self) -> None:
        """Remove the files of this save, which has failed on this rank or on another."""
        for path in {self._written} if self._written else {as_path(self.path) / name for name in self._reserved}:
            remove_save(path)


def save(state_dict: dict[str, Any], folder: str | os.PathLike, planner: SavePlanner | None = None) -> None:
    """Save a state dict atomically: a failed save leaves the folder's earlier checkpoint unchanged. A collective.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors and objects.
        folder: Of the checkpoint.
        planner: Decides what this rank writes. None: a :class:`Planner`, which refuses objects that loading would
            refuse.

    Raises:
        CheckpointException: On every rank, if any rank could not write, or an object cannot be loaded again.
    """
    save_with(Writer(folder), state_dict, planner=planner or Planner(checks=True))


def save_with(writer: Writer, state_dict: dict[str, Any], **options: Any) -> Any:
    """Save as :func:`save` does, with options of ``torch.distributed.checkpoint.save``."""
    try:
        return dcp.save(state_dict, storage_writer=writer, **options)
    except CheckpointException:  # raised on every rank, after every rank has finished writing or failed
        writer.discard()
        raise


class Planner(DefaultSavePlanner):
    """Plans what this rank writes: its shards of tensors and, on chosen ranks, everything that is not sharded.

    torch's own planner lets every rank plan every object. Thousands of objects from thousands of ranks would all be
    sent to the coordinator, which drops the duplicates.

    Args:
        writes_objects: Whether this rank writes what is not sharded.
        copies: Whether to copy tensors in host memory, for a save that continues while training modifies them.
        checks: Whether to refuse objects that our own loading would refuse.
    """

    def __init__(self, writes_objects: bool = True, copies: bool = False, checks: bool = False) -> None:
        super().__init__()
        self._writes_objects = writes_objects
        self._copies = copies
        self._checks = checks

    def create_local_plan(self) -> SavePlan:
        """Plan the items that this rank writes."""
        items = []
        for name, value in self.state_dict.items():
            if self._writes_objects or hasattr(value, "__create_write_items__"):
                items += _create_write_items(name, value)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks. torch checks that the shards of a tensor cover it, if there are any.

        Of what is not sharded, and may differ between ranks, the first rank's values are saved. torch's planner would
        distribute such values over the ranks: a mean of one rank's, and a variance of another's.
        """
        seen: set[MetadataIndex] = set()
        for number, plan in enumerate(all_plans):
            kept = [item for item in plan.items if item.type is WriteItemType.SHARD or item.index not in seen]
            seen.update(item.index for item in kept)
            all_plans[number] = replace(plan, items=kept)
        plans, metadata = super().create_global_plan(all_plans)
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor) and value.numel() and name not in metadata.state_dict_metadata:
                raise ValueError(f"{name}: expected shards of a tensor of shape {tuple(value.shape)}; no rank has any.")
        return plans, metadata

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: a tensor, or a pickled object."""
        data = super().resolve_data(write_item)
        if self._checks and isinstance(data, io.BytesIO):
            safe_pickle.load_torch(io.BytesIO(data.getbuffer()), write_item.index.fqn)
        if self._copies and isinstance(data, torch.Tensor) and data.device.type == "cpu":
            return data.detach().clone()
        return data
