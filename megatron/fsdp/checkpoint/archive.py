"""The zip archives of ``torch.save``: locates the entries of one, and writes one straight from a tensor's memory."""

import ctypes
import io
import pickle
import struct
import sys
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint, combine

ALIGNMENT = 64
# From this size on, a second thread computes the checksum while the data is written.
_LARGE = 4 << 20
_PIECE = 8 << 20

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_DATE = 0x21  # the first day of 1980, the earliest that the format can express
_FULL = 0xFFFFFFFF
_SIZES_FOLLOW = 1 << 3


class Entry(NamedTuple):
    """A file in the archive: the offset of its first byte, its size in bytes and its CRC-32."""

    offset: int
    size: int
    crc32: int


class Archive:
    """A zip archive that ``torch.save`` wrote, open for reading.

    Args:
        stream: Seekable stream that holds exactly the archive.
        source: Its name in error messages.

    Raises:
        DamagedCheckpoint: The stream is not such an archive.
    """

    def __init__(self, stream: IO[bytes], source: str) -> None:
        self.source = source
        self._stream = stream
        with _damage(source):
            self._zip = zipfile.ZipFile(stream)
            self._end, names = stream.seek(0, io.SEEK_END), self._zip.namelist()
            if not names:
                raise ValueError("it is empty")
            if sum(info.compress_size for info in self._zip.infolist()) > self._end:
                raise ValueError("its files overlap")
            self._prefix = names[0].partition("/")[0] + "/"
        order = self.read("byteorder").decode("latin-1") if f"{self._prefix}byteorder" in names else sys.byteorder
        if order != sys.byteorder:
            raise NotImplementedError(f"{source}: expected {sys.byteorder} endian data; got {order!r}.")

    def read(self, name: str) -> bytes:
        """Read a small file and verify its checksum.

        Raises:
            DamagedCheckpoint: The file is missing, damaged or compressed.
        """
        self.entry(name)
        with _damage(self.source):
            return self._zip.read(self._prefix + name)

    def entry(self, name: str) -> Entry:
        """Locate a file.

        Raises:
            DamagedCheckpoint: The file is missing, damaged or compressed.
        """
        with _damage(self.source):
            info = self._zip.getinfo(self._prefix + name)
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise ValueError(f"{name} is compressed or encrypted")
            # The table of contents gives the header's offset only. Name and padding follow the header, and their
            # lengths may differ from those in the table.
            self._stream.seek(info.header_offset)
            fields = _LOCAL.unpack(self._stream.read(_LOCAL.size))
            if fields[0] != b"PK\3\4":
                raise ValueError(f"{name} has no header")
            offset = info.header_offset + _LOCAL.size + fields[-2] + fields[-1]
            if offset + info.file_size > self._end:
                raise ValueError(f"{name} is cut off")
            return Entry(offset, info.file_size, info.CRC)

    def check(self) -> None:
        """Compare the contents of every file with its checksum.

        Raises:
            DamagedCheckpoint: A file is damaged or compressed.
        """
        for name in self._zip.namelist():
            entry, crc = self.entry(name.removeprefix(self._prefix)), 0
            self._stream.seek(entry.offset)
            for start in range(0, entry.size, _PIECE):
                crc = zlib.crc32(self._stream.read(min(_PIECE, entry.size - start)), crc)
            if crc != entry.crc32:
                raise DamagedCheckpoint(
                    f"{self.source}: expected a file of torch.save; {name.removeprefix(self._prefix)} does not match "
                    "its CRC-32."
                )

    def storage(self, key: str) -> torch.UntypedStorage:
        """Read a tensor's storage and verify its checksum.

        Raises:
            DamagedCheckpoint: The storage is missing or damaged.
        """
        entry = self.entry(f"data/{key}")
        data = torch.empty(entry.size, dtype=torch.uint8)
        view = memory(data)
        # zipfile copies what it reads; in pieces, so that a large storage is not held twice. It compares the checksum
        # when the last piece has been read.
        with _damage(self.source), self._zip.open(f"{self._prefix}data/{key}") as file:
            while piece := file.read(_PIECE):
                view[: len(piece)] = piece
                view = view[len(piece) :]
        return data.untyped_storage()


