"""Reads checkpoints in part: the metadata, single objects, and regions of tensors."""

import bisect
import collections
import functools
import io
import itertools
import math
import re
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import Buffer

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.allowed import Foreign
from megatron.fsdp.checkpoint.archive import Archive
from megatron.fsdp.checkpoint.checksums import (
    METADATA,
    Checksums,
    DamagedCheckpoint,
    as_hex,
    fingerprint,
    is_inside,
    read_json,
    size_of,
)
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.storage import is_remote, read_at
from megatron.fsdp.checkpoint.strided import read_region

TRACKER = "latest_checkpointed_iteration.txt"
# The tracker file's contents and the folder's name for a checkpoint without an iteration.
RELEASE = "release"
COMMON = "common.pt"
FORMAT_FILE = "metadata.json"
COMMON_KEY = "common_state/shard_0_1"

_LARGEST = 1 << 63
# Dimensions along which a tensor may be cut into chunks.
_MOST_CUTS = 8


class Place(NamedTuple):
    """Where an item of a checkpoint is stored.

    Attributes:
        file: Name of a file in the checkpoint's folder.
        offset: First byte.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int


class _Index(NamedTuple):
    """The chunks of a tensor, sorted, so that those at given rows are found quickly among tens of thousands.

    Attributes:
        regions: The chunks that are not empty, in the order of their offsets.
        starts: The first row of each chunk.
        longest: The largest number of rows of a chunk.
    """

    regions: list[Region]
    starts: list[int]
    longest: int

    @staticmethod
    def of(entry: TensorStorageMetadata) -> "_Index":
        chunks = (chunk for chunk in entry.chunks if 0 not in chunk.sizes)
        ordered = sorted(Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
        if not ordered or not ordered[0].offsets:
            return _Index(ordered, [], 0)
        return _Index(ordered, [region.offsets[0] for region in ordered], max(region.sizes[0] for region in ordered))

    def near(self, region: Region) -> list[Region]:
        """Return the chunks that may overlap with a region."""
        if not self.starts:
            return self.regions
        first = bisect.bisect_left(self.starts, region.offsets[0] - self.longest + 1)
        return self.regions[first : bisect.bisect_left(self.starts, region.offsets[0] + region.sizes[0])]


class StoredChunk(NamedTuple):
    """Where the elements of one chunk are stored.

    Attributes:
        file: Name of a file in the checkpoint's folder.
        start: Byte in the file at which the first element begins.
        stride: Elements from one index to the next, per dimension.
    """

    file: str
    start: int
    stride: tuple[int, ...]


def checkpoint_folder(path: Path) -> Path:
    """Resolve a path to the folder of a checkpoint: the path itself, or what the tracker file in it points to.

    Raises:
        FileNotFoundError: The path holds neither a checkpoint nor a tracker file that points to one.
        DamagedCheckpoint: The tracker file does not name an iteration.
    """
    if (path / METADATA).is_file():
        return path
    if not (path / TRACKER).is_file():
        raise FileNotFoundError(f"{path}: expected a folder with {METADATA} or {TRACKER}; got neither.")
    text = (path / TRACKER).read_bytes().decode(errors="replace").strip()
    if text != RELEASE and not re.fullmatch("[0-9]{1,18}", text):
        raise DamagedCheckpoint(f"{path / TRACKER}: expected an iteration or {RELEASE!r}; got {text[:40]!r}.")
    found = path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not (found / METADATA).is_file():
        raise FileNotFoundError(f"{found}: expected the checkpoint that {path / TRACKER} names; got no {METADATA}.")
    return found


class CheckpointReader:
    """A checkpoint of ``torch.distributed.checkpoint``, in either of Megatron's formats, open for reading.

    Args:
        path: The folder with ``.metadata``.
        verify: Compare each file with its checksum when it is first read. In a checkpoint without checksums, compare
            each item with the checksums that ``torch.save`` stored with it.

    Attributes:
        path: As given.
        metadata: The contents of ``.metadata``.
        metadata_crc32: CRC-32 of ``.metadata``.
        checksums: Of the files; None if the checkpoint has none.
        tensors: Lazily read tensors, by key.
        objects: Keys of the entries that are not tensors.
        stored: Locates the elements of one of a tensor's :meth:`chunks`, given the key and the chunk. Raises
            DamagedCheckpoint if the chunk is missing or contradicts the metadata.
        format: ``"torch_dist"`` if ``metadata.json`` says so, otherwise ``"fsdp_dtensor"``.

    Raises:
        FileNotFoundError: The folder has no ``.metadata``.
        DamagedCheckpoint: ``.metadata`` is invalid or does not match its checksum.
        UnsafePickle: ``.metadata`` refers to something that is not on the allow-list.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        if not (path / METADATA).is_file():
            raise FileNotFoundError(f"{path}: expected a checkpoint; got no {METADATA}.")
        self.path = path
        self.checksums = Checksums.load(path)
        self._verify = verify
        self._sound: set[str | tuple[str, Region | None]] = set()
        data = (path / METADATA).read_bytes()
        self.metadata_crc32 = as_hex(zlib.crc32(data))
        if verify and self.checksums:
            self.checksums.check_metadata(path, self.metadata_crc32)
        self.metadata = _as_metadata(safe_pickle.loads(data, str(path / METADATA)), path / METADATA)
        self.format = format_of(path)
        entries = self.metadata.state_dict_metadata.items()
        self.tensors = {key: self._tensor(key, e) for key, e in entries if isinstance(e, TensorStorageMetadata)}
        self.objects = tuple(key for key, e in entries if isinstance(e, BytesStorageMetadata))
        # Tensors are read block by block, so each chunk is located many times.
        self.stored = functools.lru_cache(maxsize=1 << 16)(self._find_chunk)
        self._index = functools.lru_cache(maxsize=1 << 16)(self._find_chunks)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies this checkpoint and its current state: changes whenever one of its files does."""
        return f"{self.metadata_crc32} {fingerprint(self.path)}"

    def items(self) -> list[tuple[str, Region | None]]:
        """List everything that is stored: keys with a chunk, or with None for objects."""
        chunks = [(key, chunk) for key in self.tensors for chunk in self.chunks(key)]
        return [*((key, None) for key in self.objects), *chunks]

    def unlisted(self) -> list[tuple[str, Region | None]]:
        """List the items in files that ``checksums.json`` does not list; of several at the same place, one.

        Raises:
            DamagedCheckpoint: The metadata lacks the place of an item.
        """
        places = {self.place(*item): item for item in self.items()}
        return [item for place, item in places.items() if not self._is_listed(place.file)]

    def files(self) -> dict[str, int]:
        """Return the data files that the metadata refers to, with the minimum size of each in bytes."""
        sizes: dict[str, int] = {}
        for index in self.metadata.storage_data:
            place = self._place(index)
            sizes[place.file] = max(sizes.get(place.file, 0), place.offset + place.length)
        return sizes

    def chunks(self, key: str) -> list[Region]:
        """Return the chunks that a tensor is stored in, in the order of their offsets, without empty ones.

        Raises:
            KeyError: There is no tensor of this name.
        """
        if key not in self.tensors:
            raise KeyError(key)
        return self._index(key).regions

    def read_object(self, key: str) -> Any:
        """Read an object and unpickle it through the allow-list.

        Raises:
            KeyError: There is no such object.
            DamagedCheckpoint: The object is missing or damaged.
            UnsafePickle: The object refers to something that is not on the allow-list.
        """
        place = self.place(key)
        with self._open(place.file) as file:
            return safe_pickle.load_torch(_window(file, place.offset, place.length), self._source(key, place))

    def place(self, key: str, chunk: Region | None = None) -> Place:
        """Locate the archive of an object or of a tensor's chunk.

        Args:
            key: The object or tensor.
            chunk: None for an object, one of :meth:`chunks` for a tensor.

        Raises:
            KeyError: There is no such object or tensor.
            DamagedCheckpoint: The metadata lacks its place.
        """
        wanted = TensorStorageMetadata if chunk else BytesStorageMetadata
        if not isinstance(self.metadata.state_dict_metadata.get(key), wanted):
            raise KeyError(key)
        return self._place(MetadataIndex(key, chunk.offsets if chunk else None))

    def object_bytes(self, key: str) -> bytes:
        """Read an object without unpickling it.

        Raises:
            KeyError: There is no such object.
            DamagedCheckpoint: The object is missing or damaged.
        """
        place = self.place(key)
        self._check_item(key, None, place)
        with self._open(place.file) as file:
            data = _window(file, place.offset, place.length).read()
        if len(data) != place.length:
            raise DamagedCheckpoint(
                f"{self.path / place.file}: expected {place.length} bytes of {key}; got {len(data)}."
            )
        return data

    def check(self) -> None:
        """Check that the checkpoint is complete: all files, and every element of every tensor exactly once.

        Raises:
            DamagedCheckpoint: A file is missing or too short, or elements are missing or stored twice.
        """
        for key in self.objects:
            self.place(key)
        for key, tensor in self.tensors.items():
            regions = self.chunks(key)
            problem = untiled(tensor.shape, regions)
            if problem:
                raise DamagedCheckpoint(f"{self.path / METADATA}: expected the chunks of {key} to tile it; {problem}.")
            for region in regions:
                have, need = self.place(key, region).length, math.prod(region.sizes) * tensor.dtype.itemsize
                if have < need:
                    raise DamagedCheckpoint(
                        f"{self.path / METADATA}: {key}: expected at least {need} bytes of {region}; got {have}."
                    )
        self.check_sizes()

    def check_sizes(self) -> None:
        """Check that every data file has at least the size that the metadata implies.

        Raises:
            DamagedCheckpoint: A file is missing or too short.
        """
        for name, size in self.files().items():
            found = size_of(self.path / name)
            if found < size:
                raise DamagedCheckpoint(f"{self.path / name}: expected at least {size} bytes; got {found}.")

    def check_contents(self, key: str, chunk: Region | None = None) -> None:
        """Compare an object or a tensor's chunk with the checksums that ``torch.save`` stored with it.

        Args:
            key: The object or tensor.
            chunk: None for an object, one of :meth:`chunks` for a tensor.

        Raises:
            DamagedCheckpoint: The item is missing or does not match its checksums.
        """
        place = self.place(key, chunk)
        with self._open(place.file) as file:
            Archive(_window(file, place.offset, place.length), self._source(key, place)).check()

    def _tensor(self, key: str, entry: TensorStorageMetadata) -> LazyTensor:
        shape, dtype = tuple(entry.size), entry.properties.dtype
        return LazyTensor(shape, dtype, lambda region: self._read(key, region))

    def _read(self, key: str, region: Region) -> torch.Tensor:
        """Read a region of a tensor from the chunks that it overlaps with."""
        tensor = self.tensors[key]
        if len(region.offsets) != len(tensor.shape) or not _inside(region, tensor.shape):
            raise ValueError(f"{key}: expected a region of a tensor of shape {tensor.shape}; got {region}.")
        result = torch.empty(region.sizes, dtype=tensor.dtype)
        missing = result.numel()
        for chunk in self._index(key).near(region) if missing else []:
            common = intersection(chunk, region)
            if common is None:
                continue
            stored = self.stored(key, chunk)
            target = result[common.slices(region.offsets)]
            with self._open(stored.file) as file:
                read_region(file, stored.start, stored.stride, common.relative_to(chunk.offsets), target)
            missing -= math.prod(common.sizes)
        if missing:
            raise DamagedCheckpoint(
                f"{self.path / METADATA}: expected the chunks of {key} to tile it; {missing} elements of {region} are "
                "not covered exactly once."
            )
        return result

    def _find_chunks(self, key: str) -> _Index:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return _Index.of(entry)

    def _find_chunk(self, key: str, chunk: Region) -> StoredChunk:
        tensor = self.tensors[key]
        place = self.place(key, chunk)
        self._check_item(key, chunk, place)
        source = self._source(key, place)
        with self._open(place.file) as file:
            archive = Archive(_window(file, place.offset, place.length), source)
            found = safe_pickle.stored_tensor(archive)
            start = place.offset + archive.entry(f"data/{found.key}").offset
        if found.size != chunk.sizes or found.dtype != tensor.dtype:
            raise DamagedCheckpoint(
                f"{source}: expected {tensor.dtype} of shape {chunk.sizes}; got {found.dtype} of shape {found.size}."
            )
        return StoredChunk(place.file, start + found.offset * found.dtype.itemsize, found.stride)

    def _place(self, index: MetadataIndex) -> Place:
        info, path = self.metadata.storage_data.get(index), self.path / METADATA
        if info is None:
            raise DamagedCheckpoint(f"{path}: expected the place of {index.fqn} at {index.offset}; got none.")
        place = Place(info.relative_path, info.offset, info.length)
        # Metadata from elsewhere must not make us read files outside of the checkpoint.
        if not is_inside(place.file):
            raise DamagedCheckpoint(f"{path}: expected {index.fqn} in a file of this folder; got {place.file!r}.")
        if getattr(info, "transform_descriptors", None):
            raise NotImplementedError(
                f"{path}: {index.fqn} is stored with transforms, which are not supported: {info.transform_descriptors}."
            )
        return place

    def _source(self, key: str, place: Place) -> str:
        return f"{self.path / place.file} ({key})"

    def _open(self, name: str) -> IO[bytes]:
        """Open a data file. The first time, compare it with its checksum."""
        if self._verify and self.checksums is not None and name not in self._sound:
            self.checksums.check_file(self.path, name)
            self._sound.add(name)
        path = self.path / name
        if not is_remote(path):  # there, a request would be sent for it, and nothing else than a file can be opened
            size_of(path)
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError as error:  # removed in between by another job that saves into the folder
            raise DamagedCheckpoint(f"{path}: expected a file; got none.") from error

    def _check_item(self, key: str, chunk: Region | None, place: Place) -> None:
        """Before the first read of an item whose file has no checksum, compare it with the item's own checksums."""
        if self._verify and (key, chunk) not in self._sound and not self._is_listed(place.file):
            self.check_contents(key, chunk)
            self._sound.add((key, chunk))

    def _is_listed(self, name: str) -> bool:
        return self.checksums is not None and name in self.checksums.files


