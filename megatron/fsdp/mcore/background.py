"""Makes Megatron's background saves write checksums, and leave no files behind if they fail."""

import functools
import inspect
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron.fsdp.checkpoint.backend import AtomicSaveMixin, file_result, remove_save
from megatron.fsdp.checkpoint.checksums import crc32_of
from megatron.fsdp.mcore.views import View


def get_async_strategy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    """Choose Megatron's strategy for background saves, with a writer and an end of the save that are ours."""
    name, modules = original(*args, **kwargs)
    if not isinstance(modules, dict):  # one of them was asked for
        return name, modules
    return name, {
        **modules,
        "FileSystemWriterAsync": _background_writer(modules["FileSystemWriterAsync"]),
        "save_state_dict_async_plan": _like_nvrx(modules["save_state_dict_async_plan"]),
        "save_state_dict_async_finalize": functools.partial(
            _finalize_or_remove, modules["save_state_dict_async_finalize"]
        ),
    }


def _like_nvrx(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Make Megatron-Core's planning of a save usable in place of nvidia-resiliency-ext's, which Megatron calls it as.

    Megatron-Core's has no ``enable_cache``, with which later saves reuse the first one's plan, and returns plans with
    what the end of the save needs.
    """
    if "enable_cache" in inspect.signature(plan).parameters:
        return plan

    @functools.wraps(plan)
    def call(*args: Any, enable_cache: bool = False, **kwargs: Any) -> Any:
        for_the_end, *_ = plan(*args, **kwargs)
        return for_the_end

    return call


@functools.cache
def _background_writer(base: type) -> type:
    """A subclass of Megatron-Core's or nvidia-resiliency-ext's background writer that finishes as ours does."""

    class BackgroundWriter(AtomicSaveMixin, base):
        """Writes files and computes their checksums in another process."""

        def get_save_function_and_args(self) -> Any:
            """Return the function that the other process calls, and its arguments."""
            write, preload, arguments = super().get_save_function_and_args()
            return (None if write is None else functools.partial(_write_with_checksums, write)), preload, arguments

    return BackgroundWriter


def _write_with_checksums(write: Callable[..., None], rank: int, buckets: Any, results: Any, *rest: Any) -> None:
    """Write files, and add their checksums to the results."""
    end_with_parent()
    caught: queue.Queue = queue.Queue()
    try:
        write(rank, buckets, caught, *rest)
        written = caught.get_nowait()
    except Exception as error:  # noqa: BLE001 - reported by the process that waits for the results
        written = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(written, Exception):
        for (file, name, _), number in zip(buckets, sorted(written), strict=True):
            path = Path(file)
            written[number].append(file_result(name, path.stat().st_size, int(crc32_of(path), 16)))
    results.put(written)


def _finalize_or_remove(finalize: Callable[..., None], storage_writer: Any, *args: Any, **kwargs: Any) -> None:
    """End a background save; if a rank could not write, remove this rank's files."""
    try:
        finalize(storage_writer, *args, **kwargs)
    except CheckpointException:
        folder = Path(storage_writer.path)
        for name in [name for _, name, _ in storage_writer.write_buckets or ()] or storage_writer._reserved:
            remove_save(folder / name)
        raise


def end_with_parent() -> None:
    """End this process when the one that started it ends, even if that is killed. Further calls change nothing."""
    _watch_parent(os.getpid())


@functools.cache  # by process, because a forked one inherits the cache
def _watch_parent(process: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), name="megatron-fsdp-parent", daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _run_with_parent(target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    end_with_parent()
    target(*args, **kwargs)


class _Context:
    """A context of ``multiprocessing`` whose processes end with their parent."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, target: Callable[..., None], args: Any = (), **options: Any) -> Any:  # noqa: N802
        """Return a process that has not been started."""
        return self._context.Process(target=_run_with_parent, args=(target, *args), **options)

    def Manager(self) -> Any:  # noqa: N802
        """Start a process that holds shared objects."""
        manager = SyncManager(ctx=self._context)
        manager.start(end_with_parent)
        return manager


def multiprocessing_view(original: Any) -> Any:
    """A ``torch.multiprocessing`` for Megatron's background saves: its own workers would outlive a killed rank."""
    return View(original, {"get_context": lambda mode=None: _Context(original.get_context(mode))})
