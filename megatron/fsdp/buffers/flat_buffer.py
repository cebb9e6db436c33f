"""A flat buffer with a layout: all parameters of a group in one tensor."""

import torch
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.dtensor.placements import contiguous_stride
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.dtensor.unsupported import refuse_reads
from megatron.fsdp.helpers.autograd import unwrapped
from megatron.fsdp.sharding.layout import Layout


class FlatBuffer:
    """All parameters of a group in one flat tensor. Its memory may be freed and allocated again while its views stay.

    Args:
        layout: Where each parameter lies.
        dtype: Element type.
        device: Device of the memory.
        pool: Provides the memory. None: the memory is allocated once and never freed.

    Attributes:
        flat: The full buffer, one-dimensional, ``layout.numel`` elements.
        views: One view per parameter, in its shape.
        kept: The error of reading a view after the memory was freed. torch 2.11 and 2.12 end the process instead.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, pool: Pool | None) -> None:
        self.layout = layout
        if pool is None:
            self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        else:
            self.flat = pool.reserve(layout.numel, dtype, device)
        self.views = [slot_view(self.flat, layout, index) for index in range(len(layout.slots))]
        self.kept = ""
        self._pool = pool
        # Buffers of a fixed pool keep their memory.
        self._refuses_reads = pool is not None and not pool.is_fixed and refuse_reads is not None
        self._storage = self.flat.untyped_storage()._cdata

    def allocate(self) -> None:
        """Allocate the memory, unless it is. The content is undefined."""
        if self._pool is not None:
            if self._refuses_reads:
                torch._C._clear_storage_data_ptr_access_error_msg(self._storage)
            self._pool.allocate(self.flat)

    def free(self) -> None:
        """Free the memory. The views must not be read until it is allocated again."""
        if self._pool is not None:
            self._pool.free(self.flat)
            if self._refuses_reads:
                torch._C._set_storage_data_ptr_access_error_msg(self._storage, self.kept)


def slot_view(flat: torch.Tensor, layout: Layout, index: int) -> torch.Tensor:
    """Parameter ``index`` as a view of a full flat buffer."""
    slot = layout.slots[index]
    return part_view(flat, slot.offset, slot.shape)


def part_view(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of a flat tensor from ``offset`` on, in ``shape``."""
    return flat.as_strided(shape, contiguous_stride(shape), flat.storage_offset() + offset)


def gap_views(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The padding of a full flat buffer: the ranges that belong to no parameter."""
    gaps, end = [], 0
    for slot in sorted(layout.slots, key=lambda s: s.offset):
        if slot.offset > end:
            gaps.append(flat[end : slot.offset])
        end = max(end, slot.end)
    return [*gaps, flat[end:]] if end < layout.numel else gaps


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, which does not depend on its memory being allocated; 0 for sparse tensors."""
    local = local_shard(tensor) if isinstance(tensor, DTensor) else unwrapped(tensor)
    return local.untyped_storage()._cdata if local.layout is torch.strided else 0
