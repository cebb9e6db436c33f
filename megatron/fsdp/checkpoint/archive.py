"""The zip archives of ``torch.save``: locates the entries of one, and writes one straight from a tensor's memory."""

import ctypes
import io
import pickle
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import torch
from typing_extensions import Buffer

from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint, combine

ALIGNMENT = 64
# From this size on, a second thread computes the checksum while the data is written.
_LARGE = 4 << 20
_PIECE = 8 << 20

_LOCAL = struct.Struct("<4s5H3I2H")


class ArchivedFile(NamedTuple):
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

    def entry(self, name: str) -> ArchivedFile:
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
            return ArchivedFile(offset, info.file_size, info.CRC)

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
    if not tensor.nbytes:
        return memoryview(b"")
    found = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    vars(found)["tensor"] = tensor
    return memoryview(found).cast("B")


class ChecksummedFile(io.RawIOBase):
    """A file that is written front to back, with the checksum of everything that was written.

    Args:
        file: Open for writing.

    Attributes:
        length: Bytes written so far.
        crc32: Their CRC-32.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.length, self.crc32 = 0, 0
        self._file, self._start = file, 0

    def write(self, data: Buffer) -> int:
        """Write data completely."""
        view = memoryview(data).cast("B")
        if len(view) >= _LARGE:
            self.append(view)
        else:
            self.crc32 = zlib.crc32(view, self.crc32)
            self._write(view)
        return len(view)

    def append(self, data: memoryview) -> int:
        """Write data completely and return its own CRC-32."""
        if len(data) < _LARGE:
            crc32 = zlib.crc32(data)
            self._write(data)
        else:
            # Writing and computing the checksum both release the GIL, so they run in parallel.
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(zlib.crc32(data)))
            thread.start()
            try:
                self._write(data)
            finally:
                thread.join()
            (crc32,) = found
        self.crc32 = combine(self.crc32, crc32, len(data))
        return crc32

    def _write(self, data: memoryview) -> None:
        self.length += len(data)
        while data:
            data = data[self._file.write(data) :]

    def tell(self) -> int:
        """The position in the archive that is being written; ``zipfile`` counts from its beginning."""
        return self.length - self._start

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write a tensor in the format of ``torch.save``, straight from the tensor's memory.

        Only the tensor's elements are written, even if it is a view of a larger storage. ``torch.save`` itself would
        take a fifth longer, because it computes the elements' checksum before it writes them.

        Args:
            tensor: Contiguous, on the CPU.

        Raises:
            ValueError: The tensor is not contiguous or not on the CPU.
        """
        elements, self._start = memory(tensor), self.length
        large = len(elements) >= zipfile.ZIP64_LIMIT
        with zipfile.ZipFile(self, "w") as archive:
            for name, text in (("data.pkl", _pickled(tensor)), ("byteorder", sys.byteorder), ("version", "3\n")):
                archive.writestr(zipfile.ZipInfo(f"archive/{name}"), text)
            info = zipfile.ZipInfo("archive/data/0")
            # As torch.save pads, so that torch.load(mmap=True) gets aligned tensors.
            gap = -(self.tell() + _LOCAL.size + len(info.filename) + 20 * large + 4) % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
            with archive.open(info, "w", force_zip64=large) as file:
                # Its own write would compute the checksum before it writes.
                vars(file).update(_crc=self.append(elements), _file_size=len(elements))


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor as ``torch.save`` does: its storage is the file ``data/0``."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, "0", "cpu", value.nbytes()
        if isinstance(value, torch.storage.TypedStorage):
            return "storage", getattr(torch, value._pickle_storage_type()), "0", "cpu", value._size()
        return None


def _pickled(tensor: torch.Tensor) -> bytes:
    start = tensor.storage_offset() * tensor.itemsize
    # Shares the memory, without the elements of the storage that are not the tensor's.
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    own = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
    stream = io.BytesIO()
    _TensorPickler(stream, protocol=2).dump(own)
    return stream.getvalue()
