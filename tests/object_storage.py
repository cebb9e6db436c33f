"""Object storage for tests: an S3 server (moto) in a process of its own, and fakes in memory for other kinds."""

import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

BUCKET = "s3://bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start a server with an empty bucket; yields the environment variables that lead to it, which are set."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    from megatron.fsdp.checkpoint import storage

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{found.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    variables = {**keys, "AWS_ENDPOINT_URL": address}
    command = [sys.executable, "-m", "moto.server", "-p", address.rpartition(":")[2]]
    with patch.dict(os.environ, variables), subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(address, timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            storage._file_system.cache_clear()
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET.removeprefix("s3://"))
            yield variables
        finally:
            storage._file_system.cache_clear()
            server.kill()


@contextmanager
def fake_storage(scheme: str) -> Iterator[None]:
    """Make ``scheme://`` a store in this process's memory. It shows nothing about a real one but the calls."""
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    from megatron.fsdp.checkpoint import storage

    class Upload(io.IOBase):
        """As multistorageclient's ObjectFile: an object when it is closed, which its destructor does, too."""

        def __init__(self, fs: MemoryFileSystem, path: str) -> None:
            self._fs, self._path, self._file = fs, path, io.BytesIO()

        @property
        def closed(self) -> bool:
            return self._file.closed

        def write(self, data: bytes) -> int:
            return self._file.write(data)

        def tell(self) -> int:
            return self._file.tell()

        def discard(self) -> None:
            pass

        def close(self) -> None:
            if not self.closed:
                MemoryFile(self._fs, self._path, self._file.getvalue()).commit()
                self._file.close()

    class Fake(MemoryFileSystem):
        protocol = scheme
        store: dict = {}
        pseudo_dirs = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return MemoryFileSystem._strip_protocol(path.removeprefix(f"{scheme}://"))

        def _open(self, path: str, mode: str = "rb", **others: Any) -> Any:
            whole = scheme != "msc" or mode != "wb" or "data" in others  # with data: pipe_file
            return super()._open(path, mode, **others) if whole else Upload(self, path)

    with patch.dict(sys.modules["fsspec.registry"].__dict__["_registry"], {scheme: Fake}):
        storage._file_system.cache_clear()
        yield
    storage._file_system.cache_clear()
