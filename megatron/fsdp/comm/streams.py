"""Asynchronous execution, the same on CUDA and on CPU: a stream runs what it is given, in order, beside the compute.

On CUDA a stream is a CUDA stream and a handle is an event on it. On CPU a stream is a thread with a queue and a
handle is set when the thread has run the task. Both keep one order: a task starts after those given before it, so
memory that one task frees is there for the next, and collectives leave in the order in which they were issued.

A thread was chosen over the ``Work`` of an asynchronous collective because a ``Work`` cannot hold back the
allocation of the next buffer until the previous one is free, and because casts, copies and sums around a collective
then leave the computing thread too.
"""

import atexit
import logging
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.fsdp.comm.backends import is_on_host, moves_data, runs_ahead
from megatron.fsdp.comm.process_groups import new_group
from megatron.fsdp.helpers.patches import TORCH, Patch, Patches

logger = logging.getLogger(__name__)

Task = Callable[[], None]

# How long the end of a process, or of its process groups, waits for communication that other ranks may never join.
SECONDS_TO_END = 10.0
SECONDS_TO_END_AFTER_ERRORS = 1.0


class Handle(ABC):
    """A task that was given to a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Make the computation that follows wait for the task. On CPU this raises what the task raised."""

    @property
    def done(self) -> bool:
        """False if an exception ended the waiting and not the task: it can be waited for again."""
        return True

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the task has ended, in whatever way. Does not wait."""

    def watcher(self) -> Callable[[], bool]:
        """Tells whether the task has ended, as long as that matters to anybody; does not keep the handle alive.

        One whose error nobody has asked for would keep alive what its task used.
        """
        reference = weakref.ref(self)
        return lambda: (handle := reference()) is None or handle.ended


class Stream(ABC):
    """Runs tasks in order, beside the compute."""

    @abstractmethod
    def run(self, task: Task) -> Handle:
        """Start ``task`` once the compute issued so far and the tasks given before it are done."""

    @abstractmethod
    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The process group with the ranks of ``group`` that tasks of this stream may use."""

    @abstractmethod
    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Called in a task: keep the memory of ``tensors``, which the compute allocated, until the task is done."""

    @abstractmethod
    def finish(self) -> bool:
        """Wait for all tasks, but not for ever. Returns whether they have ended."""


class _Done(Handle):
    def wait(self) -> None:
        pass

    @property
    def ended(self) -> bool:
        return True


class InlineStream(Stream):
    """Runs a task at once. For process groups that move no data (the fake one), where nothing can overlap."""

    def run(self, task: Task) -> Handle:
        """See :meth:`Stream.run`."""
        with torch.no_grad():
            task()
        return _Done()

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Stream.group`."""
        return group

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """See :meth:`Stream.keep`."""

    def finish(self) -> bool:
        """See :meth:`Stream.finish`."""
        return True


class Disagreement(RuntimeError):
    """Ranks communicate different things, and what this one waits for will never come."""


# Why nothing that is waited for will end any more; empty as long as it may.
_hopeless: list[str] = []


def give_up(reason: str) -> None:
    """Let every wait on the host, now and from now on, raise :class:`Disagreement`."""
    _hopeless[:] = [reason]


class _CpuHandle(Handle):
    """Set by the stream's thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the task ends, in whatever way, within ``timeout`` seconds."""
        return self._done.wait(timeout)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def ended(self) -> bool:
        return self.done

    def watcher(self) -> Callable[[], bool]:
        """See :meth:`Handle.watcher`. A task that nobody waits for has its place in the order all the same."""
        return self._done.is_set

    def wait(self) -> None:
        while not self._done.wait(1.0):
            if _hopeless:
                raise Disagreement(_hopeless[0])
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # The error knows this frame: a frame that knew the error would keep what the task used alive.
                del error


