"""Checksums of a checkpoint's files, and atomic writes."""

import functools
import glob
import hashlib
import json
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron.fsdp.checkpoint.storage import is_remote

NAME = "checksums.json"
METADATA = ".metadata"
ALGORITHM = "crc32"

_BLOCK = 4 << 20
# Age in seconds from which no process still writes a temporary file.
_ABANDONED = 3600.0
# The generator polynomial of CRC-32 in zlib's bit order: the lowest power is the highest bit.
_POLYNOMIAL = 0xEDB88320


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, truncated or altered. The message names the file."""


class FileSum(NamedTuple):
    """The expected size of a file in bytes, and its expected CRC-32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass
class Checksums:
    """Expected sizes and checksums of a checkpoint's files, as stored in ``checksums.json``.

    Attributes:
        files: By name within the folder, without ``.metadata``.
        metadata: Valid CRC-32 values of ``.metadata``: two while a save replaces the file, otherwise one.
        fingerprint: Identifies the sources that the checkpoint was made from; empty if its writer recorded none.
    """

    files: dict[str, FileSum] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    fingerprint: str = ""

    @staticmethod
    def load(folder: Path) -> "Checksums | None":
        """Read the checksums of a folder; None if it has none.

        Raises:
            DamagedCheckpoint: The file exists but is not a valid table of checksums.
        """
        path = folder / NAME
        if not path.exists():
            return None
        found = read_json(path)
        try:
            if found["algorithm"] != ALGORITHM:
                raise DamagedCheckpoint(f"{path}: expected the algorithm {ALGORITHM}; got {found['algorithm']!r}.")
            files = {str(name): FileSum(int(f["bytes"]), str(f["crc32"])) for name, f in found["files"].items()}
            if not all(map(is_inside, files)):
                raise DamagedCheckpoint(f"{path}: expected names of files in this folder; got others.")
            return Checksums(files, [str(value) for value in found["metadata"]], str(found.get("fingerprint", "")))
        except DamagedCheckpoint:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise DamagedCheckpoint(f"{path}: expected a table of checksums; got {error!r}.") from error

    def save(self, folder: Path) -> None:
        """Write the checksums into a folder, atomically."""
        content: dict[str, object] = {
            "algorithm": ALGORITHM,
            "files": {name: entry._asdict() for name, entry in sorted(self.files.items())},
            "metadata": self.metadata,
        }
        if self.fingerprint:
            content["fingerprint"] = self.fingerprint
        write_file(folder / NAME, json.dumps(content, indent=1).encode())

    def check_file(self, folder: Path, name: str) -> None:
        """Compare a file with its expected size and checksum. A file that is not listed passes.

        Raises:
            DamagedCheckpoint: The file is missing, or its size or checksum differs.
        """
        if name not in self.files:
            return
        path, wanted = folder / name, self.files[name]
        size = size_of(path)
        if size != wanted.bytes:
            raise DamagedCheckpoint(f"{path}: expected {wanted.bytes} bytes; got {size}.")
        try:
            found = crc32_of(path)
        except OSError as error:  # another job may have removed the file since its size was read
            raise DamagedCheckpoint(f"{path}: expected {wanted.bytes} bytes; got an error: {error}.") from error
        if found != wanted.crc32:
            raise DamagedCheckpoint(f"{path}: expected the CRC-32 {wanted.crc32}; got {found}.")

    def check_metadata(self, folder: Path, found: str | None = None) -> None:
        """Compare ``.metadata`` with its expected checksum.

        Args:
            folder: Of the checkpoint.
            found: CRC-32 of the contents, if they have been read already. None reads the file.

        Raises:
            DamagedCheckpoint: The file is missing or its checksum differs.
        """
        path = folder / METADATA
        size_of(path)
        found = found or crc32_of(path)
        if found not in self.metadata:
            raise DamagedCheckpoint(f"{path}: expected the CRC-32 {' or '.join(self.metadata)}; got {found}.")


def is_inside(name: str) -> bool:
    """Whether a relative name stays inside the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def size_of(path: Path) -> int:
    """Size of a checkpoint's file in bytes.

    Raises:
        DamagedCheckpoint: The file is missing or is not a regular file. Opening a pipe, for instance, would block.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{path}: expected a file; got none.") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint(f"{path}: expected a file; got a folder or a device.")
    return found.st_size


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint.

    Raises:
        DamagedCheckpoint: The file is missing or is not valid JSON.
    """
    size_of(path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: expected JSON; got {error}.") from error


def crc32_of(path: Path) -> str:
    """CRC-32 of a file as eight hexadecimal digits."""
    crc, buffer = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return as_hex(crc)


def fingerprint(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a folder's files, which changes whenever one of them does."""
    files = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    facts = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def as_hex(crc: int) -> str:
    """Format a CRC-32 as eight hexadecimal digits."""
    return f"{crc:08x}"


def combine(first: int, second: int, length: int) -> int:
    """CRC-32 of a concatenation, from the CRC-32 of its two halves. zlib has this, but Python does not offer it.

    Args:
        first: CRC-32 of the first half.
        second: CRC-32 of the second half.
        length: Bytes in the second half.
    """
    return _product(_power(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """The polynomial x to the power of ``8 * length``, modulo the generator: appending that many zero bits."""
    result, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _product(result, square)
        square = _product(square, square)
        length >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2) modulo the generator; the highest bit is the coefficient of 1."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context whose errors of the file system name the file. Writing to a full disk raises one that does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file atomically: after a crash or power failure, it is either complete or unchanged."""
    if is_remote(path):
        path.write_bytes(data)
        return
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    # Fails if there is such a file or link. Links could lead to files of others.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with naming(path), open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # Only after fsync: otherwise a power failure could leave the new name with no contents.
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):  # by processes that were killed
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _ABANDONED:
                left.unlink()
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make files that were created, renamed or removed in a folder survive a power failure."""
    if is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