def open_checkpoint(folder: Path) -> CheckpointReader:
    """Open a checkpoint and compare its metadata, and no file, with its checksum.

    Raises the errors of ``CheckpointReader``.
    """
    for last in (False, True):
        try:
            opened = CheckpointReader(folder, verify=False)
            if opened.checksums is not None:
                opened.checksums.check_metadata(folder, opened.metadata_crc32)
            break
        except DamagedCheckpoint:
            # Checksums and metadata are read one after the other: a save may have replaced both in between.
            if last:
                raise
    return opened


def common_state(path: Path, verify: bool = True) -> dict[str, Any]:
    """Read the state that a ``torch_dist`` checkpoint stores once for all ranks; {} if it has none.

    Args:
        path: The folder with ``.metadata``.
        verify: Compare the file with its checksum.

    Raises:
        DamagedCheckpoint: The state is damaged.
        UnsafePickle: The state refers to something that is not on the allow-list.
    """
    if (path / COMMON).is_file():
        checksums = Checksums.load(path) if verify else None
        if checksums:
            checksums.check_file(path, COMMON)
        with (path / COMMON).open("rb") as file:
            found = safe_pickle.load_torch(file, str(path / COMMON))
    else:
        reader = CheckpointReader(path, verify)
        if COMMON_KEY not in reader.objects:
            return {}
        found = reader.read_object(COMMON_KEY)
        found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{path}: expected the common state to be a dict; got {type(found).__name__}.")
    return found


