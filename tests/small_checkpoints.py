"""Small checkpoints written here, the samples, and how much memory it takes to read or write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fsdp.checkpoint import writer
from megatron.fsdp.checkpoint.archive import memory
from megatron.fsdp.checkpoint.lazy import LazyTensor, of
from tests.checkpoints import FSDP_DTENSOR, ITERATION, TORCH_DIST, sample

NAMES = (*FSDP_DTENSOR, *TORCH_DIST, "converted_repaired_strict_loadable_from_tp2dp2")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64),
)


class Injected:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def sample_checkpoint(name: str) -> Path:
    """The checkpoint of a sample; skips where there are no samples."""
    return sample(name) / ITERATION


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random elements of any dtype."""
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
    if dtype in (torch.uint8, torch.uint16):
        values = values.abs()
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and memory(a.contiguous()) == memory(b.contiguous())


def lazily(tensors: Mapping[str, torch.Tensor]) -> dict[str, LazyTensor]:
    """Tensors as the writer takes them."""
    return {key: of(tensor) for key, tensor in tensors.items()}


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    block: int = 64 << 20,
    **more: Any,
) -> Path:
    """Write a checkpoint; ``more`` is what ``Draft`` takes."""
    writer.write_checkpoint(writer.Draft(lazily(tensors), dict(objects or {}), **more), path, block=block)
    return path


class PeakMemory:
    """Context that measures by how many bytes the resident memory of this process grows at most."""

    growth = 0

    def __enter__(self) -> "PeakMemory":
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _peak()
        except (OSError, KeyError):
            pytest.skip("this system does not tell the peak memory of a process")
        return self

    def __exit__(self, *error: object) -> None:
        self.growth = _peak() - self._before


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) << 10
