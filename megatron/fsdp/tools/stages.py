"""Continues a process once per pipeline stage, so that every stage is examined after a single set-up."""

import os
import pickle
from collections.abc import Iterable
from typing import Any

# Stages that are examined at the same time.
TOGETHER = max(os.cpu_count() or 1, 1)
_exit = os._exit  # which may be replaced while a script runs


class Stages:
    """Forks a child for every other stage. A fork is chosen over new processes, which would import Megatron again.

    Attributes:
        results: What the children sent, by stage; None from one that ended without a result.
    """

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self._pipe: int | None = None

    @property
    def is_child(self) -> bool:
        """Whether this process examines another stage, and must end in :meth:`send`."""
        return self._pipe is not None

    def fork(self, stages: Iterable[int]) -> int | None:
        """Continue in a child for each stage. Returns the child's stage, and None in the parent when all have ended."""
        waiting = list(stages)
        while waiting:
            batch, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
            children = []
            for stage in batch:
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(read)
                    self._pipe = write
                    return stage
                os.close(write)
                children.append((stage, pid, read))
            for stage, pid, read in children:
                with os.fdopen(read, "rb") as pipe:
                    sent = pipe.read()
                os.waitpid(pid, 0)
                self.results[stage] = pickle.loads(sent) if sent else None
        return None

    def send(self, result: Any) -> None:
        """Send this child's result, and end it."""
        assert self._pipe is not None, "only children send"
        with os.fdopen(self._pipe, "wb") as pipe:
            pickle.dump(result, pipe)
        _exit(0)
