"""Gathers full tensors from DTensors with shards of any size. All functions with a process group are collectives."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from megatron.fsdp.comm.collectives import as_sent
from megatron.fsdp.comm.gloo import ensure_released
from megatron.fsdp.comm.journal import JOURNAL
from megatron.fsdp.comm.streams import wait_for
from megatron.fsdp.dtensor.placements import (
    SectionedShard,
    is_ragged,
    is_replicated,
    local_slice,
    ragged_axes,
    spec_like,
)


def gather_full(tensor: DTensor) -> torch.Tensor:
    """Gather the full tensor on every rank. A collective over every mesh axis that the tensor is sharded over."""
    # The journal tells ranks that wait for something else, such as a forward, what this one waits for.
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    with JOURNAL.recorded(f"gather a tensor of shape {tuple(tensor.shape)}", ranks):
        return _gather_full(tensor)


class ToLocal(torch.autograd.Function):
    """This rank's shard, with the gradient that this rank has for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        """Return the local tensor."""
        ctx.spec, ctx.kind = tensor._spec, type(tensor)
        local: torch.Tensor = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient as a sharded tensor."""
        sharded: torch.Tensor = ctx.kind(grad, spec_like(ctx.spec, grad.dtype), requires_grad=False)
        return sharded


class ToFull(torch.autograd.Function):
    """The full tensor of a sharded one. Forward and backward are collectives.

    The ranks' losses may use it differently. Backward averages its gradient over all ranks of the mesh, as gradients
    of the data are averaged. Tensor-parallel ranks have the same gradient, which their mean does not change.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        """Gather the tensor."""
        ctx.spec, ctx.kind, ctx.device = tensor._spec, type(tensor), tensor._local_tensor.device
        full = gather_full(tensor)
        # The main weight itself may be written before backward.
        return full.clone() if is_replicated(tensor._spec.placements) else full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the mean."""
        own = local_slice(ctx.spec).take_from(_averaged(grad, ctx.spec)).to(ctx.device)
        sharded: torch.Tensor = ctx.kind(own, spec_like(ctx.spec, own.dtype), requires_grad=False)
        return sharded


class OfAllShards(torch.autograd.Function):
    """The scalars that the ranks have computed from their shards, as a vector. The gradient is that of ToFull."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
        """Gather the scalars over the axes that shard the tensor."""
        ctx.spec, ctx.device, ctx.mine = spec, value.device, 0
        values = on_device(value.detach().reshape(1).clone(), spec.mesh)
        with JOURNAL.recorded(f"reduce a tensor of shape {tuple(spec.shape)}", spec.mesh.mesh.flatten().tolist()):
            for axis, placement in enumerate(spec.placements):
                if not isinstance(placement, Replicate):
                    group = spec.mesh.get_group(axis)
                    ctx.mine += group.rank() * len(values)
                    values = torch.cat(_all_gather_padded(values, 0, len(values), group))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return this rank's element of the mean."""
        return _averaged(grad, ctx.spec)[ctx.mine].to(ctx.device), None


