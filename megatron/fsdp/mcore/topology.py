"""Builds device meshes from Megatron's process groups: data-parallel axes for dense parameters and experts, and TP.

Every pipeline stage and every expert-parallel rank has a separate mesh.
"""

import re
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.fsdp.api.index import FSDPDistributedIndex
from megatron.fsdp.buffers.parameter import SECTIONS, TENSOR_PARALLEL
from megatron.fsdp.comm.process_groups import new_group
from megatron.fsdp.mcore.parameter_names import layouts

OUTER, INNER, TENSOR = "dp_outer", "dp_cp", "tp"

_NEEDED = ("tp", "dp_cp", "intra_dp_cp", "inter_dist_opt", "expt_tp", "expt_dp", "intra_expt_dp")

_COLUMN, _ROW, _OFFSET = {"weight": 0, "bias": 0}, {"weight": 1}, {"softmax_offset": 0}
# The dimension along which layers of these classes, and of subclasses, split their parameters over tensor-parallel
# ranks, by the parameter's name without a number. Not all layers set attributes that say so. Classes are given by name,
# because Transformer Engine's exist only where it is installed.
DIVIDED = {
    "ColumnParallelLinear": _COLUMN,
    "TEColumnParallelLinear": _COLUMN,
    "TELayerNormColumnParallelLinear": _COLUMN,
    "TEColumnParallelGroupedLinear": _COLUMN,
    "VocabParallelEmbedding": {"weight": 0},
    "RowParallelLinear": _ROW,
    "TERowParallelLinear": _ROW,
    "TERowParallelGroupedLinear": _ROW,
    "DotProductAttention": _OFFSET,
    "TEDotProductAttention": _OFFSET,
}


@dataclass(frozen=True)
class _Groups:
    """Process groups for dense parameters or for experts.

    Attributes:
        tensor: Tensor-parallel ranks.
        inner: Ranks that shard parameters.
        dp_group: All data-parallel ranks, including context-parallel ones.
        outer: Ranks with the same shard in different optimizer instances; None if there is one instance.
    """

    tensor: dist.ProcessGroup
    inner: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    outer: dist.ProcessGroup | None

    def mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh of all axes. A collective over ``dp_group``."""
        tensor_ranks: list[list[int]] = [[] for _ in range(self.dp_group.size())]
        dist.all_gather_object(tensor_ranks, dist.get_process_group_ranks(self.tensor), group=self.dp_group)
        ranks = torch.tensor(tensor_ranks)
        axes = {INNER: self.inner, TENSOR: self.tensor}
        if self.outer is not None:
            axes = {OUTER: self.outer, **axes}
            ranks = ranks.view(self.outer.size(), self.inner.size(), -1)
        return DeviceMesh.from_group(list(axes.values()), device_type, mesh=ranks, mesh_dim_names=tuple(axes))

    def with_outer(self) -> "_Groups":
        """The same groups with an outer axis, of this rank alone if there is none."""
        return self if self.outer is not None else replace(self, outer=_or_alone(None, self.dp_group))

    def divided_into(self, instances: int) -> "_Groups":
        """The same ranks in a different number of optimizer instances, each of neighbours as in Megatron."""
        ranks = dist.get_process_group_ranks(self.dp_group)
        size, rest = divmod(len(ranks), instances)
        if rest or instances < 1:
            raise ValueError(
                f"expert_num_distributed_optimizer_instances: expected a divisor of {len(ranks)}, the number of "
                f"data-parallel ranks of experts; got {instances}."
            )
        number, place = divmod(self.dp_group.rank(), size)
        inner = new_group(ranks[number * size : (number + 1) * size], self.dp_group, "experts_inner")
        return replace(self, inner=inner, outer=new_group(ranks[place::size], self.dp_group, "experts_outer"))

    def same_ranks(self, other: "_Groups") -> bool:
        """Whether both consist of the same ranks."""
        pairs = (self.tensor, other.tensor), (self.inner, other.inner), (self.dp_group, other.dp_group)
        return all(dist.get_process_group_ranks(a) == dist.get_process_group_ranks(b) for a, b in pairs)


def divided_dim(module: nn.Module, name: str) -> int | None:
    """The dimension along which a parameter is split over tensor-parallel ranks; None if each rank has all of it.

    Args:
        module: The module that owns the parameter.
        name: The parameter's name in that module.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in DIVIDED:
            dim = DIVIDED[kind.__name__].get(re.sub(r"\d+$", "", name))
            if dim is not None:
                return dim
            break
    parameter = getattr(module, name)
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)


