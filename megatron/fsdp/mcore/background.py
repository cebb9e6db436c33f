"""Makes Megatron's background saves write checksums, and leave no files behind if they fail."""

import functools
import inspect
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron.fsdp.checkpoint.backend import AtomicSaveMixin, file_result, remove_save
from megatron.fsdp.checkpoint.checksums import crc32_of


def get_async_strategy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    """Choose Megatron's strategy for background saves, with a writer and an end of the save that are ours."""
    name, modules = original(*args, **kwargs)
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

    Megatron-Core's has no ``enable_cache``, with which later saves reuse the first one's plan, and returns plans beside
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
    caught: queue.Queue = queue.Queue()
    write(rank, buckets, caught, *rest)
    written = caught.get()
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
        for path, _, _ in storage_writer.write_buckets or ():
            remove_save(Path(path))
        raise
