"""DTensors whose shards have sizes of their own: a rank's part is what the layout gives it, not an even chunk."""

import functools
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from megatron.fsdp.layout import Piece


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], placements: Sequence[Placement]
) -> DTensor:
    """A DTensor whose local tensor is ``local`` itself.

    Args:
        local: This rank's part, possibly empty.
        mesh: Mesh it is distributed over.
        shape: Shape of the whole tensor.
        placements: One per axis of the mesh. ``Shard(0)`` stands for as many rows per rank as each has.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """True for a DTensor of which this rank may hold a part only."""
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor: the very tensor, which ``to_local`` would make a view of for autograd.

    Raises:
        TypeError: ``tensor`` is no DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor; got {type(tensor).__name__}.")
    return tensor._local_tensor


def make_like(local: torch.Tensor, other: torch.Tensor) -> DTensor:
    """A DTensor with local tensor ``local``, distributed as the DTensor ``other`` is."""
    assert isinstance(other, DTensor)
    return make_dtensor(local, other.device_mesh, tuple(other.shape), other.placements)


def describe_chunk(dtensor: DTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Tell torch.distributed.checkpoint which part of the whole tensor this rank holds; no communication.

    DCP asks the local tensor for its chunks before it assumes that a ``Shard(0)`` is an even one.

    Args:
        dtensor: Tensor to describe. Only its local tensor object carries the description.
        offsets: Where the part begins in the whole tensor.
        sizes: Shape of the part; an empty part writes and reads nothing.
    """
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    local = local_part(dtensor)
    local.__create_chunk_list__ = functools.partial(_chunks, chunk)  # type: ignore[attr-defined]
    local.__create_write_items__ = functools.partial(_write_items, chunk)  # type: ignore[attr-defined]


def describe_piece(dtensor: DTensor, piece: Piece, offset: tuple[int, ...] | None = None) -> None:
    """:func:`describe_chunk` for a parameter, or a tensor like it, of which this rank holds ``piece``.

    Args:
        dtensor: The parameter.
        piece: Part of what the rank computes with.
        offset: Where that begins in the whole parameter; None: at its beginning.
    """
    begin = (piece.row_start, *(0 for _ in piece.shape[1:]))
    if offset is not None:
        begin = tuple(a + b for a, b in zip(begin, offset, strict=True))
    describe_chunk(dtensor, begin, piece.shape)


def _chunks(chunk: ChunkStorageMetadata) -> list[ChunkStorageMetadata]:
    return [chunk] if chunk.sizes.numel() else []


def _write_items(chunk: ChunkStorageMetadata, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
    if not chunk.sizes.numel():
        return []
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=tensor.size())
    return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]