def mark_tensor_parallel(module: nn.Module, index: FSDPDistributedIndex) -> None:
    """Mark the parameters that are slices of tensor-parallel ones, by their layers' classes or by their attributes."""
    shapes: dict[str, tuple[int, ...]] = {}
    meshes = {expert: index.tensor_parallel_mesh(expert) for expert in (False, True)}
    for path, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            shapes[name] = tuple(parameter.shape)
            mesh = meshes[not getattr(parameter, "allreduce", True)]
            dim = divided_dim(owner, attribute)
            if dim is not None and mesh.size() > 1:
                setattr(parameter, TENSOR_PARALLEL, (mesh, (Shard(dim),)))
                shapes[name] = (*shapes[name][:dim], shapes[name][dim] * mesh.size(), *shapes[name][dim + 1 :])
    ranks = meshes[False].size()
    for name, layout in layouts(module, shapes).items():
        if layout.spread and ranks > 1:
            setattr(module.get_parameter(name), SECTIONS, tuple(rows // ranks for _, rows in layout.sections))


def make_index(
    groups: ProcessGroupCollection | None, device: torch.device, expert_instances: int | None = None
) -> FSDPDistributedIndex:
    """Build the index of the axes over which a model chunk is sharded. A collective over all ranks.

    Args:
        groups: Process groups. None: those of ``megatron.core.parallel_state``. Without ``tp`` there is no tensor
            parallelism.
        device: The device on which the model computes.
        expert_instances: The number of optimizer instances for experts. None: that for dense parameters.

    Raises:
        ValueError: The group ``dp_cp`` is missing, a group for all-gathers has other ranks than the inner axis, or the
            data-parallel ranks of experts cannot be divided into ``expert_instances``.
    """
    if groups is None:
        groups = ProcessGroupCollection.use_mpu_process_groups(list(_NEEDED))
    if groups.dp_cp is None:
        raise ValueError("pg_collection: expected dp_cp, the group of data- and context-parallel ranks; it has none.")
    outer = groups.inter_dist_opt if groups.inter_dist_opt is not None and groups.inter_dist_opt.size() > 1 else None
    tensor = _or_alone(groups.tp, groups.dp_cp)
    dense = _Groups(tensor, groups.dp_cp if outer is None else groups.intra_dp_cp, groups.dp_cp, outer)
    experts = dense
    if groups.expt_dp is not None:
        inner = groups.expt_dp if outer is None else groups.intra_expt_dp
        experts = _Groups(_or_alone(groups.expt_tp, groups.expt_dp), inner, groups.expt_dp, outer)
    if expert_instances not in (None, 1 if outer is None else outer.size()):
        # The mesh of the other parameters has the same axes, where one instance is an outer axis of one rank.
        dense, experts = dense.with_outer(), experts.divided_into(expert_instances)
        outer = dense.outer
    apart = not experts.same_ranks(dense)
    index = FSDPDistributedIndex(
        dense.mesh(device.type),
        dp_shard_dim=INNER,
        dp_outer_dim=None if outer is None else OUTER,
        tp_dim=TENSOR,
        hybrid_fsdp_group=None if outer is None else dense.dp_group,
        expt_device_mesh=experts.mesh(device.type) if apart else None,
        hybrid_fsdp_expt_group=experts.dp_group if apart and outer is not None else None,
        fsdp_group_ag=groups.dp_cp_ag,
        expt_fsdp_group_ag=groups.expt_dp_ag if apart else None,
    )
    index.expects_experts = False  # not every pipeline stage has any
    return index


def _or_alone(group: dist.ProcessGroup | None, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group; if it is None, a new group of this rank alone."""
    return new_group([dist.get_rank()], like, "no_tensor_parallelism") if group is None else group
