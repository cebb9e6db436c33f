"""The data-parallel axes of the device mesh and their process groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp.comm.process_groups import new_group
from megatron.fsdp.helpers.arguments import check_type
from megatron.fsdp.helpers.spelling import did_you_mean

DEFAULT_SHARD_DIM = "dp_shard"


@dataclass(frozen=True)
class DataParallelAxes:
    """The data-parallel axes of one kind of parameters: dense ones or experts.

    Attributes:
        mesh: Mesh of the inner axis, or of the outer and the inner axis.
        inner: Process group of the inner axis.
        outer: Process group of the outer axis; None if there is none.
        gather: Process group for all-gathers, with the ranks of ``inner``; ``inner`` itself unless the user gave one.
        dp_group: Process group of all ranks of both axes.
        near: Process groups of neighbours on the inner axis, by their sizes; see :meth:`neighbours`.
    """

    mesh: DeviceMesh
    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    gather: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    near: dict[int, dist.ProcessGroup] = field(default_factory=dict, compare=False)

    def neighbours(self, number: int | None) -> dist.ProcessGroup | None:
        """The group of ``number`` neighbours on the inner axis that contains this rank, or of the nearest divisor.

        The first call with a number is a collective of all ranks.

        Returns:
            None for all ranks, and if no such number divides those of the inner axis.
        """
        ranks = dist.get_process_group_ranks(self.inner)
        number = math.gcd(number or 0, len(ranks))
        if number in (1, len(ranks)):
            return None
        if number not in self.near:
            first = self.inner.rank() // number * number
            self.near[number] = new_group(ranks[first : first + number], self.inner, "megatron_fsdp_neighbours")
        return self.near[number]

    @property
    def size(self) -> int:
        """Number of data-parallel ranks."""
        return self.inner.size() * (1 if self.outer is None else self.outer.size())

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the axes, inner axis first."""
        return [self.inner] if self.outer is None else [self.inner, self.outer]


