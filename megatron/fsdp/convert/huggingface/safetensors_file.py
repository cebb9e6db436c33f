"""The safetensors file format: tensors that are read in part, and a writer that holds one block at a time.

A file is the length of its header (8 bytes, little endian), the header (JSON: for each name the dtype, the shape and
where its bytes lie), and the bytes of the tensors in a row.
"""

import ctypes
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.checksums import size_of
from megatron.fsdp.checkpoint.lazy import Box, LazyTensor

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
# What the format allows.
_LARGEST_HEADER = 100_000_000
_PREFIX = 8


class _Entry(NamedTuple):
    """What a header says of a tensor; ``begin`` and ``stop`` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    stop: int


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file, by name, in the order of their bytes. Only the header is read.

    Args:
        path: The file. It is opened again for each read, and must not change.

    Raises:
        ValueError: It is no safetensors file, or shorter or longer than its header says.
    """
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        if size < _PREFIX or not 2 <= length <= min(_LARGEST_HEADER, size - _PREFIX):
            raise ValueError(f"{path}: expected a safetensors file; got {size} bytes without a header of such a file.")
        try:
            header = json.loads(file.read(length))
            entries = {name: _entry(value) for name, value in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path}: expected the header of a safetensors file; got {error!r}.") from error
    start, end = _PREFIX + length, 0
    tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].stop)):
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
    return _Entry(DTYPES[value["dtype"]], tuple(int(size) for size in value["shape"]), begin, stop)


def _lazy(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    def read(box: Box) -> torch.Tensor:
        if math.prod(box.sizes) == 0:
            return torch.empty(box.sizes, dtype=dtype)
        data = bytearray(math.prod(box.sizes) * dtype.itemsize)
        with path.open("rb", buffering=0) as file:
            view, done = memoryview(data), 0
            for offset, length in _runs(shape, box):
                file.seek(start + offset * dtype.itemsize)
                _fill(file, view[done : done + length * dtype.itemsize], path)
                done += length * dtype.itemsize
        return torch.frombuffer(data, dtype=dtype).view(box.sizes)

    return LazyTensor(shape, dtype, read)


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Contiguous parts of a box in row order: first element within the flattened tensor, and number of elements."""
    # Dimensions after this one are whole, so what lies in it is contiguous.
    dim = max((d for d, size in enumerate(shape) if box.sizes[d] != size), default=0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    origin = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    length = math.prod(box.sizes[dim:])
    for index in itertools.product(*(range(size) for size in box.sizes[:dim])):
        yield origin + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _fill(file: IO[bytes], view: memoryview, path: Path) -> None:
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]  # an unbuffered file has it
        if not count:
            raise ValueError(f"{path}: expected {len(view)} more bytes; the file was cut while it was read.")
        view = view[count:]


def write_tensors(
    path: Path, tensors: Mapping[str, LazyTensor], block: int, progress: Callable[[int], None] = lambda count: None
) -> None:
    """Write a file and wait until the disk has it.

    Args:
        path: The file; one that is there is replaced.
        tensors: By name. Those of larger dtypes come first, so that each begins at a multiple of its item size.
        block: Bytes that are held at a time.
        progress: Called with the number of bytes of tensors after each write.

    Raises:
        ValueError: A dtype is none of the format's.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered.values():
            for box in tensor.blocks(block):
                file.write(as_bytes(part := tensor.read(box).contiguous()))
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
    # Spaces after the header make the tensors' bytes begin at a multiple of 8.
    text += b" " * (-len(text) % _PREFIX)
    return len(text).to_bytes(_PREFIX, "little") + text


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; valid as long as the tensor is."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