def format_of(path: Path) -> str:
    """Return the format in ``metadata.json``, see ``CheckpointReader.format``.

    Raises:
        DamagedCheckpoint: The file exists but is not valid JSON.
    """
    if not (path / FORMAT_FILE).exists():
        return "fsdp_dtensor"
    found = read_json(path / FORMAT_FILE)
    return "torch_dist" if isinstance(found, dict) and found.get("sharded_backend") == "torch_dist" else "fsdp_dtensor"


def _as_metadata(found: Any, path: Path) -> Metadata:
    """Validate unpickled metadata, so that the rest of the module can rely on its types.

    Some versions of Megatron-Core write an object of a derived class, which unpickles as a placeholder.
    """
    if isinstance(found, Foreign) and "state_dict_metadata" in vars(found):
        metadata = Metadata(vars(found)["state_dict_metadata"])
        vars(metadata).update(vars(found))
        found = metadata
    if not isinstance(found, Metadata) or not isinstance(vars(found).get("state_dict_metadata"), dict):
        raise DamagedCheckpoint(f"{path}: expected checkpoint metadata; got {type(found).__name__}.")
    places = vars(found).get("storage_data")
    if not isinstance(places, dict):
        raise DamagedCheckpoint(f"{path}: expected a table of its items' places; got {type(places).__name__}.")
    for index, info in places.items():
        if not _is_index(index) or not _is_place(info):
            name = index.fqn if isinstance(index, MetadataIndex) else type(index).__name__
            raise DamagedCheckpoint(f"{path}: expected the place of {name}; its entry is damaged.")
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            raise DamagedCheckpoint(f"{path}: expected {key!r} to be a tensor or an object; its entry is damaged.")
    return found


