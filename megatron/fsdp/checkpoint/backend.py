"""Storage for torch.distributed.checkpoint: saves are whole or not seen, files are checked, nothing loaded is run."""

import concurrent.futures
import io
import os
import pickle
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.fsdp.checkpoint import archive, safe_pickle
from megatron.fsdp.checkpoint.checksums import METADATA, Checksums, DamagedCheckpoint, FileSum, as_hex, write_file
from megatron.fsdp.checkpoint.lazy import Box, blocks_of
from megatron.fsdp.checkpoint.reader import CheckpointReader

# Bytes that loading holds besides the model, and after which the disk is told to take what was written.
BLOCK = 32 << 20
# Where a rank's results of a save name a file instead of a tensor: its size, and its checksum.
_FILE = "checksum of file "


# Saving ------------------------------------------------------------------------------------------------------------


def file_result(name: str, size: int, crc32: int) -> WriteResult:
    """What tells the rank that finishes a save about a file that this rank has written."""
    return WriteResult(index=MetadataIndex(_FILE + name), size_in_bytes=size, storage_data=as_hex(crc32))


class Finishing:
    """What makes a ``FileSystemWriter`` replace a checkpoint as a whole; to be inherited before it.

    Files of an earlier save into the same folder stay until the new metadata is in place, under other names.
    """

    path: str | os.PathLike
    save_id: str

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is overwritten, so there is nothing to warn of."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the names of the files."""
        there = [path.name for path in Path(self.path).glob("*.distcp")]
        generation = 0
        while any(re.fullmatch(rf"__\d+_{_generation(generation)}\d+\.distcp", name) for name in there):
            generation += 1
        return [
            replace(plan, storage_data=_StoragePrefix(f"__{rank}_{_generation(generation)}"))
            for rank, plan in enumerate(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checksums and metadata, which makes the checkpoint one, and remove what is left of an earlier one."""
        everything = [result for of_rank in results for result in of_rank]
        files = {r.index.fqn.removeprefix(_FILE): r for r in everything if r.index.fqn.startswith(_FILE)}
        metadata.storage_data = {r.index: r.storage_data for r in everything if not r.index.fqn.startswith(_FILE)}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
        folder, data = Path(self.path), pickle.dumps(metadata)
        before = Checksums.load(folder) or Checksums()
        sums = Checksums(
            {name: FileSum(result.size_in_bytes, result.storage_data) for name, result in files.items()},
            [as_hex(zlib.crc32(data))],
        )
        # Until the new metadata is there, the earlier checkpoint has to be good; after that, the new one.
        Checksums({**before.files, **sums.files}, [*before.metadata, *sums.metadata]).save(folder)
        write_file(folder / METADATA, data)
        if before.metadata:
            sums.save(folder)
        for path in folder.glob("*.distcp"):
            if path.name not in files:
                path.unlink()


def _generation(number: int) -> str:
    return f"{number}_" if number else ""


class Writer(Finishing, FileSystemWriter):
    """Writes one file per rank, straight from the tensors' memory, and its checksum at the same time.

    Args:
        path: Folder of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; if that fails, such as on a full disk, it is removed."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        path = Path(self.path) / f"{plan.storage_data.prefix}0.distcp"
        try:
            with open(path, "wb", buffering=0) as file:
                results = list(_write_items(file, path.name, plan, planner))
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        done.set_result(results)
        return done


def _write_items(file: IO[bytes], name: str, plan: SavePlan, planner: SavePlanner) -> Iterator[WriteResult]:
    so_far, flushed = archive.Written(0, 0), 0
    flushing: list[concurrent.futures.Future[None]] = []
    # The disk takes what is written while more is written, and while that waits for its checksum.
    with concurrent.futures.ThreadPoolExecutor(1) as flusher:
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                written = archive.write(file, data.getvalue())
            else:
                written = archive.write_tensor(file, data.detach().cpu().contiguous())
            place = _StorageInfo(name, so_far.length, written.length)
            yield WriteResult(index=item.index, size_in_bytes=written.length, storage_data=place)
            so_far = so_far.then(written)
            if so_far.length - flushed >= BLOCK and all(flush.done() for flush in flushing):
                flushing.append(flusher.submit(os.fdatasync, file.fileno()))
                flushed = so_far.length
    # An error of the disk is told once, and then it may be that one of these was told.
    for flush in flushing:
        flush.result()
    yield file_result(name, *so_far)


class Planner(DefaultSavePlanner):
    """Plans what this rank writes: its parts of tensors, and what is no tensor if it is told to.

    Equal plans of a thousand ranks for the same thousands of small objects would be sent to one of them, to be dropped.

    Args:
        writes_objects: Whether this rank writes what is not sharded.
        copies: Whether to copy tensors that are in the host's memory, for a save that goes on while training does.
    """

    def __init__(self, writes_objects: bool = True, copies: bool = False) -> None:
        super().__init__()
        self._writes_objects = writes_objects
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """Items of this rank."""
        items = []
        for name, value in self.state_dict.items():
            if self._writes_objects or hasattr(value, "__create_write_items__"):
                items += _create_write_items(name, value)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        """A tensor, or an object as bytes."""
        data = super().resolve_data(write_item)
        if self._copies and isinstance(data, torch.Tensor) and data.device.type == "cpu":
            return data.detach().clone()
        return data


# Loading -----------------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """Reads of each stored part what is asked for and no more; metadata is checked, and neither it nor objects can run.

    Args:
        path: Folder of the checkpoint.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in the checkpoint.

        Raises:
            FileNotFoundError: There is no whole checkpoint.
            DamagedCheckpoint: It is not what was written.
            UnsafePickle: It would run code.
        """
        self._stored = open_checkpoint(Path(self.path))
        metadata = self._stored.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for to where it goes."""
        for item in sorted(plan.items, key=self._place):
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._stored.object_bytes(name)))
                continue
            target = planner.resolve_tensor(item).detach()
            tensor = self._stored.tensors[name]
            # Offsets count from where the stored part begins.
            begin = item.storage_index.offset or (0,) * len(item.lengths)
            start = tuple(int(a) + int(b) for a, b in zip(begin, item.storage_offsets, strict=True))
            for box in blocks_of(Box(start, tuple(item.lengths)), tensor.dtype.itemsize, BLOCK):
                place = tuple(slice(o - s, o - s + n) for o, s, n in zip(box.offsets, start, box.sizes, strict=True))
                target[place].copy_(tensor.read(box))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[str, int]:
        stored = self.storage_data[item.storage_index]
        return stored.relative_path, stored.offset


class FlatLoadPlanner(DefaultLoadPlanner):
    """Loads a flat dict of tensors and objects; objects cannot run code.

    Args:
        source: The checkpoint, for messages.
    """

    def __init__(self, source: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the dict."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = safe_pickle.load_torch(value, f"{self._source}: {name}")


def open_checkpoint(folder: Path) -> CheckpointReader:
    """A checkpoint whose metadata is what was written; its files are not checked. Errors: see ``CheckpointReader``."""
    opened = CheckpointReader(folder, verify=False)
    if opened.checksums is not None:
        opened.checksums.check_metadata(folder)
    return opened


def check_files(folder: Path) -> None:
    """Compare all files of a checkpoint with their checksums; ranks divide the work. A collective.

    A checkpoint without checksums, which others have written, passes.

    Raises:
        DamagedCheckpoint: On every rank; the message names all damaged files.
    """
    sums = Checksums.load(folder)
    if sums is None:
        return
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    found = []
    for name in sorted(sums.files)[rank::ranks]:
        try:
            sums.check_file(folder, name)
        except DamagedCheckpoint as damage:
            found.append(str(damage))
    if several:
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found)
        found = [message for of_rank in everyone for message in of_rank]
    if found:
        raise DamagedCheckpoint("\n".join(found))
