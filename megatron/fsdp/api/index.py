"""FSDPDistributedIndex: the axes of a device mesh, with the attributes and getters that Megatron-FSDP gave them."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.fsdp.sharding.mesh import MeshIndex


class FSDPDistributedIndex(MeshIndex):
    """The axes of a device mesh to shard over: a :class:`megatron.fsdp.sharding.mesh.MeshIndex` with more getters.

    The arguments are those of ``MeshIndex``: ``device_mesh``, the names of its axes, and process groups.
    """

    @property
    def use_hybrid_fsdp(self) -> bool:
        """True if there is an outer axis."""
        return self.dp_outer_dim is not None

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """Process group of the inner axis."""
        return self.dense.inner

    @property
    def outer_fsdp_group(self) -> dist.ProcessGroup | None:
        """Process group of the outer axis; None if there is none."""
        return self.dense.outer

    @property
    def hybrid_fsdp_group(self) -> dist.ProcessGroup | None:
        """Process group of both data-parallel axes; None if there is one axis."""
        return self.dense.dp_group if self.use_hybrid_fsdp else None

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Process group that parameters are sharded over.

        Args:
            is_expert_parallel: That of experts.
            independent_all_gather: The second group, for all-gathers; None if none was given.
        """
        axes = self.experts if is_expert_parallel else self.dense
        if independent_all_gather:
            return None if axes.gather is axes.inner else axes.gather
        return axes.inner

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Process group of the outer axis; None if there is none."""
        return (self.experts if is_expert_parallel else self.dense).outer

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The whole mesh; of experts, None if they have none of their own."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Position of this rank's shard of main weights among those of all data-parallel ranks, with hybrid FSDP.

        Parameters are sharded over the inner axis first, and each of these shards over the outer axis.

        Raises:
            ValueError: Nothing is sharded over the outer axis, or there is none.
        """
        axes = self.experts if is_expert_parallel else self.dense
        if axes.outer is None or not self.hsdp_outer_dp_shard:
            raise ValueError("get_logical_hybrid_fsdp_rank: expected dp_outer_dim, and hsdp_outer_dp_shard=True.")
        return axes.inner.rank() * axes.outer.size() + axes.outer.rank()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Process group of all data-parallel ranks."""
        return (self.experts if is_expert_parallel else self.dense).dp_group