class CpuStream(Stream):
    """A thread that runs tasks in order.

    Its collectives have process groups of their own: were they issued on the caller's, their order relative to the
    collectives that the main thread issues there would differ between ranks.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, _CpuHandle] | None] = queue.SimpleQueue()
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def run(self, task: Task) -> Handle:
        """See :meth:`Stream.run`."""
        if self._thread is None:
            self._tasks = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._loop, args=(self._tasks,), name="megatron-fsdp-stream", daemon=True
            )
            self._thread.start()
            # A thread that the interpreter stops at its end, in the middle of torch's code, takes the process with it.
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
            except BaseException as e:  # noqa: BLE001 - whatever it is, the thread that waits must see it
                error = e
            # The thread sleeps with these names bound: a task that it kept would keep the model alive.
            del task
            handle.finish(error)
            del handle, error

    def close(self) -> None:
        """Run what was given, and end the thread, unless a collective never ends."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_seconds_to_end())
            self._thread = None

    def finish(self) -> bool:
        """See :meth:`Stream.finish`. A thread whose task does not end is left to it; the next task gets another."""
        if self._thread is None:
            return True
        handle = self.run(_nothing)
        assert isinstance(handle, _CpuHandle)
        if not handle.wait_for_end(_seconds_to_end()):
            self._thread = None
            return False
        return True

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Stream.group`. The first call for a group is a collective of its ranks."""
        if group.size() == 1:
            # Nothing is sent; and torch names a new group by how many this rank has, which others may not share.
            return group
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[group] = new_group(ranks, group, "megatron_fsdp")
        return self._groups[group]

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """See :meth:`Stream.keep`. The task's own references keep them."""


class _CudaHandle(Handle):
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    @property
    def ended(self) -> bool:
        return self._event.query()

    def watcher(self) -> Callable[[], bool]:
        """See :meth:`Handle.watcher`. The host waits for nothing, and drops the handle before the task has ended."""
        return self._event.query


class CudaStream(Stream):
    """A CUDA stream.

    Memory that a task allocates belongs to this stream's part of the caching allocator. It is reused by later tasks
    only, each of which first waits for the compute issued before it (:meth:`run`): that wait is what makes it safe
    that the compute, too, reads and writes this memory.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority, so that a collective's kernels do not queue behind the compute that they run beside.
        self._stream = torch.cuda.Stream(device=device, priority=-1)

    def run(self, task: Task) -> Handle:
        """See :meth:`Stream.run`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            task()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaHandle(event)

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Stream.group`. Collectives are issued by the caller's thread, so its own groups are safe."""
        return group

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """See :meth:`Stream.keep`."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def finish(self) -> bool:
        """See :meth:`Stream.finish`."""
        end = time.monotonic() + _seconds_to_end()
        while not self._stream.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


_STREAMS: dict[tuple[str, int | None] | tuple[str, int | None, str], Stream] = {}


def communication_stream(device: torch.device, group: dist.ProcessGroup, second: bool = False) -> Stream:
    """The stream that all collectives of this process on ``device`` share, so that they have one order.

    Args:
        device: Where the collectives run.
        group: One of the groups they use.
        second: Another stream, for collectives on groups that no others use.
    """
    if is_on_host(device) and not moves_data(group):
        return _STREAMS.setdefault(("fake", None), InlineStream())
    watch_end()
    key = (device.type, device.index, "second") if second else (device.type, device.index)
    if key not in _STREAMS:
        _STREAMS[key] = CudaStream(device) if runs_ahead(device) else CpuStream()
    return _STREAMS[key]


def finish_tasks() -> None:
    """Wait for all that streams were given, but not for ever.

    The end of the process groups and the end of the process do this by themselves.
    """
    if not all([stream.finish() for stream in _STREAMS.values()]) and not _hopeless:
        logger.warning(
            "FSDP: communication did not end within %.0f s, and is left: another rank has failed or does other things.",
            _seconds_to_end(),
        )


def _seconds_to_end() -> float:
    if _hopeless:
        return 0.0
    return SECONDS_TO_END if error_at_end() is None else SECONDS_TO_END_AFTER_ERRORS


def error_at_end() -> BaseException | None:
    """The exception that ends the process, or its process groups, if there is one."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def _nothing() -> None:
    pass


_at_end: list[Callable[[], None]] = [finish_tasks]


def at_end(function: Callable[[], None]) -> None:
    """Call ``function`` when process groups, or the process, end: it may use the store, but not take long."""
    if function not in _at_end:
        _at_end.append(function)
        atexit.register(function)


def watch_end() -> None:
    """See to it that what was given to :func:`at_end`, and the tasks of all streams, are done before groups end.

    Tasks that nothing has waited for yet, such as gathers of layers that this rank has left out, are needed by ranks
    that have not. They fail as soon as torch forgets their groups.
    """
    world = dist.distributed_c10d._world
    communicators = getattr(world, "comms", None)
    if isinstance(communicators, list):
        # What torch finishes first: known however the user has imported destroy_process_group.
        if _END not in communicators:
            communicators.append(_END)
    else:
        GROUP_END.install()


GROUP_END = Patches(
    "The end of process groups",
    [
        Patch(
            f"{module}:destroy_process_group",
            "ends groups that tasks still use; only versions of torch without a list of communicators need it",
            "megatron.fsdp.comm.streams:finish_and_destroy",
            TORCH,
        )
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
    ],
)


def finish_and_destroy(destroy: Callable[..., None], group: dist.ProcessGroup | None = None) -> None:
    """Finish what streams still have to do, then destroy the process group."""
    if group is None or group is dist.group.WORLD:
        _END.finalize()
    destroy(group)


class _End:
    """Ends what this process has to do with its process groups."""

    def finalize(self) -> None:
        """Do it. Nothing must keep the groups from ending."""
        for function in _at_end:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - see above
                logger.warning("FSDP: while the process groups ended: %s", error)
        _hopeless.clear()


_END = _End()
