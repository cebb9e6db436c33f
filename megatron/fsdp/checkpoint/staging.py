"""Folders that several processes fill together, and that get their names once they are complete."""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.fsdp.checkpoint.checksums import METADATA, sync_folder, write_file
from megatron.fsdp.checkpoint.storage import is_remote

# Seconds to wait for another process that makes no progress.
PATIENCE = 600.0
_PLAN = "plan"
# Names that this module and write_file use in the folder.
_OWN = r"plan|.+\.[0-9a-f]+\.tmp"


class Staging:
    """A folder that is filled as ``<path>.partial`` and then renamed to ``path``.

    Processes that share the work each create this with the same arguments except for ``process``. They share a file
    system, and need no other connection. Files that a killed run has completed are used again if the plan is the same.

    Args:
        path: The folder to create. It may exist if it is empty.
        process: Number of this process, from 0.
        plan: Everything that decides the contents of the files, in JSON's types.
        own: Regular expression for the names of the files that are written.

    Attributes:
        partial: The folder's path until it is complete.
        plan: A digest of the plan.
    """

    def __init__(self, path: Path, process: int, plan: Any, own: str) -> None:
        if is_remote(path):  # objects cannot be renamed: the checkpoint is complete with its .metadata
            self.path, self.partial = path, path
        else:
            # A folder cannot be renamed to a link, and "." has no name.
            self.path = path.resolve()
            self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.plan = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        self._process, self._own = process, rf"{own}|{_OWN}"

    def begin(self) -> bool:
        """Let process 0 create the folder, or empty that of another plan; other processes wait for it.

        Returns:
            Whether there is something to write. Process 0 may have completed the folder with what this process had
            written before it was killed.

        Raises:
            FileExistsError: The folder exists and has contents, or is the current one, or the partial one has files of
                others.
            RuntimeError: Process 0 makes no progress.
        """
        path = self.partial / _PLAN

        def planned() -> bool:
            return path.is_file() and path.read_text() == self.plan

        if self._process:
            self._wait(lambda: planned() or self._is_there(), _PLAN)
            return not self._is_there()
        self._require_absent()
        self._require_own()
        if not planned():
            if is_remote(self.partial):
                for left in self.partial.iterdir():
                    left.unlink()
            else:
                shutil.rmtree(self.partial, ignore_errors=True)
                self.partial.mkdir(parents=True)
            write_file(path, self.plan.encode())
        return True

    def wait_for(self, names: Collection[str]) -> None:
        """Wait until all files of these names exist.

        Raises:
            RuntimeError: The processes that write them make no progress.
        """
        for name in names:
            self._wait((self.partial / name).exists, name)

    def finish(self, names: Collection[str]) -> None:
        """Remove all files but these, and give the folder its name.

        Raises:
            FileExistsError: There is such a folder by now.
        """
        for path in self.partial.iterdir():
            if path.name not in names:
                path.unlink()
        if is_remote(self.path):
            return
        sync_folder(self.partial)
        self._require_absent()
        self.partial.rename(self.path)
        sync_folder(self.path.parent)

    def _is_there(self) -> bool:
        if is_remote(self.path):
            return (self.path / METADATA).is_file()
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def _require_absent(self) -> None:
        if not is_remote(self.path) and self.path == Path.cwd():
            raise FileExistsError(
                f"{self.path}: expected a folder other than the current one, which cannot be replaced. Give a new name."
            )
        if self._is_there():
            raise FileExistsError(f"{self.path}: expected no such folder yet, or an empty one; it has contents.")

    def _require_own(self) -> None:
        find = self.partial.iterdir() if is_remote(self.partial) else self.partial.rglob("*")
        left = sorted(find) if self.partial.is_dir() else []
        foreign = [path for path in left if path.is_symlink() or not re.fullmatch(self._own, path.name)]
        if self.partial.is_symlink() or foreign:
            found = f"{foreign[0].name!r} in it" if foreign else "a link"
            raise FileExistsError(
                f"{self.partial}: expected no such folder, or one of an interrupted run; got {found}. Move it away."
            )

    def _wait(self, done: Callable[[], bool], name: str) -> None:
        seen, since = -1, 0.0
        while not done():
            if (now := self._written()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise RuntimeError(
                    f"{self.partial / name}: the process that writes this file made no progress for {PATIENCE:.0f} s."
                )
            time.sleep(0.05)

    def _written(self) -> int:
        """Bytes in all files so far."""
        total = 0
        for path in self.partial.glob("*"):
            with suppress(FileNotFoundError):  # renamed meanwhile
                total += path.stat().st_size
        return total
