"""Reads checkpoints in part: metadata, objects, and of a tensor only the bytes that are asked for."""

import bisect
import functools
import hashlib
import io
import math
import os
import re
import zlib
from collections.abc import Buffer
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron.fsdp.checkpoint import safe_pickle
from megatron.fsdp.checkpoint.allowed import Foreign
from megatron.fsdp.checkpoint.archive import Archive, memory
from megatron.fsdp.checkpoint.checksums import (
    METADATA,
    Checksums,
    DamagedCheckpoint,
    as_hex,
    is_inside,
    read_json,
    size_of,
)
from megatron.fsdp.checkpoint.lazy import Box, LazyTensor

TRACKER = "latest_checkpointed_iteration.txt"
# What a tracker file says, and the folder is called, of a checkpoint without an iteration.
RELEASE = "release"
COMMON = "common.pt"
FORMAT_FILE = "metadata.json"
COMMON_KEY = "common_state/shard_0_1"

# What does not lie in one piece is read in pieces up to this size, in bytes, and picked from them.
_SCRATCH = 4 << 20
# Reading this many bytes that nobody asked for is as fast as reading twice.
_GAP = 64 << 10
# Integers of the same size move elements of any dtype without looking at them.
_MOVERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Place(NamedTuple):
    """Where an item of a checkpoint lies: in a file of its folder, from a byte on, so many bytes."""

    file: str
    offset: int
    length: int


class _Index(NamedTuple):
    """Chunks of a tensor, to be found by where they are along the first dimension; there may be tens of thousands.

    Attributes:
        boxes: The chunks, in the order of their offsets.
        starts: The first offset of each.
        longest: The largest first size.
    """

    boxes: list[Box]
    starts: list[int]
    longest: int

    @staticmethod
    def of(boxes: list[Box]) -> "_Index":
        """The index of some chunks of one tensor."""
        ordered = sorted(boxes)
        if not ordered or not ordered[0].offsets:
            return _Index(ordered, [], 0)
        return _Index(ordered, [box.offsets[0] for box in ordered], max(box.sizes[0] for box in ordered))

    def near(self, box: Box) -> list[Box]:
        """Chunks that may have something in common with a box."""
        if not self.starts:
            return self.boxes
        first = bisect.bisect_left(self.starts, box.offsets[0] - self.longest + 1)
        return self.boxes[first : bisect.bisect_left(self.starts, box.offsets[0] + box.sizes[0])]


