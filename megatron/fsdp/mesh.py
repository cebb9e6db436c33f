"""The device mesh: which process groups parameters are sharded over."""

import difflib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEFAULT_SHARD_DIM = "dp_shard"


class FSDPDistributedIndex:
    """The axes of a device mesh that the engine uses.

    Args:
        device_mesh: Mesh that this rank is part of.
        dp_shard_dim: Name of the axis that parameters, gradients and optimizer state are sharded over (the inner
            axis). May be None if the mesh has one axis.
        tp_dim: Name of the tensor-parallel axis, if the mesh has one.

    Attributes:
        shard_mesh: One-dimensional mesh of the inner axis.
        dp_outer_dim: Name of the outer axis: None, there is none yet.

    Raises:
        ValueError: A name is not an axis of the mesh, or none is given and the mesh has several.
    """

    dp_outer_dim: str | None = None
    use_hybrid_fsdp: bool = False
    hsdp_outer_dp_shard: bool = False

    def __init__(self, device_mesh: DeviceMesh, dp_shard_dim: str | None = None, tp_dim: str | None = None) -> None:
        if dp_shard_dim is None:
            names = device_mesh.mesh_dim_names or ()
            if device_mesh.ndim != 1:
                raise ValueError(
                    f"dp_shard_dim: a mesh with axes {list(names)} needs the name of the one to shard over."
                )
            dp_shard_dim = names[0] if names else None
        self.device_mesh = device_mesh
        self.dp_shard_dim = dp_shard_dim
        self.tp_dim = tp_dim
        self.shard_mesh = device_mesh if dp_shard_dim is None else self.get_submesh(dp_shard_dim)
        if self.shard_mesh.ndim != 1:
            raise ValueError(
                f"dp_shard_dim: expected one axis of the mesh; {dp_shard_dim!r} has {self.shard_mesh.ndim}."
            )
        if tp_dim is not None:
            self.get_submesh(tp_dim)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Process group of the inner axis."""
        return self.shard_mesh.get_group()

    @property
    def shard_rank(self) -> int:
        """This rank's position on the inner axis."""
        return self.shard_mesh.get_local_rank()

    @property
    def shard_size(self) -> int:
        """Number of ranks on the inner axis."""
        return self.shard_mesh.size()

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The sub-mesh of the named axes.

        Raises:
            ValueError: A name is not an axis of the mesh; the message names the nearest.
            NotImplementedError: ``is_expert_parallel``: there is no mesh of experts.
        """
        if is_expert_parallel:
            raise NotImplementedError("Expert parallelism: the mesh has no axes for experts.")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        axes = self.device_mesh.mesh_dim_names or ()
        for name in names:
            if name not in axes:
                nearest = difflib.get_close_matches(str(name), axes, n=1, cutoff=0.4)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"The mesh has no axis {name!r}; its axes are {list(axes)}.{hint}")
        return self.device_mesh if names == tuple(axes) else self.device_mesh[names]

    def get_fsdp_group(self) -> dist.ProcessGroup:
        """Process group that parameters are sharded over."""
        return self.shard_group

    def get_dp_group(self) -> dist.ProcessGroup:
        """Process group of all data-parallel ranks."""
        return self.shard_group


def default_index(device: torch.device) -> FSDPDistributedIndex:
    """One axis over all ranks of the default process group."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_SHARD_DIM,))
    return FSDPDistributedIndex(mesh, DEFAULT_SHARD_DIM)


def require_process_group() -> None:
    """Raise a clear error if torch.distributed is not initialized.

    Raises:
        RuntimeError: There is no default process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized. Call torch.distributed.init_process_group() (under torchrun, or "
            "with world_size=1 for one process) before the model is sharded or run."
        )
