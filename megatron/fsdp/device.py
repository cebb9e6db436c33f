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
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.fsdp.mesh import new_group

logger = logging.getLogger(__name__)

Task = Callable[[], None]


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

    def reference(self) -> "Callable[[], Handle | None]":
        """Returns the handle as long as somebody else holds it.

        One whose error nobody has asked for would keep alive what its task used.
        """
        return weakref.ref(self)


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


class _CpuHandle(Handle):
    """Set by the stream's thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def ended(self) -> bool:
        return self.done

    def wait(self) -> None:
        self._done.wait()
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
            self._thread = threading.Thread(target=self._loop, name="megatron-fsdp-stream", daemon=True)
            self._thread.start()
            # A thread that the interpreter stops at its end, in the middle of torch's code, takes the process with it.
            atexit.register(self.close)
        handle = _CpuHandle()
        self._tasks.put((task, handle))
        return handle

    def _loop(self) -> None:
        while True:
            item = self._tasks.get()
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

    def close(self, timeout: float = 10.0) -> None:
        """Run what was given, and end the thread; ``timeout`` in seconds is for a collective that never ends."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout)
            self._thread = None

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Stream.group`. The first call for a group is a collective of its ranks."""
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

    def reference(self) -> Callable[[], Handle | None]:
        """See :meth:`Handle.reference`. The host waits for nothing, and drops it before it has ended."""
        return lambda: self


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


_STREAMS: dict[tuple[str, int | None] | tuple[str, int | None, str], Stream] = {}


def communication_stream(device: torch.device, group: dist.ProcessGroup, second: bool = False) -> Stream:
    """The stream that all collectives of this process on ``device`` share, so that they have one order.

    Args:
        device: Where the collectives run.
        group: One of the groups they use.
        second: Another stream, for collectives on groups that no others use.
    """
    if dist.get_backend(group) == "fake" and device.type == "cpu":
        return _STREAMS.setdefault(("fake", None), InlineStream())
    key = (device.type, device.index, "second") if second else (device.type, device.index)
    if key not in _STREAMS:
        _STREAMS[key] = CudaStream(device) if device.type == "cuda" else CpuStream()
    return _STREAMS[key]


def finish_tasks() -> None:
    """Wait for all that streams were given. On every rank before ``torch.distributed.destroy_process_group``.

    A gather that nothing has waited for yet may otherwise begin on one rank and not on another, whose groups are gone.
    """
    for stream in _STREAMS.values():
        stream.run(_nothing).wait()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _nothing() -> None:
    pass


def default_device(module: torch.nn.Module) -> torch.device:
    """Where a model computes if nobody says: the current CUDA device, or the CPU where there is none."""
    first = next(module.parameters(), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
