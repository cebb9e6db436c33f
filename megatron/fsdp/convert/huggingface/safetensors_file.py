"""The safetensors file format: a reader for regions of tensors, and a writer that holds one block at a time.

A file consists of the length of its header (8 bytes, little endian), the header (JSON with the dtype, shape and byte
range of each tensor), and the bytes of the tensors. The safetensors library offers neither a streaming writer nor
errors that name the damaged file.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.archive import memory
from megatron.fsdp.checkpoint.checksums import size_of
from megatron.fsdp.checkpoint.lazy import LazyTensor, Region
from megatron.fsdp.checkpoint.strided import read_region

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest header that the format allows, in bytes.
_LARGEST_HEADER = 100_000_000
_PREFIX = 8


class _Entry(NamedTuple):
    """A tensor in the header. ``begin`` and ``stop`` count bytes from its end. ``dtype`` is None if it is unknown."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int
    stop: int


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a file by name, in the order of their bytes. Only the header is read.

    Args:
        path: The file. It is opened again for each read, and must not change.

    Raises:
        ValueError: The file is not a safetensors file, its size contradicts its header, or a tensor has an
            unknown dtype.
    """
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        if size < _PREFIX or not 2 <= length <= min(_LARGEST_HEADER, size - _PREFIX):
            raise ValueError(f"{path}: expected a safetensors file; got {size} bytes without a valid header.")
        try:
            header = json.loads(file.read(length))
            entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path}: expected the header of a safetensors file; got {error!r}.") from error
    start, end = _PREFIX + length, 0
    tensors = {}
    # The format requires the tensors to follow each other without gaps or overlaps.
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].stop)):
        if entry.dtype is None:
            raise ValueError(f"{path}: {name}: expected a dtype of {', '.join(DTYPES)}; got {header[name]['dtype']}.")
        expected = (end, end + math.prod(entry.shape) * entry.dtype.itemsize)
        if min(entry.shape, default=0) < 0 or (entry.begin, entry.stop) != expected:
            raise ValueError(f"{path}: {name}: expected bytes {expected}; got {(entry.begin, entry.stop)}.")
        end = entry.stop
        tensors[name] = _lazy(path, start + entry.begin, entry.shape, entry.dtype)
    if start + end != size:
        raise ValueError(f"{path}: expected {start + end} bytes; got {size}.")
    return tensors


def _entry(value: Any) -> _Entry:
    begin, stop = (int(offset) for offset in value["data_offsets"])
    return _Entry(DTYPES.get(value["dtype"]), tuple(int(size) for size in value["shape"]), begin, stop)


def _lazy(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    def read(region: Region) -> torch.Tensor:
        result = torch.empty(region.sizes, dtype=dtype)
        if result.numel():
            with path.open("rb", buffering=0) as file:
                read_region(file, start, stride, region, result)
        return result

    return LazyTensor(shape, dtype, read)


def write_tensors(
    path: Path, tensors: Mapping[str, LazyTensor], block: int, progress: Callable[[int], None] = lambda count: None
) -> None:
    """Write a file and flush it to the disk. An existing file is replaced.

    Args:
        path: The file.
        tensors: By name. They are stored in the order of their item sizes, largest first, which aligns each of them.
        block: Largest number of bytes to hold in memory.
        progress: Called with the number of tensor bytes after each write.

    Raises:
        ValueError: The format lacks the dtype of a tensor.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered.values():
            for region in tensor.blocks(block):
                file.write(memory(part := tensor.read(region).contiguous()))
                progress(part.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Mapping[str, LazyTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name}: expected a dtype of {', '.join(DTYPES)}; got {tensor.dtype}.")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad with spaces, so that the tensors' bytes begin at a multiple of 8.
    text += b" " * (-len(text) % _PREFIX)
    return len(text).to_bytes(_PREFIX, "little") + text