def _are_sizes(values: Any, count: int) -> bool:
    """Whether these are as many integers as there are dimensions, none of them negative or beyond torch's largest."""
    right = isinstance(values, tuple) and len(values) == count
    return right and all(type(value) is int and 0 <= value < _LARGEST for value in values)


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return False
    try:
        count = len(entry.size)
        right = isinstance(entry.properties.dtype, torch.dtype) and _are_sizes(entry.size, count)
        return right and all(_are_sizes(c.offsets, count) and _are_sizes(c.sizes, count) for c in entry.chunks)
    except (AttributeError, TypeError):
        return False


def _is_index(index: Any) -> bool:
    if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
        return False
    return index.offset is None or (isinstance(index.offset, tuple) and _are_sizes(index.offset, len(index.offset)))


def _is_place(info: Any) -> bool:
    try:
        return isinstance(info.relative_path, str) and _are_sizes((info.offset, info.length), 2)
    except AttributeError:
        return False


def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    return all(0 <= o <= o + n <= size for o, n, size in zip(region.offsets, region.sizes, shape, strict=True))


def intersection(a: Region, b: Region) -> Region | None:
    """Return the overlap of two regions of one tensor; None if they do not overlap."""
    low = tuple(map(max, a.offsets, b.offsets))
    high = tuple(min(p + n, q + m) for p, n, q, m in zip(*a, *b, strict=True)) if a.offsets else ()
    sizes = tuple(h - o for o, h in zip(low, high, strict=True))
    return Region(low, sizes) if min(sizes, default=1) > 0 else None