class MeshIndex:
    """The axes of a device mesh that the engine uses.

    Args:
        device_mesh: Mesh that contains this rank.
        dp_shard_dim: Name of the inner axis: the one that parameters, gradients and optimizer state are sharded over.
            It may be the name of a flattened sub-mesh. None: the only axis of the mesh.
        dp_outer_dim: Name of the outer axis, over which the inner one is replicated (HSDP, hybrid FSDP).
        tp_dim: Name of the tensor-parallel axis, if the mesh has one.
        hybrid_fsdp_group: Process group of all ranks of both data-parallel axes. None: created if there is an outer
            axis.
        hybrid_fsdp_expt_group: The corresponding group of ``expt_device_mesh``.
        hsdp_outer_dp_shard: Whether the optimizer state is sharded over the outer axis. The strategy decides that; the
            value is kept as an attribute.
        expt_device_mesh: Mesh of expert parameters (those whose ``allreduce`` attribute is False, or that lack it and
            have ``.experts.`` in their names), with the same axis names. A mesh without these axes is ignored unless
            the model has experts.
        fsdp_group_ag: A separate process group with the ranks of the inner axis, which lets all-gathers run
            concurrently with reductions.
        expt_fsdp_group_ag: The corresponding group of ``expt_device_mesh``.

    Attributes:
        dense: Axes of all parameters except experts.
        experts: Axes of experts; equal to ``dense`` without ``expt_device_mesh``.
        expert_mesh_error: Why ``expt_device_mesh`` cannot be used; None if it can, or there is none.
        expects_experts: Whether a mesh of experts is an error for a model that has none, and experts are saved under
            their names in it. False: Megatron's adapter, which numbers them across ranks.

    Raises:
        ValueError: A name is not an axis of the mesh, no name is given for a mesh with several axes, or the ranks of a
            group differ from those of its axes.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: dist.ProcessGroup | None = None,
        hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    ) -> None:
        check_type("device_mesh", device_mesh, DeviceMesh, "torch's init_device_mesh makes one.")
        if dp_shard_dim is None:
            names = device_mesh.mesh_dim_names or ()
            if device_mesh.ndim != 1:
                raise ValueError(
                    f"dp_shard_dim: expected one of the axes {list(names)} of device_mesh; got None. Give the name of "
                    "the one to shard over."
                )
            dp_shard_dim = names[0] if names else None
        if hybrid_fsdp_group is not None and dp_outer_dim is None:
            raise ValueError("hybrid_fsdp_group spans two axes, so it needs dp_outer_dim, the name of the outer one.")
        if dp_shard_dim is not None and dp_shard_dim in (dp_outer_dim, tp_dim):
            raise ValueError(f"dp_shard_dim: expected an axis other than dp_outer_dim, tp_dim; got {dp_shard_dim!r}.")
        given = {"dp_shard_dim": dp_shard_dim, "dp_outer_dim": dp_outer_dim, "tp_dim": tp_dim}
        for argument, name in given.items():
            if name is not None:
                submesh(device_mesh, (name,), argument)
        self._submeshes: dict[tuple[bool, tuple[str, ...]], DeviceMesh] = {}
        self.device_mesh = device_mesh
        self.expt_device_mesh = expt_device_mesh
        self.dp_shard_dim = dp_shard_dim
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.dense = self._axes(device_mesh, hybrid_fsdp_group, fsdp_group_ag)
        self.experts = self.dense
        self.expects_experts = True
        self.expert_mesh_error = None if expt_device_mesh is None else self._missing_axis(expt_device_mesh)
        if expt_device_mesh is not None and self.expert_mesh_error is not None:
            self._given, self.expt_device_mesh = expt_device_mesh, None
        elif expt_device_mesh is not None:
            self.experts = self._axes(expt_device_mesh, hybrid_fsdp_expt_group, expt_fsdp_group_ag)

    def _missing_axis(self, mesh: DeviceMesh) -> str | None:
        """The error message for a mesh that lacks a data-parallel axis; None if it has all of them."""
        for name in (self.dp_shard_dim, self.dp_outer_dim):
            try:
                if name is not None:
                    submesh(mesh, (name,))
            except ValueError as error:
                return str(error)
        return None

    @property
    def divides_experts(self) -> bool:
        """Whether experts are sharded over other ranks than dense parameters, or may be meant to be."""
        groups = [self.experts.dp_group]
        if self.expert_mesh_error is not None:
            # Any axis of another name may be the data-parallel one. If none has the dense ranks, experts divide them.
            groups = [self._given.get_group(axis) for axis in range(self._given.ndim)]
        dense = set(dist.get_process_group_ranks(self.dense.dp_group))
        return all(set(dist.get_process_group_ranks(group)) != dense for group in groups)

    def check_expert(self, name: str) -> None:
        """Check that the expert parameter ``name`` can be sharded.

        Raises:
            ValueError: ``expt_device_mesh`` lacks a data-parallel axis.
        """
        # Deferred until an expert is found, because scripts pass expt_device_mesh for models without experts as well.
        if self.expert_mesh_error is not None:
            raise ValueError(
                f"Expert {name} cannot be sharded over expt_device_mesh: {self.expert_mesh_error} Name its axes, or "
                "flattened sub-meshes of it, like dp_shard_dim and dp_outer_dim."
            )

    def _axes(
        self, mesh: DeviceMesh, dp_group: dist.ProcessGroup | None, gather: dist.ProcessGroup | None
    ) -> DataParallelAxes:
        inner_mesh = mesh if self.dp_shard_dim is None else submesh(mesh, (self.dp_shard_dim,))
        if inner_mesh.ndim != 1:
            raise ValueError(
                f"dp_shard_dim: expected a single mesh axis; {self.dp_shard_dim!r} stands for {inner_mesh.ndim}."
            )
        inner = inner_mesh.get_group()
        if gather is not None:
            _check_ranks("fsdp_group_ag", gather, dist.get_process_group_ranks(inner))
        if self.dp_outer_dim is None or self.dp_shard_dim is None:
            return DataParallelAxes(inner_mesh, inner, None, gather or inner, inner)
        both = submesh(mesh, (self.dp_outer_dim, self.dp_shard_dim))
        outer = submesh(mesh, (self.dp_outer_dim,)).get_group()
        ranks = both.mesh.flatten().tolist()
        if dp_group is None:
            dp_group = new_group(ranks, inner, "megatron_fsdp_hybrid")
        _check_ranks("hybrid_fsdp_group", dp_group, ranks)
        return DataParallelAxes(both, inner, outer, gather or inner, dp_group)

    def tensor_parallel_mesh(self, expert: bool = False) -> DeviceMesh:
        """The tensor-parallel axis; with ``expert``, that of the expert mesh if there is one."""
        assert self.tp_dim is not None
        return self.get_submesh(self.tp_dim, expert and self.expt_device_mesh is not None)

    def with_tensor_parallel(
        self, mesh: DeviceMesh, tp_mesh: DeviceMesh, name: str, expert: bool = False
    ) -> DeviceMesh:
        """The mesh of the data-parallel axes ``mesh`` and the tensor-parallel axis of parameter ``name``.

        Raises:
            ValueError: ``tp_dim`` was not given, or is not the axis ``tp_mesh`` of the parameter.
        """
        if self.tp_dim is None or tp_mesh != self.tensor_parallel_mesh(expert):
            raise ValueError(
                f"Parameter {name} is a DTensor over {tp_mesh}: expected the tensor-parallel axis of device_mesh, "
                f"named by tp_dim; got tp_dim={self.tp_dim!r}."
            )
        names = (*(mesh.mesh_dim_names or ()), self.tp_dim)
        return self.get_submesh(names, expert and self.expt_device_mesh is not None)

    def spare_axes(self) -> dict[str, dist.ProcessGroup]:
        """Axes of the mesh with several ranks that no argument names, and the group of this rank along each of them."""
        named = [self.dense.dp_group, *([self.get_submesh(self.tp_dim).get_group()] if self.tp_dim else [])]
        # Axes that are flattened into a named one have some of its ranks.
        known = [set(dist.get_process_group_ranks(group)) for group in named]
        axes = {name: self.get_submesh(name).get_group() for name in self.device_mesh.mesh_dim_names or ()}
        ranks = {name: dist.get_process_group_ranks(group) for name, group in axes.items()}
        return {name: axes[name] for name in axes if not any(each.issuperset(ranks[name]) for each in known)}

    @property
    def has_gather_group(self) -> bool:
        """True if all-gathers have separate process groups, so that they can run concurrently with reductions."""
        return all(axes.gather is not axes.inner for axes in (self.dense, self.experts))

    @property
    def size(self) -> int:
        """Number of data-parallel ranks of dense parameters."""
        return self.dense.size

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The sub-mesh of the named axes.

        Raises:
            ValueError: A name is not an axis of the mesh (the message suggests the closest one), or
                ``is_expert_parallel`` is set without an expert mesh.
        """
        mesh = self.expt_device_mesh if is_expert_parallel else self.device_mesh
        if mesh is None:
            raise ValueError("get_submesh(is_expert_parallel=True): there is no expt_device_mesh.")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        found = self._submeshes.get((is_expert_parallel, names))
        if found is None:  # each parameter asks, and torch makes a new one each time, which takes long with many ranks
            found = self._submeshes[is_expert_parallel, names] = submesh(mesh, names)
        return found


