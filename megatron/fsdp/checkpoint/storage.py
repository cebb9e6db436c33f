"""Checkpoints on object storage: addresses such as ``s3://bucket/run`` as paths, through fsspec.

The rest of the package uses paths. A :class:`RemotePath` has those methods of ``pathlib.Path`` that it needs. An object
appears when it is complete, and not before, so a write needs no temporary name, and nothing has to be renamed.
"""

import functools
import importlib
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

# The beginning of an address on object storage, also as a Path has it.
REMOTE = re.compile("([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
# What to install for each kind of address.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "msc": "multi-storage-client"}


class _Status(NamedTuple):
    st_size: int
    st_mode: int
    st_mtime_ns: int


@functools.cache
def _file_system(scheme: str, process: int) -> Any:
    # One for each process: the connections and threads of another cannot be used after a fork.
    package = PACKAGES.get(scheme)
    if package is None:
        raise NotImplementedError(f"{scheme}://: expected one of {', '.join(f'{each}://' for each in PACKAGES)}.")
    try:
        fsspec = importlib.import_module("fsspec")
        # Listings that are remembered would hide what other ranks and jobs write.
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ImportError(f"{scheme}:// needs the packages fsspec and {package}: pip install {package}") from error


def problem_of(address: Any) -> str:
    """Why nothing can be saved at or loaded from an address; empty for one that works, and for a file system's."""
    found = REMOTE.match(str(address))
    try:
        if found is not None:
            _file_system(found[1].lower(), os.getpid())
    except (ImportError, NotImplementedError) as error:
        return str(error)
    return ""


def as_path(address: Any) -> Path:
    """The folder or file at an address: a ``Path``, or a :class:`RemotePath` in the place of one.

    Raises:
        ImportError: A package is missing. The message says which.
        NotImplementedError: There is no such kind of address.
    """
    text = str(address)
    found = REMOTE.match(text)
    return Path(address) if found is None else cast(Path, RemotePath(found[1].lower(), text[found.end() :]))


class RemotePath:
    """A file or folder on object storage, in the place of a ``Path``. It asks the storage each time.

    Args:
        scheme: Such as ``s3``.
        key: Bucket and name, without slashes at the ends.
    """

    def __init__(self, scheme: str, key: str) -> None:
        self._scheme, self._key = scheme, key.strip("/")
        self._fs  # noqa: B018 - raises early if a package is missing

    @property
    def _fs(self) -> Any:
        return _file_system(self._scheme, os.getpid())

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    __fspath__ = __str__

    def __reduce__(self) -> tuple:
        return RemotePath, (self._scheme, self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: "RemotePath") -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self._scheme, f"{self._key}/{name}")

    joinpath = __truediv__

    @property
    def name(self) -> str:
        """The last part."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self._scheme, self._key.rpartition("/")[0])

    def with_name(self, name: str) -> "RemotePath":
        """Another name in the same folder."""
        return self.parent / name

    # Looking ---------------------------------------------------------------------------------------------------

    def _info(self) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            return dict(self._fs.info(str(self)))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is an object, or there are objects below."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is an object."""
        return (self._info() or {}).get("type") == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return (self._info() or {}).get("type") == "directory"

    def is_symlink(self) -> bool:
        """False."""
        return False

    def stat(self) -> _Status:
        """Size in bytes, kind, and time of the last change, as far as the storage tells it.

        Raises:
            FileNotFoundError: There is nothing.
        """
        found = self._info()
        if found is None:
            raise FileNotFoundError(f"{self}: expected an object; got none.")
        changed: Any = found.get("LastModified") or found.get("mtime") or found.get("created")
        seconds = changed.timestamp() if hasattr(changed, "timestamp") else float(changed or 0)
        kind = stat.S_IFREG if found["type"] == "file" else stat.S_IFDIR
        return _Status(int(found["size"] or 0), kind, int(seconds * 1e9))

    def iterdir(self) -> Iterator["RemotePath"]:
        """The files and folders in this folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(str(self), detail=False)
        except FileNotFoundError:
            found = []
        names = dict.fromkeys(each.rstrip("/").rpartition("/")[2] for each in found)
        yield from (self / name for name in names if name and name != self.name)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Those of a pattern, directly in this folder."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    # Reading and writing ---------------------------------------------------------------------------------------

    def open(self, mode: str = "r", *unused: Any, **also_unused: Any) -> IO[Any]:
        """Open the object. One that is written appears when it is closed."""
        return cast(IO[Any], self._fs.open(str(self), mode))

    def read_bytes(self) -> bytes:
        """The contents."""
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self) -> str:
        """The contents."""
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> None:
        """Write or replace the object, at once."""
        self._fs.pipe_file(str(self), data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        try:
            self._fs.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self) -> None:
        """Remove what is below: first what makes a folder a checkpoint, so that none of a part is left."""
        for path in sorted(self.iterdir(), key=lambda path: path.name != ".metadata"):
            path.rmtree() if path.is_dir() else path.unlink()

    def mkdir(self, *unused: Any, **also_unused: Any) -> None:
        """Nothing: a folder exists if there is an object below."""


def is_remote(path: Any) -> bool:
    """Whether a path is on object storage."""
    return isinstance(path, RemotePath)


def read_at(file: IO[bytes], buffer: memoryview, offset: int) -> int:
    """Read into a buffer from a position of a file, which stays where it is if it is local; return the bytes read."""
    if isinstance(file, io.FileIO):
        return os.preadv(file.fileno(), [buffer], offset)
    file.seek(offset)
    return int(cast(Any, file).readinto(buffer))


@contextmanager
def writing(path: Path, buffer: int) -> Iterator[IO[bytes]]:
    """Context with a file to write. On object storage, nothing appears if the context ends with an error."""
    if not is_remote(path):
        with open(path, "wb", buffer) as file:
            yield file
        return
    upload: Any = path.open("wb")
    try:
        yield upload
    except BaseException:
        # Closing it would complete the upload of a part, as its destructor does unless it is closed.
        upload.discard()
        if hasattr(upload, "_file"):  # of msc: discard() does nothing to an object, which is closed if this buffer is
            upload._file.close()
        with suppress(AttributeError):  # files in memory, and of msc
            upload.closed = True
        raise
    upload.close()
