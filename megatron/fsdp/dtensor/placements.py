"""Placements for shards of any size, and the location of each rank's shard in the full tensor. No communication.

torch's ``Shard`` stands for even chunks along a dimension. A sharded flat buffer gives each rank some rows of each
parameter, sometimes part of a row, sometimes nothing; :class:`RaggedShard` describes that. It replaces ``Shard(0)`` in
a DTensor's spec, so every tensor derived from it (a copy, optimizer state) has the same layout, in any dtype. The idea
is that of veScale's ``RaggedShard`` (arXiv:2602.22437).

``DTensorSpec``, ``TensorMeta``, ``_StridedShard`` and ``make_contiguous_strides_for`` are private in torch and may
change between versions.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron.fsdp.sharding.layout import Box, Layout, boxes

# Strides of a contiguous tensor, in elements, by its shape.
contiguous_stride = functools.cache(make_contiguous_strides_for)


class _OwnPlacement(Placement):
    """Base class of placements to which torch's sharding rules must not be applied."""

    def __post_init__(self) -> None:
        # Placement is a C++ class since torch 2.11, whose constructor a dataclass does not call.
        super().__init__()

    def is_shard(self, dim: int | None = None) -> bool:
        """False, because torch assumes that shards are even."""
        return False

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


@dataclass(frozen=True)
class RaggedShard(_OwnPlacement):
    """Ranks along this mesh axis hold consecutive ranges of the flattened tensor, of arbitrary lengths.

    If the mesh has a tensor-parallel axis, the flattened tensor is that of the tensor-parallel rank. With two
    data-parallel axes, both have a ``RaggedShard``, and the index of a rank's shard is the sum of its coordinates on
    these axes, each multiplied by the ``stride`` of the axis.

    Attributes:
        num_shards: Total number of shards, over all ragged axes.
        first: Index of the first shard that may hold elements; earlier shards are empty.
        cuts: Start of shards ``first``, ``first + 1``, ..., followed by the end of the last of them, in elements of the
            flattened tensor. Later shards are empty. The length depends on how many shards the parameter spans and not
            on the world size.
        stride: Distance in shard indices between neighbouring ranks of this mesh axis.
    """

    num_shards: int
    first: int
    cuts: tuple[int, ...]
    stride: int = 1

    def __reduce__(self) -> tuple:
        return RaggedShard, (self.num_shards, self.first, self.cuts, self.stride)

    @staticmethod
    def of(layout: Layout, index: int, stride: int = 1) -> "RaggedShard":
        """The placement of parameter ``index`` in ``layout``."""
        slot, size = layout.slots[index], layout.shard_numel
        if not slot.numel:
            return RaggedShard(layout.num_shards, 0, (0, 0), stride)
        first, last = slot.offset // size, (slot.end - 1) // size
        inner = (shard * size - slot.offset for shard in range(first + 1, last + 1))
        return RaggedShard(layout.num_shards, first, (0, *inner, slot.numel), stride)

    def bounds(self, shard: int) -> tuple[int, int]:
        """Start and end of one shard, in elements of the flattened tensor."""
        position = shard - self.first
        if position < 0:
            return 0, 0
        if position >= len(self.cuts) - 1:
            return self.cuts[-1], self.cuts[-1]
        return self.cuts[position], self.cuts[position + 1]

    def narrowed(self, start: int, stop: int) -> "RaggedShard":
        """The placement of the slice ``start:stop`` of the flattened tensor."""
        cuts = tuple(min(max(cut, start), stop) - start for cut in self.cuts)
        return RaggedShard(self.num_shards, self.first, cuts, self.stride)

    def scaled(self, row: int, new_row: int) -> "RaggedShard":
        """The placement of the same rows after their length changes from ``row`` to ``new_row``; no row may be cut."""
        cuts = tuple(cut // row * new_row for cut in self.cuts)
        return RaggedShard(self.num_shards, self.first, cuts, self.stride)


@dataclass(frozen=True)
class SectionedShard(_OwnPlacement):
    """Ranks along a tensor-parallel axis each hold some rows (dimension 0) of every section of a fused weight.

    For example, a rank of a fused gate and up projection holds rows of the gate followed by rows of the up projection.

    Attributes:
        sections: Number of rows of each section on one rank.
    """

    sections: tuple[int, ...]
    dim: int = 0

    def __reduce__(self) -> tuple:
        return SectionedShard, (self.sections,)

    def narrowed(self, start: int, stop: int) -> Placement:
        """The placement of a tensor that consists of rows ``start:stop`` of every rank."""
        ends = itertools.accumulate(self.sections)
        spans = [(max(end - rows, start), min(end, stop)) for rows, end in zip(self.sections, ends, strict=True)]
        left = tuple(end - begin for begin, end in spans if end > begin)
        return SectionedShard(left) if len(left) > 1 else Shard(0)

    def blocks(self, ranks: int, rank: int) -> list[tuple[int, int]]:
        """For each section, the number of rows on one rank and the index of the first one in the full tensor."""
        firsts = itertools.accumulate((ranks * rows for rows in self.sections), initial=0)
        return [(rows, first + rank * rows) for rows, first in zip(self.sections, firsts, strict=False)]


class LocalSlice(NamedTuple):
    """The elements of a tensor that one rank holds: a range of its flattened tensor-parallel tensor.

    Attributes:
        shape: Shape of the tensor-parallel rank's tensor.
        offset: Offset of that tensor in the full tensor.
        blocks: Its rows as separate blocks of the full tensor; None if they are one block, at ``offset``.
        start: First element of the range.
        stop: One past the last element.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    blocks: list[tuple[int, int]] | None
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor: whole rows, or one-dimensional if the range begins or ends inside a row."""
        if not self.shape:
            return ()
        row = max(math.prod(self.shape[1:]), 1)
        if self.start == self.stop or (self.start % row == 0 and self.stop % row == 0):
            return ((self.stop - self.start) // row, *self.shape[1:])
        return (self.stop - self.start,)

    def boxes(self) -> list[Box]:
        """Boxes of the full tensor that cover the range, in the order of the local tensor's memory."""
        if self.blocks is None:
            return [_moved(box, self.offset) for box in boxes(self.shape, self.start, self.stop)]
        found, first = [], 0
        for rows, row in self.blocks:
            numel = rows * math.prod(self.shape[1:])
            begin, end = (min(max(at - first, 0), numel) for at in (self.start, self.stop))
            place = (row, *self.offset[1:])
            found += [_moved(box, place) for box in boxes((rows, *self.shape[1:]), begin, end)]
            first += numel
        return found

    def take_from(self, whole: torch.Tensor) -> torch.Tensor:
        """Slice a full tensor, in the shape of the local tensor; a view where possible."""
        own = whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]
        if self.blocks is not None:
            own = torch.cat([whole.narrow(0, row, rows) for rows, row in self.blocks])
        row = max(math.prod(self.shape[1:]), 1)
        # Only these rows are copied if the tensor is not contiguous, as a broadcast one.
        rows = own[self.start // row : -(-self.stop // row)] if self.shape else own
        start = self.start % row
        return rows.reshape(-1)[start : start + self.stop - self.start].view(self.local_shape)


def _moved(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(o + b for o, b in zip(box.offsets, by, strict=True)), box.sizes)


def is_ragged(spec: DTensorSpec) -> bool:
    """Whether a spec has a :class:`RaggedShard` or :class:`SectionedShard`, for which torch has no rules."""
    return any(isinstance(placement, _OwnPlacement) for placement in spec.placements)


def ragged_axes(spec: DTensorSpec) -> list[tuple[int, RaggedShard]]:
    """The mesh axes with a :class:`RaggedShard`, smallest stride first."""
    axes = [(axis, p) for axis, p in enumerate(spec.placements) if isinstance(p, RaggedShard)]
    return sorted(axes, key=lambda pair: pair[1].stride)


def local_slice(spec: DTensorSpec) -> LocalSlice:
    """The elements that this rank holds of a tensor with this spec.

    Raises:
        RuntimeError: This rank is not in the mesh.
    """
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"This rank is not in {spec.mesh}, over which the tensor is sharded.")
    assert spec.tensor_meta is not None
    shape, offset = list(spec.tensor_meta.shape), [0] * len(spec.tensor_meta.shape)
    blocks = None
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, (Shard, SectionedShard)):
            dim, ranks, rank = placement.dim, spec.mesh.size(axis), coordinate[axis]
            if isinstance(placement, SectionedShard):
                blocks = placement.blocks(ranks, rank)
            begin, size = _chunk(shape[dim], ranks, rank)
            offset[dim], shape[dim] = offset[dim] + begin, size
    start, stop = 0, math.prod(shape)
    ragged = ragged_axes(spec)
    if ragged:
        start, stop = ragged[0][1].bounds(sum(coordinate[axis] * p.stride for axis, p in ragged))
    return LocalSlice(tuple(shape), tuple(offset), blocks, start, stop)


