"""Asynchronous execution with one interface for CUDA and CPU: a stream runs tasks in order, in parallel with compute.

On CUDA, a stream is a CUDA stream, and a handle is an event on it. On CPU, a stream is a thread with a queue, and a
handle is set when the thread has run the task. Both keep one order: a task starts after all earlier tasks. A task may
therefore use memory that an earlier task frees, and collectives are sent in the order in which they were issued.

A thread was chosen over the ``Work`` of an asynchronous collective for two reasons. A ``Work`` cannot delay the
allocation of the next buffer until the previous one is free, and a thread also moves the casts, copies and sums around
a collective off the computing thread.
"""

import atexit
import contextlib
import ctypes
import logging
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import is_on_host, moves_data, runs_ahead, simulation
from megatron.fsdp.comm.process_groups import new_group, refuse_forks, timeout_of

logger = logging.getLogger(__name__)

Task = Callable[[], None]

# Time limits for communication in flight, which may never end, when the process or its process groups end.
SECONDS_TO_END = 10.0
SECONDS_TO_END_AFTER_ERRORS = 1.0
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Handle(ABC):
    """A task of a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Make later compute wait for the task. On CPU, raise the task's exception if it raised one."""

    @property
    def done(self) -> bool:
        """False if an exception interrupted :meth:`wait` too early. The caller can then wait again."""
        return True

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the task has ended, with or without an exception. Does not wait."""

    def watcher(self) -> Callable[[], bool]:
        """Return a function that returns whether the task has ended or the handle has been dropped.

        The function does not hold the handle: a handle with an unraised exception keeps the task's tensors alive.
        """
        reference = weakref.ref(self)
        return lambda: (handle := reference()) is None or handle.ended


class Stream(ABC):
    """Runs tasks in order, in parallel with compute.

    A task may read memory that compute has allocated. Compute then keeps a reference until it has waited for the task.
    ``record_stream`` would allow it to drop the tensor at once, but the allocator frees such memory only when the host
    sees that the device has run the task. A host that runs ahead of the device would allocate without bound.
    """

    @abstractmethod
    def run(self, task: Task) -> Handle:
        """Run ``task`` after the compute issued so far and after all earlier tasks."""

    def join(self) -> None:
        """Make later compute wait for all tasks that were issued."""
        # Recording an event is not enough. While a CUDA graph is captured, the stream may have been idle. Compute can
        # only wait for it once it has joined the capture, by the wait for compute with which every task starts.
        self.run(_nothing).wait()

    def follow(self) -> None:
        """Before memory of the stream is freed: let its next user come after the compute issued so far.

        The next task would. The allocator is earlier: for an allocation that fails, it waits for this stream alone and
        then unmaps its free memory (``expandable_segments``), and a task may be given from another stream of compute.
        On CPU, compute is synchronous.
        """
        _nothing()

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The process group, with the ranks of ``group``, that tasks must use: that one, unless threads share it.

        NCCL runs the collectives of one communicator in the order in which they are issued, whatever their streams.
        """
        return group

    def finish(self) -> bool:
        """Wait for all tasks for a limited time, and return whether they have ended, as when ``run`` runs them."""
        return True


class CollectiveMismatch(RuntimeError):
    """Ranks have issued different collectives, so this rank would wait forever."""


# The proof that ranks disagree, so that no collective can end; else empty. Set by the watchdog, read by all waits.
_mismatch: list[str] = []


def fail_all_waits(reason: str) -> None:
    """Make every wait on the host, in progress or later, raise :class:`CollectiveMismatch` with ``reason``."""
    _mismatch[:] = [reason]


def raise_if_ranks_disagree() -> None:
    """End a wait on the host if :func:`fail_all_waits` was called."""
    if _mismatch:
        raise CollectiveMismatch(_mismatch[0])


