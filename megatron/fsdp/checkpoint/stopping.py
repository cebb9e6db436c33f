"""Stops a run at the end of a step when a signal arrives, and leaves a file that says how the run ended.

A launcher reports success or failure. Whether a run that was told to stop has saved, and should be started again, is in
the first word of :data:`OUTCOME`, next to the checkpoints: ``finished``, ``stopped`` or ``failed``. A run that was
killed leaves no such file.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from megatron.fsdp.checkpoint.coordination import on_any_rank
from megatron.fsdp.checkpoint.storage import as_path, is_remote

logger = logging.getLogger(__name__)

# Name of the file.
OUTCOME = "outcome.txt"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
# Environment variable: a file that a launcher creates at SIGTERM, which may arrive before this process can handle it.
STOP_FILE = "MEGATRON_FSDP_STOP_FILE"
# A launcher may pass on a signal that the scheduler has sent to every process as well. A person is slower.
_SECONDS_BETWEEN = 1.0
# The pipes of all contexts.
_pipes: set[int] = set()


class StopSignals:
    """Context in which SIGTERM and SIGINT do not end the process, but a loop that asks :meth:`stop_requested`.

    ::

        with StopSignals("run") as signals:
            for step in range(first, last):
                train(step)
                if signals.stop_requested():
                    save(step + 1)
                    break

    A launcher that creates the file named by the environment variable ``MEGATRON_FSDP_STOP_FILE`` also stops the run.
    After Ctrl-C (SIGINT), a second one ends the process at once, or within a second while it waits in a collective.
    On exit, the context leaves the file ``outcome.txt`` in the folder, and puts back the earlier handlers. Schedulers
    signal all processes: give a ``DataLoader`` with workers :func:`ignore_stop_signals` as ``worker_init_fn``.

    Args:
        folder: Where the checkpoints are, also on object storage. It is created. None: leave no file.
        signals: Signals that ask the run to stop.

    Raises:
        RuntimeError: On entry, if this is not the process's main thread, which alone can handle signals.
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self._folder = None if folder is None else as_path(folder)
        self._signals = signals
        self._earlier: dict[signal.Signals, Any] = {}
        # The signals that have arrived here, and when the first one did.
        self._received: list[int] = []
        self._since = 0.0
        # Whether all ranks have agreed to stop.
        self._stopping = False
        # Where Python writes signals to: a pipe to the watching thread; and before.
        self._pipe = self._earlier_pipe = -1

    def __enter__(self) -> "StopSignals":
        if self._folder is not None and _rank() == 0:
            forget_outcome(self._folder)
        try:
            for number in dict.fromkeys(self._signals):
                self._earlier[number] = signal.signal(number, self._receive)
        except ValueError as error:
            raise RuntimeError("StopSignals: expected the main thread of a process; got another thread.") from error
        read, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        os.set_blocking(self._pipe, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(read, self._signals), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        if self._folder is None:
            return
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            leave_outcome(self._folder, FAILED, describe(error))
        elif _rank() == 0:
            leave_outcome(self._folder, *((STOPPED, self._names()) if self._stopping else (FINISHED,)))

    def release(self) -> None:
        """Put back the earlier handlers."""
        while self._earlier:
            number, handler = self._earlier.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._earlier_pipe)
            _pipes.discard(self._pipe)
            os.close(self._pipe)  # ends the thread
            self._pipe = -1

    def stop_requested(self) -> bool:
        """Whether any rank has received a signal. A collective, with the same answer on all ranks.

        The host waits for an all-reduce of one integer: ask every few steps if a step takes milliseconds.
        """
        if not self._received and os.path.exists(os.environ.get(STOP_FILE, "")):
            self._received.append(signal.SIGTERM)
        (flag,) = on_any_rank([bool(self._received)])
        if flag and not self._stopping:
            self._stopping = True
            if _rank() == 0:
                logger.warning("%s: stopping after this step.", self._names())
        return flag

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(signal.Signals(number).name for number in self._received)) or "another rank"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._since = self._since or now
        self._received.append(number)
        if _is_second(self._received, now - self._since):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def ignore_stop_signals(worker: int = 0) -> None:
    """Make this process ignore SIGTERM and SIGINT, as ``worker_init_fn`` of a ``DataLoader``.

    The training would otherwise end with an error when its workers do. They end with their loader.

    Args:
        worker: Number of the worker.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _is_second(received: Sequence[int], seconds: float) -> bool:
    """Whether Ctrl-C was pressed twice. torchrun passes on the first one as SIGINT, and the second one as SIGTERM."""
    return signal.SIGINT in received and seconds > _SECONDS_BETWEEN


def _watch(pipe: int, awaited: Sequence[int]) -> None:
    """End the process at a second Ctrl-C while the main thread waits in a collective, where Python runs no handlers."""
    received: list[int] = []
    since = 0.0
    with open(pipe, "rb", buffering=0) as signals:
        while found := signals.read(1):
            if found[0] not in awaited:
                continue
            received.append(found[0])
            since = since or time.monotonic()
            if _is_second(received, time.monotonic() - since):
                time.sleep(_SECONDS_BETWEEN)  # for the handler, which ends it by the signal
                os._exit(128 + found[0])


def _forget_pipe() -> None:
    """In a forked process: its signals are not those of the training."""
    with suppress(ValueError):  # another thread than the main one
        earlier = signal.set_wakeup_fd(-1)
        if earlier not in _pipes:
            signal.set_wakeup_fd(earlier)


os.register_at_fork(after_in_child=_forget_pipe)


def _rank() -> int:
    """This process's rank, also before there is a process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def describe(error: BaseException) -> str:
    """An error in one line, with the rank and its host."""
    # torch's checkpoints collect the errors of all ranks in one.
    failures: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    error = failures.get(_rank(), next(iter(failures.values()), (error,)))[0]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"rank {_rank()} on {socket.gethostname()}: {text}"


def forget_outcome(folder: Path) -> None:
    """Remove the file that an earlier run left."""
    (folder / OUTCOME).unlink(missing_ok=True)


def leave_outcome(folder: Path, outcome: str, reason: str = "") -> None:
    """Write how the run ended, unless a rank has written it before: the first error is the cause of the others."""
    path = folder / OUTCOME
    text = f"{outcome} {reason}".rstrip() + "\n"
    try:
        if is_remote(path):  # cannot be created exclusively: of ranks that fail at once, any may be named
            if not path.exists():
                path.write_bytes(text.encode())
            return
        os.makedirs(folder, exist_ok=True)
        with suppress(FileExistsError), open(path, "x") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:  # a full disk: an empty file would keep other ranks from writing theirs
                path.unlink()
                raise
    except Exception as error:  # noqa: BLE001 - must not hide how the run really ended
        logger.warning("%s: cannot write how the run ended (%s): %s", path, error, outcome)