@contextmanager
def _damage(source: str) -> Iterator[None]:
    """Turn the errors that a damaged archive causes into DamagedCheckpoint."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, KeyError, RuntimeError) as error:
        text = error.args[0] if error.args else type(error).__name__
        raise DamagedCheckpoint(f"{source}: expected a file of torch.save; reading it failed: {text}.") from error


def memory(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor. The view shares the memory and keeps the tensor alive.

    Raises:
        ValueError: The tensor is not contiguous or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor on the CPU; got {tensor.stride()} on {tensor.device}.")
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(b"")
    found = (ctypes.c_char * size).from_address(tensor.data_ptr())
    vars(found)["tensor"] = tensor
    return memoryview(found).cast("B")


class Written(NamedTuple):
    """Length in bytes and CRC-32 of data that was written."""

    length: int
    crc32: int

    def then(self, other: "Written") -> "Written":
        """Length and CRC-32 of this data followed by other data."""
        return Written(self.length + other.length, combine(self.crc32, other.crc32, other.length))


def write(file: IO[bytes], data: bytes | memoryview) -> Written:
    """Write data completely and compute its checksum meanwhile.

    Args:
        file: Open for writing; an unbuffered file saves a copy.
        data: Bytes, or a one-dimensional view of bytes.
    """
    if len(data) < _LARGE:
        _write_all(file, data)
        return Written(len(data), zlib.crc32(data))
    # Writing and computing the checksum both release the GIL, so they run in parallel.
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(zlib.crc32(data)))
    thread.start()
    try:
        _write_all(file, data)
    finally:
        thread.join()
    return Written(len(data), found[0])


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_tensor(file: IO[bytes], tensor: torch.Tensor) -> Written:
    """Write a tensor in the format of ``torch.save`` at the file's position, straight from the tensor's memory.

    Only the tensor's elements are written, even if it is a view of a larger storage.

    Args:
        file: Open for writing; an unbuffered file saves a copy.
        tensor: Contiguous, on the CPU.

    Raises:
        ValueError: The tensor is not contiguous or not on the CPU.
    """
    elements = memory(tensor)
    writer = _Writer(file)
    writer.add("data.pkl", _pickled(tensor))
    writer.add("byteorder", sys.byteorder.encode())
    writer.add("version", b"3\n")
    writer.add("data/0", elements, aligned=True)
    return writer.finish()


class _Writer:
    """Writes an archive front to back. It never seeks, so headers cannot hold checksums of data that follows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._written = Written(0, 0)
        self._central: list[bytes] = []

    def _put(self, data: bytes | memoryview) -> int:
        """Append data and return its CRC-32."""
        written = write(self._file, data)
        self._written = self._written.then(written)
        return written.crc32

    def add(self, name: str, data: bytes | memoryview, aligned: bool = False) -> None:
        """Append a file. If ``aligned``, its first byte is at a multiple of ``ALIGNMENT`` bytes."""
        start, path, size = self._written.length, f"archive/{name}".encode(), len(data)
        large = size >= _FULL
        extra = struct.pack("<2H2Q", 1, 16, 0, 0) if large else b""
        if aligned:
            # As torch.save pads, so that torch.load(mmap=True) gets aligned tensors.
            gap = -(start + _LOCAL.size + len(path) + len(extra) + 4) % ALIGNMENT
            extra += struct.pack("<2s1H", b"FB", gap) + b"Z" * gap
        # Checksum and sizes follow the data, because the checksum is computed while the data is written.
        version = 45 if large else 20
        fields = (version, _SIZES_FOLLOW, 0, 0, _DATE)
        self._put(_LOCAL.pack(b"PK\3\4", *fields, 0, 0, 0, len(path), len(extra)) + path + extra)
        crc = self._put(data)
        self._put(b"PK\7\x08" + struct.pack("<I2Q" if large else "<3I", crc, size, size))
        sizes = [value for value in (size, size) if large] + [start for start in (start,) if start >= _FULL]
        extra = struct.pack(f"<2H{len(sizes)}Q", 1, 8 * len(sizes), *sizes) if sizes else b""
        short = (min(size, _FULL), min(size, _FULL), len(path), len(extra), 0, 0, 0, 0, min(start, _FULL))
        self._central.append(_CENTRAL.pack(b"PK\1\2", version, *fields, crc, *short) + path + extra)

    def finish(self) -> Written:
        """Append the table of contents."""
        start, count, table = self._written.length, len(self._central), b"".join(self._central)
        size = len(table)
        if start >= _FULL:
            table += _END_64.pack(b"PK\6\6", _END_64.size - 12, 45, 45, 0, 0, count, count, size, start)
            table += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        self._put(table + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(start, _FULL), 0))
        return self._written


class _StorageReference(NamedTuple):
    """Stands for a tensor's storage while the tensor is pickled."""

    kind: type
    numel: int


class _TensorReference:
    """Pickles as a tensor with a storage of its own size, whatever storage the tensor is a view of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        hooks: OrderedDict[str, Any] = OrderedDict()
        layout = (0, tuple(tensor.shape), tensor.stride(), False, hooks)
        name = torch.storage._dtype_to_storage_type_map().get(tensor.dtype)
        if name is None:
            # Newer dtypes have no storage class; torch.save stores them as bytes and names the dtype.
            storage = _StorageReference(torch.UntypedStorage, tensor.numel() * tensor.itemsize)
            return torch._utils._rebuild_tensor_v3, (storage, *layout, tensor.dtype)
        return torch._utils._rebuild_tensor_v2, (_StorageReference(getattr(torch, name), tensor.numel()), *layout)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, "0", "cpu", value.numel) if isinstance(value, _StorageReference) else None


def _pickled(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_TensorReference(tensor))
    return stream.getvalue()