def submesh(mesh: DeviceMesh, names: tuple[str, ...], argument: str = "") -> DeviceMesh:
    """The sub-mesh of the named axes, which may be flattened.

    Args:
        mesh: The mesh.
        names: Names of its axes.
        argument: The argument that the names are from, for the error message.

    Raises:
        ValueError: A name is not an axis of the mesh, or the axes are in a different order. The message has a remedy.
    """
    axes = mesh.mesh_dim_names or ()
    if names == tuple(axes):
        return mesh
    for name in names:
        try:
            mesh[name]
        except (KeyError, RuntimeError) as error:
            hint = did_you_mean(name, axes, cutoff=0.4)
            start = f"{argument}: the" if argument else "The"
            raise ValueError(f"{start} mesh has no axis {name!r}; its axes are {list(axes)}.{hint}") from error
    try:
        return mesh[names]
    except KeyError as error:
        raise ValueError(
            f"Expected a mesh whose axes are in the order {list(names)}, so that ranks of the last are neighbours; got "
            f"{list(axes)}. Make it with init_device_mesh(..., mesh_dim_names={names})."
        ) from error


def _check_ranks(name: str, group: dist.ProcessGroup, expected: list[int]) -> None:
    got = sorted(dist.get_process_group_ranks(group))
    if got != sorted(expected):
        raise ValueError(f"{name}: expected a group of ranks {sorted(expected)}; got {got}.")


def default_index(device: torch.device) -> MeshIndex:
    """An index with a single axis over all ranks of the default process group."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_SHARD_DIM,))
    return MeshIndex(mesh, DEFAULT_SHARD_DIM)
