"""Functions for uneven DTensors, under the names of NVIDIA's Megatron-FSDP.

The spec of a :class:`~megatron.fsdp.dtensor.ragged_dtensor.RaggedDTensor` contains its layout, so most functions need
no communication for it. Other DTensors with ``Shard(dim)`` placements may have local tensors of any size, which the
ranks have to exchange.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from megatron.fsdp.dtensor.gathering import gather_full, lengths_on_ranks, reduce_over, sharded_axes, unreplicated_axes
from megatron.fsdp.dtensor.placements import RaggedShard, contiguous_stride, is_ragged, local_slice, narrowed_spec
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor, make_dtensor

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Offsets and sizes of this rank's shard in the full tensor. A collective, except for ``RaggedDTensor``.

    Raises:
        ValueError: The shard of a ``RaggedDTensor`` begins or ends inside a row, so that it is not a single box. Its
            ``__create_chunk_list__()`` returns all boxes.
    """
    if isinstance(dtensor, RaggedDTensor):
        mine = local_slice(dtensor._spec)
        boxes = mine.boxes()
        if not boxes:
            row = mine.start // max(1, _row(mine.shape))
            return ChunkStorageMetadata(torch.Size((row, *mine.offset[1:])), torch.Size((0, *mine.shape[1:])))
        if len(boxes) > 1:
            raise ValueError(f"This rank's shard consists of {len(boxes)} boxes; __create_chunk_list__() lists them.")
        return ChunkStorageMetadata(torch.Size(boxes[0].offsets), torch.Size(boxes[0].sizes))
    offsets, sizes = [0] * dtensor.dim(), list(dtensor._local_tensor.shape)
    for axis, dim in sharded_axes(dtensor):
        group = dtensor.device_mesh.get_group(axis)
        lengths = lengths_on_ranks(sizes[dim], group, dtensor._local_tensor.device)
        offsets[dim] += sum(lengths[: group.rank()])
        sizes[dim] = sum(lengths)
    return ChunkStorageMetadata(torch.Size(offsets), dtensor._local_tensor.shape)


def _row(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Make torch.distributed.checkpoint save and load the actual local tensors of an uneven DTensor.

    A ``RaggedDTensor`` supports that already and does not change.
    """
    if isinstance(dtensor, RaggedDTensor):
        return
    chunk = gather_and_compute_chunk_metadata(dtensor)

    def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        if not chunk.sizes.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor._local_tensor), tensor.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    local: Any = dtensor._local_tensor
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the shards of all ranks lie within the tensor and cover it. A collective.

    Raises:
        ValueError: They do not.
    """
    ragged = isinstance(dtensor, RaggedDTensor)
    chunks = dtensor.__create_chunk_list__() if ragged else [gather_and_compute_chunk_metadata(dtensor)]
    inside = all(
        0 <= offset and offset + size <= whole
        for chunk in chunks
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, dtensor.shape, strict=True)
    )
    own = torch.tensor([sum(chunk.sizes.numel() for chunk in chunks), not inside], dtype=torch.float64)
    covered = reduce_over(own, dist.ReduceOp.SUM, dtensor.device_mesh, unreplicated_axes(dtensor))
    if covered[1] or covered[0] != dtensor.numel():
        raise ValueError(
            f"Uneven DTensor of shape {tuple(dtensor.shape)}: ranks hold {int(covered[0])} of {dtensor.numel()} "
            f"elements; this rank has {[(tuple(c.offsets), tuple(c.sizes)) for c in chunks]}."
        )


def filter_unflattened_state_dict(
    state_dict: dict, key_chain: list | None = None, visit_condition: Callable[[Any], bool] = lambda value: False
) -> list[list]:
    """The paths, as lists of keys, to all values in nested dicts for which ``visit_condition`` is true."""
    found: list[list] = []
    for key, value in state_dict.items():
        path = [*(key_chain or []), key]
        if isinstance(value, dict):
            found += filter_unflattened_state_dict(value, path, visit_condition)
        elif visit_condition(value):
            found.append(path)
    return found