def _averaged(grad: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    mesh = spec.mesh
    return reduce_over(grad.contiguous(), dist.ReduceOp.SUM, mesh, range(mesh.ndim)).div_(mesh.size())


def _gather_full(tensor: DTensor) -> torch.Tensor:
    spec, mesh = tensor._spec, tensor.device_mesh
    if is_replicated(spec.placements):
        return on_device(tensor._local_tensor.detach(), mesh)
    if not is_ragged(spec):
        return _gather_uneven(tensor)
    mine = local_slice(spec)
    flat = on_device(tensor._local_tensor.detach(), mesh).reshape(-1)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # Start with the axis whose ranks hold neighbouring shards, so that every step gathers a contiguous range.
    first = sum(coordinate[axis] * p.stride for axis, p in ragged_axes(spec))
    for axis, placement in ragged_axes(spec):
        size, step = mesh.size(axis), placement.stride
        first -= coordinate[axis] * step
        bounds = [placement.bounds(first + i * step)[0] for i in range(size)]
        bounds.append(placement.bounds(first + size * step - 1)[1])
        flat = _gather_ranges(flat, bounds, mesh.get_group(axis))
    own = flat.view(mine.shape)
    for axis, other in enumerate(spec.placements):
        if isinstance(other, (Shard, SectionedShard)):
            own = gather_chunks(own, other, tensor.shape, mesh.get_group(axis))
    return own


def on_device(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Copy a tensor in host memory to the mesh's device. Others stay: theirs may not be the current device."""
    return tensor if tensor.device.type == mesh.device_type else tensor.to(mesh.device_type)


def unreplicated_axes(tensor: DTensor) -> tuple[int, ...]:
    """The mesh axes over which a DTensor is not replicated."""
    return tuple(axis for axis, p in enumerate(tensor._spec.placements) if not isinstance(p, Replicate))


def reduce_over(
    value: torch.Tensor,
    operation: dist.ReduceOp.RedOpType,
    mesh: DeviceMesh,
    axes: Iterable[int],
    of: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Reduce a tensor of every rank over axes of the mesh, on the mesh's device. A collective.

    Reports name the shapes of the tensors that the value is ``of``. torch's own reduction waits where no report about
    hanging ranks could end the wait.
    """
    # gloo has no reductions of booleans. Gradients may be in host memory, where NCCL cannot reduce.
    sent = on_device((value.int() if value.dtype is torch.bool else value.clone()).detach(), mesh)
    is_extreme = value.is_floating_point() and operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    if is_extreme:
        # Of a NaN and a number, backends may return the number. Minima are maxima of negated values.
        sign, operation = (1 if operation == dist.ReduceOp.MAX else -1), dist.ReduceOp.MAX
        sent = torch.stack([(sign * sent).masked_fill(sent.isnan(), -torch.inf), sent.isnan().to(sent.dtype)])
    shape, more = tuple((of[0] if of else value).shape), f" and {len(of) - 1} more" if len(of) > 1 else ""
    with JOURNAL.recorded(f"reduce a tensor of shape {shape}{more}", mesh.mesh.flatten().tolist()):
        for axis in axes:
            group = mesh.get_group(axis)
            with ensure_released(group, sent):
                _finish(dist.all_reduce(sent, operation, group=group, async_op=True), group, sent)
    if is_extreme:
        sent = (sign * sent[0]).masked_fill(sent[1] > 0, torch.nan)
    return sent.to(value)


def _finish(work: dist.Work | None, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    if work is not None:  # as for ranks outside of the group
        wait_for(work, group, tensor.device)


def _gather_uneven(tensor: DTensor) -> torch.Tensor:
    """Gather a DTensor with torch's placements, whose local tensors may have any size."""
    if _needs_torch(tensor):
        by_torch: torch.Tensor = DTensor(tensor._local_tensor, tensor._spec, requires_grad=False).full_tensor()
        return by_torch.detach()
    whole = on_device(tensor._local_tensor.detach(), tensor.device_mesh)
    for axis, dim in sharded_axes(tensor):
        group = tensor.device_mesh.get_group(axis)
        lengths = lengths_on_ranks(whole.shape[dim], group, whole.device)
        received = _all_gather_padded(whole, dim, max(lengths), group)
        whole = torch.cat([shard.narrow(dim, 0, n) for shard, n in zip(received, lengths, strict=True)], dim)
    return whole.reshape(tensor.shape)


def _needs_torch(tensor: DTensor) -> bool:
    """Whether shards are partial, or even and in an order that only torch defines. At times a collective."""
    mesh, placements = tensor.device_mesh, tensor._spec.placements
    if any(placement.is_partial() for placement in placements):
        return True
    dims = [dim for _, dim in sharded_axes(tensor)]
    if len(set(dims)) == len(dims) and not any(isinstance(placement, _StridedShard) for placement in placements):
        return False
    # Several axes divide one dimension. If a rank has a different shape than torch gives it, all ranks must know that.
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    even = torch.tensor(float(tuple(tensor._local_tensor.shape) == tuple(shape)))
    return bool(reduce_over(even, dist.ReduceOp.MIN, mesh, range(mesh.ndim)))


def sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """The sharded mesh axes of a DTensor with torch's placements, and the tensor dimension that each one shards.

    Axes whose ranks hold neighbouring shards come first. If two axes shard one dimension unevenly, the order is that of
    the mesh, as in NVIDIA's Megatron-FSDP. torch itself does not define uneven shards.
    """
    axes, strided = [], []
    for axis, placement in enumerate(tensor._spec.placements):
        if isinstance(placement, _StridedShard):
            strided.append((axis, placement.dim))
        elif isinstance(placement, Shard):
            axes.append((axis, placement.dim))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"expected Shard and Replicate placements; got {placement}.")
    # A strided axis divides the shards of the other axes, so its ranks hold neighbouring ranges.
    return strided + axes


def lengths_on_ranks(length: int, group: dist.ProcessGroup, device: torch.device | str) -> list[int]:
    """Gather ``length`` from every rank of a group, in rank order. A collective."""
    mine = torch.tensor([length], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(mine) for _ in range(group.size())]
    with ensure_released(group, mine, *lengths):
        _finish(dist.all_gather(lengths, mine, group=group, async_op=True), group, mine)
    return [int(each) for each in lengths]


def _gather_ranges(mine: torch.Tensor, bounds: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather a flat tensor of which rank ``i`` of ``group`` holds elements ``bounds[i]`` to ``bounds[i + 1]``."""
    whole = mine.new_empty(bounds[-1] - bounds[0])
    shards = [whole[begin - bounds[0] : end - bounds[0]] for begin, end in itertools.pairwise(bounds)]
    owners = [rank for rank, shard in enumerate(shards) if shard.numel()]
    if 2 * len(owners) < group.size():
        # With few owners, a padded all-gather would need many times the memory of the tensor.
        shards[group.rank()].copy_(mine)
        for owner in owners:
            sent = as_sent(shards[owner])
            with ensure_released(group, sent):
                # The work holds the tensor, so no name may keep it: the context would wait for its own caller.
                _finish(dist.broadcast(sent, group=group, group_src=owner, async_op=True), group, whole)
        return whole
    received = _all_gather_padded(mine, 0, max(shard.numel() for shard in shards), group)
    for shard, from_rank in zip(shards, received, strict=True):
        shard.copy_(from_rank[: shard.numel()])
    return whole


def gather_chunks(
    own: torch.Tensor, placement: Shard | SectionedShard, shape: torch.Size, group: dist.ProcessGroup
) -> torch.Tensor:
    """Gather a tensor of ``shape`` from the ranks of a tensor-parallel axis."""
    dim = placement.dim
    full = -(-shape[dim] // group.size())
    received = _all_gather_padded(own, dim, full, group)
    if not isinstance(placement, SectionedShard):
        return torch.cat(received, dim).narrow(dim, 0, shape[dim])
    by_rank = [tensor.split(placement.sections) for tensor in received]
    return torch.cat([sections[i] for i in range(len(placement.sections)) for sections in by_rank])


def _all_gather_padded(own: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-gather tensors of different sizes, each padded with zeros to ``size`` along ``dim``; in rank order."""
    padded = own.new_zeros((*own.shape[:dim], size, *own.shape[dim + 1 :]))
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    sent = as_sent(padded)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    with ensure_released(group, sent, *received):
        _finish(dist.all_gather(received, sent, group=group, async_op=True), group, sent)
    return [shard.view(padded.dtype) for shard in received]
