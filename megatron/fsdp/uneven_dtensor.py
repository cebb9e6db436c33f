"""DTensors whose shards have sizes of their own: a rank's part is what the layout gives it, not an even chunk."""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement

from megatron.fsdp.buffer import stride_of
from megatron.fsdp.gloo import settling
from megatron.fsdp.layout import boxes


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
    dtensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride_of(tuple(shape))
    )
    return let_gather(dtensor)


def let_gather[T: torch.Tensor](dtensor: T) -> T:
    """Make three methods of this very object right for parts of any size: torch's own expect even ones.

    ``full_tensor()`` and ``redistribute()`` to replicas gather them, as checkpoints of whole tensors do, and
    ``copy.deepcopy`` copies them.
    """
    if is_sharded(dtensor):
        methods = _Uneven(dtensor)
        dtensor.full_tensor = methods.full_tensor  # type: ignore[method-assign]
        dtensor.redistribute = methods.redistribute  # type: ignore[method-assign, assignment]
        dtensor.__deepcopy__ = methods.deepcopy  # type: ignore[method-assign]
    return dtensor


class _Uneven:
    """What :func:`let_gather` puts in place of methods of a DTensor, which it does not keep."""

    def __init__(self, dtensor: DTensor) -> None:
        self._reference: Callable[[], DTensor | None] = weakref.ref(dtensor)

    def __reduce__(self) -> tuple:
        # The memory of what is unpickled is not known here.
        return object.__new__, (_Uneven,), {"_reference": None}

    @property
    def _dtensor(self) -> DTensor:
        dtensor = self._reference() if self._reference is not None else None
        if dtensor is None:
            raise NotImplementedError("An unpickled DTensor does not know its parts; load it into a model first.")
        return dtensor

    def full_tensor(self, *, grad_placements: object = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh, all of which must call this. Not differentiable."""
        return gather_whole(self._dtensor)

    def redistribute(self, device_mesh: object = None, placements: Sequence[Placement] = (), **options: Any) -> DTensor:
        """The whole tensor as a DTensor that is replicated over the mesh."""
        dtensor = self._dtensor
        if len(placements) != len(dtensor.placements) or not all(p.is_replicate() for p in placements):
            raise NotImplementedError(f"redistribute: only Replicate() on every axis is supported; got {placements}.")
        return DTensor.from_local(self.full_tensor(), dtensor.device_mesh, placements, run_check=False)

    def deepcopy(self, memo: dict) -> torch.Tensor:
        """A DTensor, or Parameter, like this one, with memory of its own."""
        dtensor = self._dtensor
        copied = make_like(local_part(dtensor).detach().clone(), dtensor)
        if isinstance(dtensor, nn.Parameter):
            return let_gather(nn.Parameter(copied, requires_grad=dtensor.requires_grad))
        return copied.requires_grad_(dtensor.requires_grad)


def gather_whole(dtensor: DTensor) -> torch.Tensor:
    """The tensor whose parts ranks hold, in rank order along each axis that it is sharded over. A collective."""
    mesh, shape = dtensor.device_mesh, tuple(dtensor.shape)
    whole = local_part(dtensor).detach().to(mesh.device_type)
    for axis, placement in enumerate(dtensor.placements):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            others = math.prod(n for d, n in enumerate(shape) if d != dim)
            size = whole.numel() // others if others else shape[dim]
            whole = whole.reshape(*shape[:dim], size, *shape[dim + 1 :]) if dim else whole.reshape(-1)
            whole = torch.cat(_gather_parts(whole, dim, mesh.get_group(axis)), dim)
    return whole.reshape(shape)


def _gather_parts(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's part, in rank order; they differ in size along ``dim``."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=part.device) for _ in range(group.size())]
    mine = torch.tensor([part.shape[dim]], dtype=torch.int64, device=part.device)
    with settling(group, mine, *sizes):
        dist.all_gather(sizes, mine, group=group)
    lengths = [int(size) for size in sizes]
    shape = (*part.shape[:dim], max(lengths), *part.shape[dim + 1 :])
    padded = part.new_zeros(shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    parts = [torch.empty_like(padded) for _ in lengths]
    with settling(group, padded, *parts):
        dist.all_gather(parts, padded, group=group)
    return [p.narrow(dim, 0, length) for p, length in zip(parts, lengths, strict=True)]


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
    """A DTensor with local tensor ``local``, distributed as the DTensor ``other`` is. Not differentiable.

    What describes a DTensor can be shared, which spares a step most of the time that making gradients takes.
    """
    assert isinstance(other, DTensor)
    spec = other._spec
    if local.dtype != other.dtype:
        assert spec.tensor_meta is not None
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = copy.copy(spec)
        spec.tensor_meta = meta
    return let_gather(DTensor(local, spec, requires_grad=False))


def describe_part(
    dtensor: DTensor,
    start: int,
    stop: int,
    shape: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
    blocks: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Tell torch.distributed.checkpoint which part of the whole tensor this rank holds; no communication.

    DCP asks the local tensor for its chunks before it assumes that a ``Shard(0)`` is an even one. A part that begins or
    ends inside a row is described as the boxes that cover it.

    Args:
        dtensor: Tensor to describe. Only its local tensor object carries the description.
        start: First element of the part, counted within a flattened tensor of ``shape``.
        stop: One past the last element; an empty part writes and reads nothing.
        shape: Shape of what the rank computes with, None: of the whole tensor. A tensor-parallel rank computes with
            a part of the whole.
        offset: Where that begins in the whole tensor; None: at its beginning.
        blocks: Rows that the rank computes with, as blocks that lie apart in the whole tensor: how many there are in
            each, and the first one's number in the whole. None: they are one block, at ``offset``.
    """
    shape = tuple(dtensor.shape) if shape is None else shape
    offset = (0,) * len(shape) if offset is None else offset
    chunks: list[ChunkStorageMetadata] = []
    if blocks is None:
        _add_chunks(chunks, shape, start, stop, offset)
    first = 0
    for rows, row in blocks or ():
        numel = rows * math.prod(shape[1:])
        begin, end = (min(max(at - first, 0), numel) for at in (start, stop))
        _add_chunks(chunks, (rows, *shape[1:]), begin, end, (row, *offset[1:]))
        first += numel
    local = local_part(dtensor)
    local.__create_chunk_list__ = lambda: list(chunks)  # type: ignore[attr-defined]
    local.__create_write_items__ = functools.partial(_write_items, chunks)  # type: ignore[attr-defined]
    local.__get_tensor_shard__ = functools.partial(_chunk_data, weakref.ref(local), chunks)  # type: ignore[attr-defined]


def _add_chunks(
    chunks: list[ChunkStorageMetadata], shape: tuple[int, ...], start: int, stop: int, offset: tuple[int, ...]
) -> None:
    for box in boxes(shape, start, stop):
        place = torch.Size(o + b for o, b in zip(offset, box.offsets, strict=True))
        chunks.append(ChunkStorageMetadata(place, torch.Size(box.sizes)))


def _write_items(chunks: list[ChunkStorageMetadata], fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
    local = local_part(tensor)
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunks
    ]


def _chunk_data(
    local: weakref.ref[torch.Tensor], chunks: list[ChunkStorageMetadata], index: MetadataIndex
) -> torch.Tensor:
    """The elements of one chunk, in its shape, as a view of the local tensor. Chunks lie in it one after the other."""
    tensor = local()
    assert tensor is not None, "who asks for a chunk holds the tensor"
    begin = 0
    for chunk in chunks:
        numel = chunk.sizes.numel()
        if index.offset is None or chunk.offsets == torch.Size(index.offset):
            return tensor.detach().reshape(-1)[begin : begin + numel].view(chunk.sizes)
        begin += numel
    raise ValueError(f"{index.fqn}: expected the offset of a chunk of this rank; got {index.offset}.")
