"""Summarizes a checkpoint without reading its tensors, and shows the parts of a tensor that are read."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.fsdp.checkpoint.lazy import LazyTensor, cat
from megatron.fsdp.checkpoint.reader import COMMON_KEY, CheckpointReader, common_state

GROUP_META = "param_to_group_meta"

# Bytes to read at once. Computing with them takes several times as much memory.
BLOCK = 4 << 20
# As torch prints tensors: up to this many elements whole, of others this many entries at each end of a dimension.
SHOWN = 1000
_EDGE = 3
# Keys of fsdp_dtensor that belong to tensors or to ranks.
_NOT_COMMON = ("model.", "optimizer.", "rng_state.")


def summarize(path: Path, with_groups: bool = False) -> dict[str, Any]:
    """The contents of a checkpoint: plain data by name, without comparing checksums.

    Args:
        path: The folder with ``.metadata``.
        with_groups: Also list the optimizer settings of each parameter.
    """
    reader = CheckpointReader(path, verify=False)
    files = {p.name: p.stat().st_size for p in sorted(path.iterdir()) if p.is_file()}
    listed = [key for key in sorted((*reader.tensors, *reader.objects)) if with_groups or GROUP_META not in key]
    mcore_data = vars(reader.metadata).get("mcore_data")
    return {
        "path": str(reader.path),
        "format": reader.format,
        "bytes": sum(files.values()),
        "files": files,
        "common_state": _common(reader),
        "total_tensors": len(reader.tensors),
        "total_elements": sum(math.prod(tensor.shape) for tensor in reader.tensors.values()),
        "tensors": {key: _facts(reader, key) for key in listed if key in reader.tensors},
        "objects": [key for key in listed if key in reader.objects],
        "ignored_param_to_group_meta": len(reader.tensors) + len(reader.objects) - len(listed),
        # Metadata that older versions of Megatron-Core add.
        "mcore_data": mcore_data if isinstance(mcore_data, dict) and mcore_data else None,
    }


def _common(reader: CheckpointReader) -> dict[str, Any]:
    """State that a checkpoint stores once for all ranks."""
    if reader.format == "torch_dist" or COMMON_KEY in reader.objects:
        return common_state(reader.path, verify=False)
    return {key: reader.read_object(key) for key in reader.objects if not key.startswith(_NOT_COMMON)}


def _facts(reader: CheckpointReader, key: str) -> dict[str, Any]:
    tensor = reader.tensors[key]
    chunks = len(reader.chunks(key))
    return {"dtype": str(tensor.dtype), "shape": tensor.shape, "bytes": tensor.nbytes, "chunks": chunks}


class Statistics(NamedTuple):
    """Statistics of a tensor's elements, in float64; nan if it is empty."""

    minimum: float
    maximum: float
    mean: float
    norm: float


def statistics(tensor: LazyTensor) -> Statistics:
    """The smallest, largest and mean element and the L2 norm, read in blocks. Complex numbers count by magnitude."""
    ends: list[tuple[float, float]] = []
    total, squares, count = 0.0, 0.0, 0
    for box in tensor.blocks(BLOCK):
        block = as_float64(tensor.read(box))
        if not block.numel():
            continue
        ends.append((block.min().item(), block.max().item()))
        total += block.sum().item()
        squares += block.square().sum().item()
        count += block.numel()
    if not count:
        return Statistics(math.nan, math.nan, math.nan, math.nan)
    # torch's minimum of nan and a number is nan, Python's may not be.
    low, high = torch.tensor(ends, dtype=torch.float64).unbind(1)
    return Statistics(low.min().item(), high.max().item(), total / count, math.sqrt(squares))


def countable(tensor: LazyTensor) -> LazyTensor:
    """The tensor; its bytes if its elements are pairs of 4-bit floats, which torch neither compares nor prints."""
    if tensor.dtype != getattr(torch, "float4_e2m1fn_x2", None):
        return tensor
    return LazyTensor(tensor.shape, torch.uint8, lambda region: tensor.read(region).view(torch.uint8))


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as float64; the magnitude of complex ones."""
    return tensor.abs().to(torch.float64) if tensor.is_complex() else tensor.to(torch.float64)


def corners(tensor: LazyTensor) -> tuple[torch.Tensor, tuple[bool, ...]]:
    """The elements to show: all of a small tensor, else the ends of each dimension.

    Returns:
        The elements, and for each dimension whether its middle is left out.
    """
    if math.prod(tensor.shape) <= SHOWN:
        return tensor.full_tensor(), (False,) * len(tensor.shape)
    cut = tuple(size > 2 * _EDGE for size in tensor.shape)
    for dim, size in enumerate(tensor.shape):
        if cut[dim]:
            tensor = cat([tensor.narrow(dim, 0, _EDGE), tensor.narrow(dim, size - _EDGE, _EDGE)], dim)
    return tensor.full_tensor(), cut


def contents_of(tensor: LazyTensor) -> torch.Tensor:
    """A small tensor, read; a large one as dtype and shape only, on the meta device."""
    if math.prod(tensor.shape) <= SHOWN:
        return countable(tensor).full_tensor()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def as_text(values: torch.Tensor, cut: tuple[bool, ...]) -> str:
    """The elements of a tensor, one row per line, with dots in place of those left out."""
    if not cut:
        return _number(listed(values))
    if len(cut) == 1:
        texts = [_number(value) for value in listed(values)]
        return f"[{', '.join([*texts[:_EDGE], '...', *texts[_EDGE:]] if cut[0] else texts)}]"
    rows = [as_text(row, cut[1:]).replace("\n", "\n ") for row in values]
    text = ",\n ".join([*rows[:_EDGE], "...", *rows[_EDGE:]] if cut[0] else rows)
    return f"[{text}]"


def listed(values: torch.Tensor) -> Any:
    """The elements as Python numbers in nested lists, also for dtypes whose ``tolist`` torch lacks."""
    return (values.to(torch.float64) if values.is_floating_point() else values).tolist()


def _number(value: Any) -> str:
    return f"{value:.4e}" if isinstance(value, float) else str(value)
