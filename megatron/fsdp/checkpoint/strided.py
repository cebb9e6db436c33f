"""Reads a region of a strided tensor straight from a file, without reading the full tensor."""

from typing import IO

import torch

from megatron.fsdp.checkpoint.archive import memory
from megatron.fsdp.checkpoint.checksums import DamagedCheckpoint
from megatron.fsdp.checkpoint.lazy import Region
from megatron.fsdp.checkpoint.storage import read_at

# Elements that are not contiguous in the file are read through a buffer of at most this many bytes.
SCRATCH = 4 << 20
# Skipping a gap of this many bytes costs a second read, which takes about as long as reading the gap.
GAP = 64 << 10
# Elements are copied bit by bit, so any dtype of the same size will do.
_COPY_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def read_region(file: IO[bytes], start: int, stride: tuple[int, ...], region: Region, target: torch.Tensor) -> None:
    """Read a region of a tensor that is stored in a file.

    Args:
        file: Open for reading, unbuffered.
        start: Byte in the file at which the tensor's first element begins.
        stride: Of the stored tensor, in elements.
        region: The elements to read; not empty.
        target: CPU tensor of shape ``region.sizes`` and the stored dtype; overwritten.

    Raises:
        DamagedCheckpoint: The file ends before the region does.
    """
    first = start + target.itemsize * sum(o * s for o, s in zip(region.offsets, stride, strict=True))
    # Dimensions of size 1 say nothing about the order in memory.
    kept = tuple(stride[dim] for dim, size in enumerate(region.sizes) if size > 1)
    _read(file, first, kept, target.view(_COPY_DTYPES[target.itemsize]).squeeze())


def _read(file: IO[bytes], first: int, stride: tuple[int, ...], target: torch.Tensor) -> None:
    """Read elements that are ``stride`` apart, from byte ``first`` on."""
    span = 1 + sum((n - 1) * s for n, s in zip(target.shape, stride, strict=True))
    if target.is_contiguous() and stride == target.stride():
        _fill(file, first, target)
    elif span * target.itemsize <= SCRATCH:
        scratch = torch.empty(span, dtype=target.dtype)
        _fill(file, first, scratch)
        target.copy_(scratch.as_strided(target.shape, stride))
    else:
        _read_in_steps(file, first, stride, target)


def _read_in_steps(file: IO[bytes], first: int, stride: tuple[int, ...], target: torch.Tensor) -> None:
    """Cut along the dimension with the largest stride into steps that fit into the buffer."""
    dim = max(range(len(stride)), key=stride.__getitem__)
    inner = 1 + sum((n - 1) * s for d, (n, s) in enumerate(zip(target.shape, stride, strict=True)) if d != dim)
    count = max((SCRATCH // target.itemsize - inner) // max(stride[dim], 1) + 1, 1)
    if (stride[dim] - inner) * target.itemsize >= GAP:
        count = 1
    for start in range(0, target.shape[dim], count):
        part = target.narrow(dim, start, min(count, target.shape[dim] - start))
        rest = stride
        if part.shape[dim] == 1:
            part, rest = part.squeeze(dim), (*stride[:dim], *stride[dim + 1 :])
        _read(file, first + start * stride[dim] * target.itemsize, rest, part)


def _fill(file: IO[bytes], offset: int, target: torch.Tensor) -> None:
    view = memory(target)
    while view:
        count = read_at(file, view, offset)  # into the tensor's own memory; maybe less than asked
        if not count:
            raise DamagedCheckpoint(f"{file.name}: expected {len(view)} more bytes at {offset}; the file ends there.")
        view, offset = view[count:], offset + count
