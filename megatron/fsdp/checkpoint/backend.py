"""Storage for torch.distributed.checkpoint: saves are whole or not seen, files are checked, nothing loaded is run."""

import concurrent.futures
import fcntl
import io
import os
import pickle
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.fsdp.checkpoint import archive, safe_pickle
from megatron.fsdp.checkpoint.checksums import (
    METADATA,
    NAME,
    Checksums,
    DamagedCheckpoint,
    FileSum,
    as_hex,
    crc32_of,
    write_file,
)
from megatron.fsdp.checkpoint.lazy import Box, blocks_of
from megatron.fsdp.checkpoint.reader import COMMON, FORMAT_FILE, CheckpointReader, format_of

# Bytes that loading holds besides the model, and after which the disk is told to take what was written.
BLOCK = 32 << 20
# Where a rank's results of a save name a file instead of a tensor: its size, and its checksum.
_FILE = "checksum of file "
# Damages that a message lists.
SHOWN = 50
# Files of data.
_DATA = "*.distcp"


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
    # Data files that were there when this save began: what it may remove. None: it was not asked to plan.
    _earlier: Collection[str] | None = None
    _reserved: Collection[str] = ()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is overwritten, so there is nothing to warn of."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the names of the files: such as no other save has, one that has only begun included."""
        folder = Path(self.path)
        self._earlier = {path.name for path in folder.glob(_DATA)}
        # Never a name again that a job may be reading from: it would find other data where it looks.
        generation = 1 + max((found for name in self._earlier if (found := _generation(name)) is not None), default=-1)
        while not _reserve(folder, generation):
            generation += 1
        self._reserved = (_first_file(generation),)
        return [replace(plan, storage_data=_StoragePrefix(_name(rank, generation))) for rank, plan in enumerate(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checksums and metadata, which makes the checkpoint one, and remove what is left of an earlier one."""
        everything = [result for of_rank in results for result in of_rank]
        files = {r.index.fqn.removeprefix(_FILE): r for r in everything if r.index.fqn.startswith(_FILE)}
        metadata.storage_data = {r.index: r.storage_data for r in everything if not r.index.fqn.startswith(_FILE)}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
        folder, data = Path(self.path), pickle.dumps(metadata)
        sums = Checksums(
            {name: FileSum(result.size_in_bytes, result.storage_data) for name, result in files.items()},
            [as_hex(zlib.crc32(data))],
        )
        with _alone(folder):
            _require_all(folder, sums)
            before = _earlier_sums(folder)
            # Until the new metadata is there, the earlier checkpoint has to be good; after that, the new one.
            good = before or Checksums(metadata=_unlisted_metadata(folder))
            Checksums({**good.files, **sums.files}, [*good.metadata, *sums.metadata]).save(folder)
            try:
                write_file(folder / METADATA, data)
            except BaseException:
                _put_back(folder, before)
                raise
            if good.metadata:
                sums.save(folder)
            self._remove_earlier(folder, files)

    def _remove_earlier(self, folder: Path, files: Collection[str]) -> None:
        """What an earlier save left, and the name that this one reserved if the first rank had nothing to write."""
        earlier = {path.name for path in folder.glob(_DATA)} if self._earlier is None else self._earlier
        for name in {*earlier, *self._reserved} - set(files):
            (folder / name).unlink(missing_ok=True)
        if _is_torch_dist(folder):
            # It would be taken for what it is no more.
            for name in (FORMAT_FILE, COMMON):
                (folder / name).unlink(missing_ok=True)


def _name(rank: int, generation: int) -> str:
    """The beginning of the names of a rank's files."""
    return f"__{rank}_{generation}_" if generation else f"__{rank}_"


def _first_file(generation: int) -> str:
    return f"{_name(0, generation)}0.distcp"


def _generation(name: str) -> int | None:
    """Which save into its folder a file is of; None if it has another name."""
    found = re.fullmatch(r"__\d+_(?:(\d+)_)?\d+\.distcp", name)
    return None if found is None else int(found[1] or 0)


def _reserve(folder: Path, generation: int) -> bool:
    """Make the first file of a save, unless another job has done so."""
    try:
        with open(folder / _first_file(generation), "xb"):
            return True
    except FileExistsError:
        return False


def remove_save(file: Path) -> None:
    """Remove all files of the save that wrote one of them, and failed; but none that checksums vouch for."""
    listed = _earlier_sums(file.parent) or Checksums()
    for path in file.parent.glob(_DATA):
        if _generation(path.name) == _generation(file.name) and path.name not in listed.files:
            path.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Context that one job at a time is in, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_all(folder: Path, sums: Checksums) -> None:
    """Raise RuntimeError if files that were written are not there any more."""
    for name, entry in sums.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            raise RuntimeError(
                f"{folder / name}: expected the {entry.bytes} bytes that were written; got {size}. Does another job "
                "save into this folder? Give each a folder of its own."
            )


def _earlier_sums(folder: Path) -> Checksums | None:
    """Checksums of the checkpoint that is replaced; others write none, and damaged ones are replaced with it."""
    try:
        return Checksums.load(folder)
    except DamagedCheckpoint:
        return None


def _unlisted_metadata(folder: Path) -> list[str]:
    """The checksum of metadata that nobody has written down."""
    return [crc32_of(folder / METADATA)] if (folder / METADATA).is_file() else []


def _put_back(folder: Path, before: Checksums | None) -> None:
    """List no new files any more; where even that fails, they stay, see :func:`remove_save`."""
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


class Writer(Finishing, FileSystemWriter):
    """Writes one file per rank, straight from the tensors' memory, and its checksum at the same time.

    A rank that fails, such as on a full disk, removes what all ranks have written so far; see :func:`save`.

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
        self._written = Path(self.path) / f"{plan.storage_data.prefix}0.distcp"
        try:
            with open(self._written, "wb", buffering=0) as file:
                results = list(_write_items(file, self._written.name, plan, planner))
                os.fsync(file.fileno())
        except BaseException:
            self.discard()
            raise
        done.set_result(results)
        return done

    def discard(self) -> None:
        """Remove what was written: the save has failed, on this rank or another."""
        for path in {self._written} if self._written else {Path(self.path) / name for name in self._reserved}:
            remove_save(path)


def save(state_dict: dict[str, Any], folder: str | os.PathLike, planner: SavePlanner | None = None) -> None:
    """Save a state dict as a whole, or leave nothing of it and the checkpoint that was in the folder. A collective.

    Args:
        state_dict: Nested dicts and lists of tensors, DTensors and objects.
        folder: Of the checkpoint.
        planner: What this rank writes; None: see :class:`Planner`.

    Raises:
        CheckpointException: On every rank, if one could not write.
    """
    save_with(Writer(folder), state_dict, planner=planner or Planner())


def save_with(writer: Writer, state_dict: dict[str, Any], **options: Any) -> Any:
    """Save as :func:`save` does, with options of ``torch.distributed.checkpoint.save``."""
    try:
        return dcp.save(state_dict, storage_writer=writer, **options)
    except CheckpointException:  # raised by every rank, after all of them have written or failed to
        writer.discard()
        raise


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
    """Reads of each stored part what is asked for and no more; neither metadata nor objects can run.

    Args:
        path: Folder of the checkpoint.
        opened: The checkpoint, checked as it is to be. None: it is opened when it is asked for its metadata, and each
            file is compared with its checksum when it is first read.
    """

    def __init__(self, path: str | os.PathLike, opened: CheckpointReader | None = None) -> None:
        super().__init__(path)
        self._opened = opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in the checkpoint.

        Raises:
            FileNotFoundError: There is no whole checkpoint.
            DamagedCheckpoint: It is not what was written.
            UnsafePickle: It would run code.
        """
        self._stored = self._opened or open_checkpoint(Path(self.path), verify=True)
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


def open_checkpoint(folder: Path, verify: bool = False) -> CheckpointReader:
    """A checkpoint whose metadata is what was written. Errors: see ``CheckpointReader``.

    Args:
        folder: Of the checkpoint.
        verify: Compare files with their checksums too, when they are first read.
    """
    try:
        return _opened(folder, verify)
    except DamagedCheckpoint:
        # A save may have put new checksums and new metadata in their places between one being read and the other.
        return _opened(folder, verify)


def _opened(folder: Path, verify: bool) -> CheckpointReader:
    opened = CheckpointReader(folder, verify)
    if opened.checksums is not None:
        opened.checksums.check_metadata(folder, opened.metadata_crc32)
    return opened


def check_files(opened: CheckpointReader) -> None:
    """Compare all files of a checkpoint with their checksums; ranks divide the work. A collective.

    Where there are none, as others write no such file, each item is compared with those that torch.save put beside it.

    Args:
        opened: The checkpoint, the same on every rank.

    Raises:
        DamagedCheckpoint: On every rank; the message names all damaged files.
    """
    folder, sums = opened.path, opened.checksums or Checksums()
    checks: list[Callable[[], None]] = [partial(sums.check_file, folder, name) for name in sorted(sums.files)]
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    found: list[str] = []
    try:
        checks += [partial(opened.check_contents, *item) for item in opened.unlisted()]
    except DamagedCheckpoint as damage:
        found.append(str(damage))
    for check in checks[rank::ranks]:
        try:
            check()
        except (DamagedCheckpoint, OSError) as damage:
            found.append(str(damage))
    if several:
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, found)
        found = list(dict.fromkeys(message for of_rank in everyone for message in of_rank))
    if found:
        raise DamagedCheckpoint(_listed(found))


def _listed(damages: list[str]) -> str:
    more = [f"... and {len(damages) - SHOWN} more."] if len(damages) > SHOWN else []
    return "\n".join([*damages[:SHOWN], *more])