class StoredChunk(NamedTuple):
    """How the elements of one chunk lie in a file.

    Attributes:
        file: Name within the folder.
        start: Where its storage begins, in bytes from the beginning of the file.
        offset: Of its first element within the storage, in elements.
        shape: Of the chunk.
        stride: Elements from one index to the next, per dimension.
        dtype: Of the elements.
    """

    file: str
    start: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def checkpoint_folder(path: Path) -> Path:
    """The folder of the checkpoint that a user means: a checkpoint itself, or the folder above it with a tracker file.

    Raises:
        FileNotFoundError: There is neither.
        DamagedCheckpoint: The tracker file does not say an iteration.
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
    """A checkpoint of torch.distributed.checkpoint, in either of Megatron's formats, open for reading.

    Args:
        path: The folder with ``.metadata``.
        verify: Compare each file with its checksum when it is first read; where the checkpoint has none, each item with
            those that torch.save put beside it.

    Attributes:
        path: As given.
        metadata: What ``.metadata`` holds.
        metadata_crc32: CRC-32 of ``.metadata``.
        checksums: What the files should be; None if the checkpoint does not say.
        tensors: By key, to be read when they are needed.
        objects: Keys of what are not tensors.
        format: ``"torch_dist"`` if ``metadata.json`` says so, ``"fsdp_dtensor"`` otherwise.

    Raises:
        FileNotFoundError: There is no ``.metadata``.
        DamagedCheckpoint: It cannot be understood, or is not what its checksum says.
        UnsafePickle: It names what is not on the allow-list.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        if not (path / METADATA).is_file():
            raise FileNotFoundError(f"{path}: expected a checkpoint; got no {METADATA}.")
        self.path = path
        self.checksums = Checksums.load(path)
        self._verify = verify
        self._sound: set[str | tuple[str, Box | None]] = set()
        data = (path / METADATA).read_bytes()
        self.metadata_crc32 = as_hex(zlib.crc32(data))
        if verify and self.checksums:
            self.checksums.check_metadata(path, self.metadata_crc32)
        self.metadata = _as_metadata(safe_pickle.loads(data, str(path / METADATA)), path / METADATA)
        self.format = format_of(path)
        entries = self.metadata.state_dict_metadata.items()
        self.tensors = {key: self._tensor(key, e) for key, e in entries if isinstance(e, TensorStorageMetadata)}
        self.objects = tuple(key for key, e in entries if isinstance(e, BytesStorageMetadata))
        # Chunks are read block by block: where one lies is asked again and again.
        self._stored = functools.lru_cache(maxsize=1 << 16)(self._find_chunk)
        self._boxes = functools.lru_cache(maxsize=1 << 10)(self._find_boxes)
        self._index = functools.lru_cache(maxsize=1 << 16)(lambda key: _Index.of(self._boxes(key)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells this checkpoint from others, and from itself once it has been changed."""
        digest = hashlib.sha256((self.path / METADATA).read_bytes())
        for path in sorted(p for p in self.path.iterdir() if p.is_file()):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def unlisted(self) -> list[tuple[str, Box | None]]:
        """Objects, and chunks of tensors, that lie in files without a checksum of their own; None for an object.

        Raises:
            DamagedCheckpoint: The metadata does not say where one lies.
        """
        items: list[tuple[str, Box | None]] = [(key, None) for key in self.objects]
        items += [(key, chunk) for key in self.tensors for chunk in self.chunks(key)]
        return [(key, chunk) for key, chunk in items if not self._is_listed(self.place(key, chunk).file)]

    def files(self) -> dict[str, int]:
        """The data files that the metadata names, and the size in bytes that each must have at least."""
        sizes: dict[str, int] = {}
        for index in self.metadata.storage_data:
            place = self._place(index)
            sizes[place.file] = max(sizes.get(place.file, 0), place.offset + place.length)
        return sizes

    def chunks(self, key: str) -> list[Box]:
        """How a tensor is cut in the files.

        Raises:
            KeyError: There is no tensor of this name.
        """
        if key not in self.tensors:
            raise KeyError(key)
        return self._boxes(key)

    def stored(self, key: str, chunk: Box) -> StoredChunk:
        """How one chunk of a tensor lies in its file.

        Args:
            key: The tensor.
            chunk: One of :meth:`chunks`.

        Raises:
            DamagedCheckpoint: It is not there, or is not what the metadata says.
        """
        return self._stored(key, chunk)

    def read_object(self, key: str) -> Any:
        """What is not a tensor, unpickled through the allow-list.

        Raises:
            KeyError: There is no such object.
            DamagedCheckpoint: It is not there or cannot be understood.
            UnsafePickle: It names what is not on the allow-list.
        """
        place = self.place(key)
        with self._open(place.file) as file:
            return safe_pickle.load_torch(_window(file, place.offset, place.length), self._source(key, place))

    def place(self, key: str, chunk: Box | None = None) -> Place:
        """Where an object lies, or a chunk of a tensor with what describes it.

        Args:
            key: The object or tensor.
            chunk: None for an object, one of :meth:`chunks` for a tensor.

        Raises:
            KeyError: There is no such object or tensor.
            DamagedCheckpoint: The metadata does not say where it lies.
        """
        wanted = TensorStorageMetadata if chunk else BytesStorageMetadata
        if not isinstance(self.metadata.state_dict_metadata.get(key), wanted):
            raise KeyError(key)
        return self._place(MetadataIndex(key, chunk.offsets if chunk else None))

    def object_bytes(self, key: str) -> bytes:
        """An object as it lies in the file, not unpickled.

        Raises:
            KeyError: There is no such object.
            DamagedCheckpoint: It is not there.
        """
        place = self.place(key)
        self._check_item(key, None, place)
        with self._open(place.file) as file:
            data = _window(file, place.offset, place.length).read()
        if len(data) != place.length:
            raise DamagedCheckpoint(f"{self.path / place.file}: expected {key} whole; got {len(data)} bytes of it.")
        return data

    def check(self) -> None:
        """Whether all is there: every file, as long as it must be, and every element of every tensor exactly once.

        Raises:
            DamagedCheckpoint: Something is missing or there twice.
        """
        for key in self.objects:
            self.place(key)
        for key, tensor in self.tensors.items():
            boxes = self.chunks(key)
            problem = untiled(tensor.shape, boxes)
            if problem:
                raise DamagedCheckpoint(f"{self.path / METADATA}: expected the chunks of {key} to tile it; {problem}.")
            for box in boxes:
                have, need = self.place(key, box).length, math.prod(box.sizes) * tensor.dtype.itemsize
                if have < need:
                    raise DamagedCheckpoint(
                        f"{self.path / METADATA}: {key}: expected at least {need} bytes of {box}; got {have}."
                    )
        for name, size in self.files().items():
            self._check_size(name, size)

    def check_contents(self, key: str, chunk: Box | None = None) -> None:
        """Compare the bytes of an object, or of a chunk of a tensor, with the checksums that torch.save put beside.

        Args:
            key: The object or tensor.
            chunk: None for an object, one of :meth:`chunks` for a tensor.

        Raises:
            DamagedCheckpoint: They differ, or it is not there.
        """
        place = self.place(key, chunk)
        with self._open(place.file) as file:
            archive = Archive(_window(file, place.offset, place.length), self._source(key, place))
            for name, entry in archive.entries().items():
                window, crc = _window(file, place.offset + entry.offset, entry.size), 0
                while piece := window.read(_SCRATCH):
                    crc = zlib.crc32(piece, crc)
                if crc != entry.crc32:
                    raise DamagedCheckpoint(
                        f"{archive.source}: expected the CRC-32 {entry.crc32:08x} of {name}; got {crc:08x}."
                    )

    def _tensor(self, key: str, entry: TensorStorageMetadata) -> LazyTensor:
        shape, dtype = tuple(entry.size), entry.properties.dtype
        return LazyTensor(shape, dtype, lambda box: self._read(key, box))

    def _read(self, key: str, box: Box) -> torch.Tensor:
        """A part of a tensor, put together from the chunks that it meets."""
        tensor = self.tensors[key]
        if len(box.offsets) != len(tensor.shape) or not _inside(box, tensor.shape):
            raise ValueError(f"{key}: expected a part of a tensor of shape {tensor.shape}; got {box}.")
        result = torch.empty(box.sizes, dtype=tensor.dtype)
        missing = result.numel()
        for chunk in self._index(key).near(box) if missing else []:
            common = intersection(chunk, box)
            if common is None:
                continue
            stored = self._stored(key, chunk)
            target = result[_slices(common, box.offsets)]
            with self._open(stored.file) as file:
                _fetch(file, stored, _relative(common, chunk.offsets), target)
            missing -= math.prod(common.sizes)
        if missing:
            raise DamagedCheckpoint(
                f"{self.path / METADATA}: expected the chunks of {key} to tile it; {missing} elements of {box} differ."
            )
        return result

    def _find_boxes(self, key: str) -> list[Box]:
        entry = self.metadata.state_dict_metadata[key]
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]

    def _find_chunk(self, key: str, chunk: Box) -> StoredChunk:
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
        return StoredChunk(place.file, start, found.offset, found.size, found.stride, found.dtype)

    def _place(self, index: MetadataIndex) -> Place:
        info, path = self.metadata.storage_data.get(index), self.path / METADATA
        if info is None:
            raise DamagedCheckpoint(f"{path}: expected the place of {index.fqn} at {index.offset}; got none.")
        try:
            place = Place(info.relative_path, info.offset, info.length)
            right = isinstance(place.file, str) and min(place.offset, place.length) >= 0
        except (AttributeError, TypeError):
            right = False
        if not right:
            raise DamagedCheckpoint(f"{path}: expected the place of {index.fqn}; its entry is damaged.")
        if not is_inside(place.file):
            raise DamagedCheckpoint(f"{path}: expected {index.fqn} in a file of this folder; got {place.file!r}.")
        if getattr(info, "transform_descriptors", None):
            raise NotImplementedError(f"{path}: {index.fqn} is stored as {info.transform_descriptors}, not plainly.")
        return place

    def _source(self, key: str, place: Place) -> str:
        return f"{self.path / place.file} ({key})"

    def _check_size(self, name: str, size: int) -> None:
        found = size_of(self.path / name)
        if found < size:
            raise DamagedCheckpoint(f"{self.path / name}: expected at least {size} bytes; got {found}.")

    def _open(self, name: str) -> IO[bytes]:
        """A data file, compared with its checksum when it is first opened."""
        if self._verify and self.checksums is not None and name not in self._sound:
            self.checksums.check_file(self.path, name)
            self._sound.add(name)
        size_of(self.path / name)
        return open(self.path / name, "rb", buffering=0)

    def _check_item(self, key: str, chunk: Box | None, place: Place) -> None:
        """Before it is first read, compare an item of a file without a checksum with the item's own."""
        if self._verify and (key, chunk) not in self._sound and not self._is_listed(place.file):
            self.check_contents(key, chunk)
            self._sound.add((key, chunk))

    def _is_listed(self, name: str) -> bool:
        return self.checksums is not None and name in self.checksums.files


def common_state(path: Path, verify: bool = True) -> dict[str, Any]:
    """What a ``torch_dist`` checkpoint holds once for all ranks; {} if it has no such thing.

    Args:
        path: The folder with ``.metadata``.
        verify: Compare the file that it lies in with its checksum.

    Raises:
        DamagedCheckpoint: It cannot be understood.
        UnsafePickle: It names what is not on the allow-list.
    """
    if (path / COMMON).is_file():
        checksums = Checksums.load(path) if verify else None
        if checksums:
            checksums.check_file(path, COMMON)
        with open(path / COMMON, "rb") as file:
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
    """What ``metadata.json`` says, see ``CheckpointReader.format``.

    Raises:
        DamagedCheckpoint: The file is there but is no JSON.
    """
    if not (path / FORMAT_FILE).exists():
        return "fsdp_dtensor"
    found = read_json(path / FORMAT_FILE)
    return "torch_dist" if isinstance(found, dict) and found.get("sharded_backend") == "torch_dist" else "fsdp_dtensor"


def _as_metadata(found: Any, path: Path) -> Metadata:
    """Metadata from what was unpickled, which may be an object of a class derived from it."""
    if isinstance(found, Foreign) and "state_dict_metadata" in vars(found):
        metadata = Metadata(vars(found)["state_dict_metadata"])
        vars(metadata).update(vars(found))
        found = metadata
    if not isinstance(found, Metadata) or not isinstance(vars(found).get("state_dict_metadata"), dict):
        raise DamagedCheckpoint(f"{path}: expected checkpoint metadata; got {type(found).__name__}.")
    places = vars(found).get("storage_data")
    if not isinstance(places, dict) or not all(isinstance(index, MetadataIndex) for index in places):
        raise DamagedCheckpoint(f"{path}: expected the places of its items; got {type(places).__name__}.")
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            raise DamagedCheckpoint(f"{path}: expected {key!r} to be a tensor or an object; its entry is damaged.")
    return found


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return False
    try:
        if not isinstance(entry.properties.dtype, torch.dtype):
            return False
        sizes = [entry.size, *(part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes))]
    except (AttributeError, TypeError):
        return False
    return all(isinstance(s, tuple) and len(s) == len(entry.size) and min(s, default=0) >= 0 for s in sizes)


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return all(0 <= o <= o + n <= size for o, n, size in zip(box.offsets, box.sizes, shape, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if that is nothing."""
    low = tuple(map(max, a.offsets, b.offsets))
    high = tuple(min(p + n, q + m) for p, n, q, m in zip(*a, *b, strict=True)) if a.offsets else ()
    sizes = tuple(h - o for o, h in zip(low, high, strict=True))
    return Box(low, sizes) if min(sizes, default=1) > 0 else None


def untiled(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """How boxes fail to cover a tensor exactly once; empty if they do."""
    boxes = [box for box in boxes if 0 not in box.sizes]
    for box in boxes:
        if not _inside(box, shape):
            return f"one, {box}, is not inside {shape}"
    # Along the first dimension, only those that have not ended can overlap with the next.
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [o for o in open_boxes if not o.offsets or o.offsets[0] + o.sizes[0] > box.offsets[0]]
        if any(intersection(o, box) for o in open_boxes):
            return f"one, {box}, overlaps with another"
        open_boxes.append(box)
    covered, wanted = sum(math.prod(box.sizes) for box in boxes), math.prod(shape)
    return "" if covered == wanted else f"they have {covered} of {wanted} elements"


def _relative(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(o - q for o, q in zip(box.offsets, origin, strict=True)), box.sizes)


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - q, o - q + n) for o, q, n in zip(box.offsets, origin, box.sizes, strict=True))


def _fetch(file: IO[bytes], stored: StoredChunk, box: Box, target: torch.Tensor) -> None:
    """Read a part of a chunk into a tensor of its shape."""
    first = stored.offset + sum(o * s for o, s in zip(box.offsets, stored.stride, strict=True))
    run = _Run(file, stored.start, stored.dtype.itemsize)
    kept = [d for d, size in enumerate(box.sizes) if size > 1]
    stride = tuple(stored.stride[d] for d in kept)
    run.read(first, stride, target.view(_MOVERS[run.itemsize]).squeeze())


class _Run(NamedTuple):
    """A file of elements of ``itemsize`` bytes that begins at byte ``start``."""

    file: IO[bytes]
    start: int
    itemsize: int

    def read(self, first: int, stride: tuple[int, ...], target: torch.Tensor) -> None:
        """Read the elements that lie ``stride`` apart, from element ``first`` on, into a tensor of their shape."""
        span = 1 + sum((n - 1) * s for n, s in zip(target.shape, stride, strict=True))
        if target.is_contiguous() and stride == target.stride():
            self._into(first, target)
        elif span * self.itemsize <= _SCRATCH:
            scratch = torch.empty(span, dtype=target.dtype)
            self._into(first, scratch)
            target.copy_(scratch.as_strided(target.shape, stride))
        else:
            self._in_parts(first, stride, target)

    def _in_parts(self, first: int, stride: tuple[int, ...], target: torch.Tensor) -> None:
        dim = max(range(len(stride)), key=stride.__getitem__)
        inner = 1 + sum((n - 1) * s for d, (n, s) in enumerate(zip(target.shape, stride, strict=True)) if d != dim)
        count = max((_SCRATCH // self.itemsize - inner) // max(stride[dim], 1) + 1, 1)
        if (stride[dim] - inner) * self.itemsize >= _GAP:
            count = 1
        for start in range(0, target.shape[dim], count):
            part = target.narrow(dim, start, min(count, target.shape[dim] - start))
            rest = stride
            if part.shape[dim] == 1:
                part, rest = part.squeeze(dim), (*stride[:dim], *stride[dim + 1 :])
            self.read(first + start * stride[dim], rest, part)

    def _into(self, first: int, target: torch.Tensor) -> None:
        view, offset = memory(target), self.start + first * self.itemsize
        while view:
            count = os.preadv(self.file.fileno(), [view], offset)
            if not count:
                raise DamagedCheckpoint(f"{self.file.name}: expected {len(view)} bytes at {offset}; got its end.")
            view, offset = view[count:], offset + count


def _window(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """A part of a file, as a file of its own; it is not closed with it."""
    return io.BufferedReader(_Window(file.fileno(), offset, length))


class _Window(io.RawIOBase):
    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)[: max(self._length - self._position, 0)]
        count = os.preadv(self._descriptor, [view], self._offset + self._position) if view else 0
        self._position += count
        return count