def _chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and size of one rank's chunk, as ``torch.chunk`` divides a dimension of ``size``."""
    full = -(-size // ranks)
    begin = min(rank * full, size)
    return begin, min(full, size - begin)


class ReportedPlacements(tuple[Placement, ...]):
    """Placements as torch's types. ``DTensor.from_local`` returns a tensor with the spec that they stand for.

    Attributes:
        spec: The spec, with ragged placements.
    """

    spec: DTensorSpec


def reported(spec: DTensorSpec) -> ReportedPlacements:
    """The placements as torch's types: ``Shard(0)`` or ``_StridedShard(0)`` instead of ragged ones.

    They are for callers that check which mesh axes a tensor is sharded over, or make tensors of the same layout from
    local ones. torch's sharding rules use the spec and never see them.
    """
    tensor_parallel = math.prod(
        spec.mesh.size(axis)
        for axis, p in enumerate(spec.placements)
        if isinstance(p, SectionedShard) or (isinstance(p, Shard) and p.dim == 0)
    )
    # Tensor parallelism divides the rows first, and data parallelism divides the result.
    ragged = Shard(0) if tensor_parallel == 1 else _StridedShard(0, split_factor=tensor_parallel)
    shown: dict[type, Placement] = {RaggedShard: ragged, SectionedShard: Shard(0)}
    found = ReportedPlacements(shown.get(type(placement), placement) for placement in spec.placements)
    found.spec = spec
    return found


def spec_like(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec for a different dtype; ``spec`` itself if the dtype does not change."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def narrowed_spec(spec: DTensorSpec, start: int, stop: int, shape: tuple[int, ...]) -> DTensorSpec:
    """The spec of a tensor that consists of some rows of another one.

    Args:
        spec: Spec of the other tensor.
        start: First element of the rows, in the flattened tensor of a tensor-parallel rank.
        stop: One past their last element.
        shape: Shape of the result, over all tensor-parallel ranks.
    """
    assert spec.tensor_meta is not None
    row = max(math.prod(spec.tensor_meta.shape[1:]), 1)
    placements: list[Placement] = []
    for placement in spec.placements:
        if isinstance(placement, RaggedShard):
            placements.append(placement.narrowed(start, stop))
        elif isinstance(placement, SectionedShard):
            placements.append(placement.narrowed(start // row, stop // row))
        else:
            placements.append(placement)
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), spec.tensor_meta.dtype)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


def is_replicated(placements: Sequence[Placement]) -> bool:
    """Whether every rank holds the full tensor."""
    return all(isinstance(placement, Replicate) for placement in placements)


def spanning_mesh(tensors: Sequence[torch.Tensor]) -> tuple[DeviceMesh, list[int]]:
    """The mesh over which a set of tensors, such as gradients, is sharded, and how many of its ranks hold each part.

    It is the largest mesh of a DTensor among them. A reduction has to include all of its axes, also those along which
    everything here is replicated: the mesh of experts is smaller, and ranks outside of it hold other experts, or some
    that got no gradient.
    """
    mesh = max((each.device_mesh for each in tensors if isinstance(each, DTensor)), key=DeviceMesh.size)
    groups, copies = mesh.get_all_groups(), []
    for each in tensors:
        inside, outside = 1, mesh.size()
        if isinstance(each, DTensor):
            own, placements = each.device_mesh, each._spec.placements
            inside = math.prod(n for n, p in zip(own.shape, placements, strict=True) if isinstance(p, Replicate))
            # A mesh of some of the axes leaves the tensor unsharded along the others. That of experts has its own axes.
            outside = mesh.size() // own.size() if all(group in groups for group in own.get_all_groups()) else 1
        copies.append(inside * outside)
    return mesh, copies


# The attribute of a mesh of experts that has their names, and whether no rank outside of the mesh uses them for others.
EXPERT_NAMES = "_fsdp_expert_names"


def require_own_name(mesh: DeviceMesh, key: str) -> None:
    """Check a key under which experts are saved or loaded in full.

    Raises:
        RuntimeError: The tensor is of experts, and ranks outside of its mesh have other experts under the key. (torch
            replaces the message of a ValueError.)
    """
    names, parts = getattr(mesh, EXPERT_NAMES, None), key.split(".")
    found = (".".join(parts[i:j]) for i, j in itertools.combinations(range(len(parts) + 1), 2))
    if names is not None and not any(names.get(name) for name in found):
        raise RuntimeError(
            f"{key}: expected a key that only the ranks with this expert use; got one under which other "
            "expert-parallel ranks have other experts: all but one of these would be lost. Give the experts of each "
            "expert-parallel rank names of their own, as by a ModuleDict keyed by the expert's number, and save "
            "optimizer state by name, with torch.distributed.checkpoint.state_dict.get_state_dict."
        )


class InChunks:
    """The protocol of torch.distributed.checkpoint, for tensors whose shard may be several boxes of the full tensor."""

    _spec: DTensorSpec
    _local_tensor: torch.Tensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        for name, is_own in getattr(self._spec.mesh, EXPERT_NAMES, {}).items():
            if not is_own:
                require_own_name(self._spec.mesh, name)
        # NVIDIA's functions for uneven DTensors store the chunks in an attribute of the local tensor.
        described = getattr(self._local_tensor, "__create_chunk_list__", None)
        return described() if described is not None else _chunks(self._spec)

    def __create_write_items__(self, fqn: str, tensor: DTensor) -> list[WriteItem]:
        require_own_name(self._spec.mesh, fqn)
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
            )
            for chunk in _chunks(self._spec)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A view of one chunk, in its shape. The local tensor holds the chunks one after another."""
        begin, flat = 0, self._local_tensor.detach().reshape(-1)
        for chunk in _chunks(self._spec):
            numel = chunk.sizes.numel()
            if index.offset is None or chunk.offsets == torch.Size(index.offset):
                return flat[begin : begin + numel].view(chunk.sizes)
            begin += numel
        raise ValueError(f"{index.fqn}: expected the offset of a chunk of this rank; got {index.offset}.")


def _chunks(spec: DTensorSpec) -> list[ChunkStorageMetadata]:
    assert spec.tensor_meta is not None
    if not spec.tensor_meta.shape.numel():
        # No rank has elements, but a checkpoint without any chunk would lack the tensor.
        return [ChunkStorageMetadata(torch.Size([0] * len(spec.shape)), spec.tensor_meta.shape)]
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in local_slice(spec).boxes()]