def wait_for(work: dist.Work, group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for a collective that was started with ``async_op=True``. :func:`fail_all_waits` ends a wait on the host.

    Args:
        work: The collective.
        group: Its ranks.
        device: The device of its tensors.
    """
    pause = 0.0
    while not runs_ahead(device) and moves_data(group) and not work.is_completed():
        raise_if_ranks_disagree()
        time.sleep(pause)
        pause = min(pause + 1e-5, 0.01)
    work.wait()


class _CpuHandle(Handle):
    """Set by the stream's thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait_for_end(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds, and return whether the task has ended."""
        return self._done.wait(timeout)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def ended(self) -> bool:
        return self.done

    def watcher(self) -> Callable[[], bool]:
        """A dropped handle does not count as ended: other ranks may wait for the task."""
        return self._done.is_set

    def wait(self) -> None:
        while not self._done.wait(1.0):
            raise_if_ranks_disagree()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback refers to this frame. A reference from the frame to the error would be a cycle,
                # which would keep the task's tensors alive until the garbage collector ran.
                del error


class InlineStream(Stream):
    """Runs tasks synchronously. For the fake backend, which moves no data, so there is nothing to overlap."""

    def run(self, task: Task) -> Handle:
        """Run ``task`` now. What it raises is raised here."""
        with torch.no_grad():
            task()
        handle = _CpuHandle()
        handle.finish(None)
        return handle


class CpuStream(Stream):
    """A thread that runs tasks in order.

    Its collectives use separate process groups. On the caller's groups, their order relative to the collectives that
    the main thread issues there would differ between ranks.

    On the host, compute is synchronous: all earlier compute has run when a task is queued, and later compute waits by
    blocking the main thread.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, _CpuHandle] | None] = queue.SimpleQueue()
        # By ranks and timeout, for all groups of the caller: torch keeps them, and their threads, until the end.
        self._groups: weakref.WeakValueDictionary[tuple[Any, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()
        self._thread: threading.Thread | None = None

    def run(self, task: Task) -> Handle:
        """Queue ``task`` for the thread, which the first task starts."""
        refuse_forks()
        if self._thread is None:
            self._tasks = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._loop, args=(self._tasks,), name="megatron-fsdp-stream", daemon=True
            )
            self._thread.start()
            # The interpreter stops daemon threads at its end. If that happens inside torch's code, the process aborts.
            atexit.register(self.close)
        handle = _CpuHandle()
        self._tasks.put((task, handle))
        return handle

    @staticmethod
    def _loop(tasks: "queue.SimpleQueue[tuple[Task, _CpuHandle] | None]") -> None:
        while True:
            item = tasks.get()
            if item is None:
                return
            task, handle = item
            del item
            error: BaseException | None = None
            try:
                with torch.no_grad():
                    task()
            except BaseException as e:  # noqa: BLE001 - raised in the waiting thread
                error = e
            # While the thread sleeps, its local variables stay alive. A task among them would keep the model alive.
            del task
            handle.finish(error)
            del handle, error

    def close(self) -> None:
        """Run the remaining tasks and end the thread, unless a collective does not end in time."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_seconds_to_end())
            self._thread = None

    def finish(self) -> bool:
        """Wait for the thread. If its task does not end in time, it is abandoned, and the next task starts another."""
        if self._thread is None:
            return True
        handle = self.run(_nothing)
        assert isinstance(handle, _CpuHandle)
        if not handle.wait_for_end(_seconds_to_end()):
            self._thread = None
            return False
        return True

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A group that only this stream uses. The first call for these ranks is a collective of them."""
        if group.size() == 1:
            # Nothing is sent, so the caller's group will do. A new group would be harmful: torch names groups by the
            # number of groups that a rank has created, which must be equal on the ranks of later groups.
            return group
        ranks = dist.get_process_group_ranks(group)
        key = (*ranks, timeout_of(group))
        found = self._groups.get(key)
        if found is None or found not in dist.distributed_c10d._world.pg_map:
            found = self._groups[key] = new_group(ranks, group, "megatron_fsdp")
        return found


class _CudaHandle(Handle):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device
        self._in_capture = torch.cuda.is_current_stream_capturing()
        self._waited = False

    def wait(self) -> None:
        # CUDA refuses a wait across the border of a capture, which needs none: ``torch.cuda.graph`` begins when the
        # device has run everything, and a replay is ordered as a whole by the stream that launches it.
        if torch.cuda.is_current_stream_capturing() == self._in_capture:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._waited = True

    @property
    def done(self) -> bool:
        return self._waited

    @property
    def ended(self) -> bool:
        return self._event.query()

    def watcher(self) -> Callable[[], bool]:
        """The host drops the handle before the device has run the task, so this keeps the event."""
        return self._event.query


class CudaStream(Stream):
    """A CUDA stream.

    Memory that a task allocates belongs to this stream's part of the caching allocator, so only later tasks reuse it.
    Compute may use the memory from its wait for the task (``Handle.wait``) until the stream follows it (:meth:`follow`,
    or the next :meth:`run`) and the memory is freed.

    Compute runs on the current stream of ``device``, which need not be the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, so that a collective's kernels do not queue behind the compute that they overlap.
        self._stream = torch.cuda.Stream(device=device, priority=-1)

    def run(self, task: Task) -> Handle:
        """Launch the kernels of ``task`` on the stream, now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                task()
        except BaseException:
            # Kernels that the task has launched may still use memory that is freed while the exception propagates.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            raise
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaHandle(event, self._device)

    def follow(self) -> None:
        """Wait for the compute issued so far, without a task."""
        # In a capture, whose memory is its own, a stream that is not joined afterwards would be an error.
        if not is_capturing():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> bool:
        """Ask the device until it has run all tasks, for a limited time."""
        end = time.monotonic() + _seconds_to_end()
        while not self._stream.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


_STREAMS: dict[tuple[str, int | None, str], Stream] = {}


def communication_stream(device: torch.device, group: dist.ProcessGroup, name: str = "") -> Stream:
    """Return the stream that all models of this process on ``device`` share, so that their collectives have one order.

    Args:
        device: Device of the collectives.
        group: One of their process groups.
        name: Of the stream, if there are several. On a CPU, the collectives of two streams are ordered only if they use
            different groups.
    """
    if (simulated := simulation()) is not None:
        found: Stream = simulated.stream(name)
        return found
    if is_on_host(device) and not moves_data(group):
        return _STREAMS.setdefault(("fake", None, ""), InlineStream())
    watch_end()
    key = (device.type, device.index, name)
    if key not in _STREAMS:
        _STREAMS[key] = CudaStream(device) if runs_ahead(device) else CpuStream()
    return _STREAMS[key]


def is_capturing() -> bool:
    """True while a CUDA graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def ignore_captures() -> None:
    """Let this thread query events while another thread captures a CUDA graph.

    A capture of the mode "global", the default of ``torch.cuda.graph``, is invalidated by event queries of all threads
    that have this mode, too. The driver keeps a mode for each thread (``cuThreadExchangeStreamCaptureMode``); torch's
    own watchdog changes it in the same way, but offers no function for it.
    """
    with contextlib.suppress(OSError, AttributeError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def finish_tasks() -> None:
    """Wait for the tasks of all streams, for a limited time. Called when the process groups or the process end."""
    if not all([stream.finish() for stream in _STREAMS.values()]) and not _mismatch:
        logger.warning(
            "FSDP: communication did not end within %.0f s and is abandoned. Another rank has failed, or it runs other "
            "units.",
            _seconds_to_end(),
        )


def _seconds_to_end() -> float:
    if _mismatch:
        return 0.0
    return SECONDS_TO_END if error_at_end() is None else SECONDS_TO_END_AFTER_ERRORS


def error_at_end() -> BaseException | None:
    """The exception that ends the process or its process groups; None if they end without one."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def _nothing() -> None:
    pass


_at_end: list[Callable[[], None]] = [finish_tasks]


def at_end(function: Callable[[], None]) -> None:
    """Call ``function`` when the process groups or the process end. It may use the store, and must not take long."""
    if function not in _at_end:
        _at_end.append(function)
        atexit.register(function)


def watch_end() -> None:
    """Finish all tasks, and call the functions of :func:`at_end`, before torch destroys the process groups.

    Other ranks may need tasks that this rank does not wait for, such as unshards of layers that only this rank has
    skipped. Such a task would fail once torch had destroyed its group.
    """
    # torch finalizes these first. A patch would miss scripts that imported destroy_process_group by name.
    communicators = dist.distributed_c10d._world.comms
    if _END not in communicators:
        communicators.append(_END)


class _End:
    """Calls the functions of :func:`at_end` when the process groups end."""

    def finalize(self) -> None:
        """Call the functions. An exception must not prevent the groups from being destroyed."""
        for function in _at_end:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - see above
                logger.warning("FSDP: while the process groups ended: %s", error)
        _mismatch.clear()


_END = _End()
