"""Checksums of a checkpoint's files, and files that are written whole or not at all."""

import functools
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

NAME = "checksums.json"
METADATA = ".metadata"
ALGORITHM = "crc32"

_BLOCK = 4 << 20
# The polynomial of CRC-32, lowest power first, as zlib has it.
_POLYNOMIAL = 0xEDB88320


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, too short, altered, or not what it should be. The message names it."""


class FileSum(NamedTuple):
    """What a file should be: its size in bytes and its CRC-32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass
class Checksums:
    """What the files of a checkpoint should be.

    Attributes:
        files: By name within the folder, without ``.metadata``.
        metadata: CRC-32 values of ``.metadata`` that are right. There are two while a save replaces it.
        fingerprint: Tells what the checkpoint was made of; empty if its writer did not say.
    """

    files: dict[str, FileSum] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    fingerprint: str = ""

    @staticmethod
    def load(folder: Path) -> "Checksums | None":
        """The checksums that lie in a folder; None if it has none.

        Raises:
            DamagedCheckpoint: The file is there but cannot be understood.
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
                raise DamagedCheckpoint(f"{path}: expected files of this folder; got others.")
            return Checksums(files, [str(value) for value in found["metadata"]], str(found.get("fingerprint", "")))
        except DamagedCheckpoint:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise DamagedCheckpoint(f"{path}: expected a table of checksums; got no {error}.") from error

    def save(self, folder: Path) -> None:
        """Write them into a folder, atomically."""
        content: dict[str, object] = {
            "algorithm": ALGORITHM,
            "files": {name: entry._asdict() for name, entry in sorted(self.files.items())},
            "metadata": self.metadata,
        }
        if self.fingerprint:
            content["fingerprint"] = self.fingerprint
        write_file(folder / NAME, json.dumps(content, indent=1).encode())

    def check_file(self, folder: Path, name: str) -> None:
        """Compare a file with what it should be. A file that is not listed is not checked.

        Raises:
            DamagedCheckpoint: It is missing, has another size or another checksum.
        """
        if name not in self.files:
            return
        path, wanted = folder / name, self.files[name]
        size = size_of(path)
        if size != wanted.bytes:
            raise DamagedCheckpoint(f"{path}: expected {wanted.bytes} bytes; got {size}.")
        found = crc32_of(path)
        if found != wanted.crc32:
            raise DamagedCheckpoint(f"{path}: expected the CRC-32 {wanted.crc32}; got {found}.")

    def check_metadata(self, folder: Path, found: str | None = None) -> None:
        """Compare ``.metadata`` with what it should be.

        Args:
            folder: Of the checkpoint.
            found: CRC-32 of what was read of it. None: it is read for that.

        Raises:
            DamagedCheckpoint: It is missing or has another checksum.
        """
        path = folder / METADATA
        size_of(path)
        found = found or crc32_of(path)
        if found not in self.metadata:
            raise DamagedCheckpoint(f"{path}: expected the CRC-32 {' or '.join(self.metadata)}; got {found}.")


def is_inside(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is looked for in, or in one inside it."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def size_of(path: Path) -> int:
    """Size of a checkpoint's file in bytes.

    Raises:
        DamagedCheckpoint: It is missing, or no file: a folder, or a pipe, which would be waited for.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpoint(f"{path}: expected a file; got none.") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint(f"{path}: expected a file; got a folder or a device.")
    return found.st_size


def read_json(path: Path) -> Any:
    """What a JSON file of a checkpoint says.

    Raises:
        DamagedCheckpoint: It is missing, or says nothing that can be understood.
    """
    size_of(path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: expected JSON; got {error}.") from error


def crc32_of(path: Path) -> str:
    """CRC-32 of a file as eight hexadecimal digits; reads it in blocks."""
    crc = 0
    for block in _blocks_of(path):
        crc = zlib.crc32(block, crc)
    return as_hex(crc)


def _blocks_of(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def as_hex(crc: int) -> str:
    """A CRC-32 as eight hexadecimal digits."""
    return f"{crc:08x}"


def combine(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces of data, one after the other, from their own.

    Args:
        first: CRC-32 of the first piece.
        second: CRC-32 of the second piece.
        length: Bytes of the second piece.
    """
    return _product(_power(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """The polynomial x to the power of 8 times ``length``."""
    result, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _product(result, square)
        square = _product(square, square)
        length >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo that of CRC-32; the highest bit is the coefficient of 1."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, whatever happens meanwhile; it replaces one of its name."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileSum]:
    """Write several files as :func:`write_file` does and return their checksums."""
    for name, data in files.items():
        write_file(folder / name, data)
    return {name: FileSum(len(data), as_hex(zlib.crc32(data))) for name, data in files.items()}


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