def get_unflattened_state_dict(state_dict: dict, key_chain: list | None = None) -> Any:
    """The value at a path of keys in nested dicts.

    Raises:
        KeyError: The path does not exist.
    """
    value: Any = state_dict
    for key in key_chain or []:
        if not isinstance(value, dict) or key not in value:
            raise KeyError(f"{key_chain}: not found in the state dict.")
        value = value[key]
    return value


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict) -> dict:
    """Apply :func:`update_uneven_dtensor_chunk_metadata` to every DTensor in nested dicts. Returns ``state_dict``."""
    for path in sorted(filter_unflattened_state_dict(state_dict, None, lambda v: isinstance(v, DTensor)), key=str):
        update_uneven_dtensor_chunk_metadata(get_unflattened_state_dict(state_dict, path))
    return state_dict


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Gather the full tensor on every rank. A collective.

    Raises:
        TypeError: ``dtensor`` is not a DTensor.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"expected a DTensor; got {type(dtensor).__name__}.")
    return gather_full(dtensor)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Gather the full tensor as a DTensor that is replicated over the same mesh. A collective."""
    whole = uneven_dtensor_to_full_tensor(dtensor)
    replicated = [Replicate() for _ in dtensor._spec.placements]
    return DTensor.from_local(whole, dtensor.device_mesh, replicated, run_check=False)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor) -> DTensor:
    """Alias of :func:`redistribute_uneven_dtensor_to_replicated`, its name in earlier versions."""
    return redistribute_uneven_dtensor_to_replicated(dtensor)


def narrow_rows(tensor: DTensor, start: int, stop: int, shape: tuple[int, ...]) -> DTensor:
    """Some rows of a DTensor as a DTensor, without copying.

    Args:
        tensor: The tensor.
        start: First element of the rows, in the flattened tensor of a tensor-parallel rank.
        stop: One past their last element.
        shape: Shape of the result, over all tensor-parallel ranks.
    """
    spec, mine = narrowed_spec(tensor._spec, start, stop, shape), local_slice(tensor._spec)
    wanted = local_slice(spec)
    begin = max(start - mine.start, 0)
    local = tensor._local_tensor.reshape(-1)[begin : begin + wanted.stop - wanted.start].view(wanted.local_shape)
    return (RaggedDTensor if is_ragged(spec) else DTensor)(local, spec, requires_grad=False)


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | list[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Split a DTensor along a dimension into DTensors that share its memory. Nothing is gathered.

    Args:
        dtensor: The tensor.
        split_size_or_sections: Size of each result, except that the last one may be smaller; or a list of sizes.
        dim: Dimension to split.
        update_uneven_dtensor_chunk_meta: Apply :func:`update_uneven_dtensor_chunk_metadata` to the results.

    Raises:
        ValueError: ``dim`` is not 0 and a row of the tensor is split between ranks.
    """
    dim, size = dim % dtensor.dim(), dtensor.shape[dim % dtensor.dim()]
    if isinstance(split_size_or_sections, int):
        ends = [*range(split_size_or_sections, size, split_size_or_sections), size]
    else:
        ends = list(itertools.accumulate(split_size_or_sections))
    # Computing the metadata may be a collective, so do it once and not for every result.
    chunk = None if isinstance(dtensor, RaggedDTensor) else gather_and_compute_chunk_metadata(dtensor)
    for start, stop in itertools.pairwise([0, *ends]):
        shape = (*dtensor.shape[:dim], stop - start, *dtensor.shape[dim + 1 :])
        if chunk is None:
            yield _split_ragged(dtensor, start, stop, dim, shape)
            continue
        first = chunk.offsets[dim]
        begin, end = (min(max(at - first, 0), chunk.sizes[dim]) for at in (start, stop))
        shard_slice = DTensor.from_local(
            dtensor._local_tensor.narrow(dim, begin, end - begin),
            dtensor.device_mesh,
            dtensor.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=contiguous_stride(shape),
        )
        if update_uneven_dtensor_chunk_meta:
            update_uneven_dtensor_chunk_metadata(shard_slice)
        yield shard_slice


def _split_ragged(dtensor: DTensor, start: int, stop: int, dim: int, shape: tuple[int, ...]) -> DTensor:
    mine, spec = local_slice(dtensor._spec), dtensor._spec
    if mine.shape != tuple(dtensor.shape):
        raise NotImplementedError(
            "split_dtensor does not support tensors that are also tensor-parallel. Gather the tensor first, or split "
            "it before sharding."
        )
    row = max(_row(mine.shape), 1)
    if dim == 0:
        return narrow_rows(dtensor, start * row, stop * row, shape)
    local = dtensor._local_tensor
    if local.dim() != dtensor.dim() or any(cut % row for p in _ragged(spec) for cut in p.cuts):
        raise ValueError("split_dtensor: a row of the tensor is split between ranks. Split along dimension 0.")
    placements = [p.scaled(row, max(_row(shape), 1)) if isinstance(p, RaggedShard) else p for p in spec.placements]
    return make_dtensor(local.narrow(dim, start, stop - start), spec.mesh, shape, placements)


def _ragged(spec: Any) -> list[RaggedShard]:
    return [placement for placement in spec.placements if isinstance(placement, RaggedShard)]