def untiled(shape: tuple[int, ...], regions: list[Region]) -> str:
    """Describe how regions fail to cover a tensor exactly once; empty if they cover it."""
    regions = [region for region in regions if 0 not in region.sizes]
    for region in regions:
        if not _inside(region, shape):
            return f"one, {region}, is not inside {shape}"
    cut = [dim for dim, size in enumerate(shape) if any(region.sizes[dim] != size for region in regions)]
    if len(cut) > _MOST_CUTS:
        return f"they cut it along {len(cut)} dimensions, more than {_MOST_CUTS}"
    covered, wanted = sum(math.prod(region.sizes) for region in regions), math.prod(shape)
    # Differences along all dimensions are zero but at corners, and tell any two sums of regions apart.
    corners: dict[tuple[int, ...], int] = collections.defaultdict(int)
    whole = [Region((0,) * len(shape), shape)] if wanted else []
    for weight, region in [*((1, region) for region in regions), *((-1, region) for region in whole)]:
        ends = [(region.offsets[dim], region.offsets[dim] + region.sizes[dim]) for dim in cut]
        for corner in itertools.product((0, 1), repeat=len(cut)):
            at = tuple(pair[which] for pair, which in zip(ends, corner, strict=True))
            corners[at] += weight * (-1) ** sum(corner)
    if not any(corners.values()):
        return ""
    return f"they have {covered} of {wanted} elements" if covered < wanted else "one overlaps with another"


def _window(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return a stream of a range of a file. Closing it leaves the file open."""
    return io.BufferedReader(_Window(file, offset, length))


class _Window(io.RawIOBase):
    # torch's own view of a file range seeks before the range's beginning without an error.
    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)[: max(self._length - self._position, 0)]
        count = read_at(self._file, view, self._offset + self._position) if view else 0
        self._position += count
        return count
