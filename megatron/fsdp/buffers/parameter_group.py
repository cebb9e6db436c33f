"""The parameters of one unit that share dtype and ``requires_grad``: their weights, gradients and DTensors."""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from megatron.fsdp.buffers.flat_buffer import part_view
from megatron.fsdp.buffers.gradients import GradientBuffer, GradientScaling
from megatron.fsdp.buffers.parameter import ParameterEntry
from megatron.fsdp.buffers.pool import Pool
from megatron.fsdp.buffers.weights import WeightBuffer
from megatron.fsdp.comm.streams import Handle, Stream
from megatron.fsdp.dtensor.placements import RaggedShard, SectionedShard
from megatron.fsdp.dtensor.ragged_dtensor import local_part, make_dtensor, make_like
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.sharding.layout import Granularity, Layout, Piece, plan_layout
from megatron.fsdp.sharding.mesh import DataParallelAxes, FSDPDistributedIndex
from megatron.fsdp.sharding.ownership import shards_of
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import UNSHARDED, Sharding


@dataclass(frozen=True)
class Environment:
    """What every parameter group of a model shares.

    Attributes:
        index: Mesh and groups.
        tp_mesh: Tensor-parallel axis, if any parameter is a DTensor over it.
        granularity: What is not divided between ranks.
        sharding: Where parameters, gradients and optimizer state live.
        policy: Dtypes.
        scaling: Of gradients.
        device: Where the model computes.
        main_device: Where main weights are.
        stream: Runs reductions, and whatever else is communicated.
        gather_stream: Runs gathers: the same stream, unless gathers have groups of their own.
        pool: Gives memory to temporary buffers.
        report_nan: Raise at gradients that are not finite.
        grad_attribute: Where main weights get their gradients.
    """

    index: FSDPDistributedIndex
    tp_mesh: DeviceMesh | None
    granularity: Granularity
    sharding: Sharding
    policy: MixedPrecisionPolicy
    scaling: GradientScaling
    device: torch.device
    main_device: torch.device
    stream: Stream
    gather_stream: Stream
    pool: Pool
    report_nan: bool
    grad_attribute: str


class ParameterGroup:
    """Parameters of one unit in one flat buffer.

    Args:
        entries: Parameters with equal keys; at least one.
        environment: What all groups of the model share.

    Attributes:
        requires_grad: Whether any of the parameters takes gradients.
        adopted: Whether the parameters have values; those on the meta device have none until :meth:`adopt`.
        used: For each parameter, whether this rank has had a gradient for it since the last synchronization.
        pending: Gradients were handed over since then, if only zeros.
    """

    def __init__(self, entries: list[ParameterEntry], environment: Environment) -> None:
        key = entries[0].key
        self.requires_grad = key.requires_grad
        self.entries = entries
        self._env = environment
        self.sharding = environment.sharding if key.divisible else UNSHARDED
        self.dtypes = environment.policy.resolve(key.dtype, entries[0].name)
        self.axes: DataParallelAxes = environment.index.experts if key.expert else environment.index.dense
        shards = shards_of(self.sharding, self.axes)
        self.layout: Layout = plan_layout([e.local_shape for e in entries], shards, environment.granularity)
        self.weights = WeightBuffer(
            self.layout,
            self.dtypes,
            self.sharding,
            self.axes,
            environment.gather_stream,
            environment.pool,
            environment.device,
            environment.main_device,
        )
        self.gradients = GradientBuffer(
            self.layout,
            self.dtypes,
            self.sharding,
            environment.scaling,
            self.axes,
            environment.stream,
            environment.pool,
            environment.main_device,
        )
        self.used = [False] * len(entries)
        self._handed: torch.Tensor | None = None
        self.pending = False
        self._take_over()

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self._env.device

    def _take_over(self) -> None:
        """Move the parameters' values into the buffers and make the parameters views of them.

        Parameters on the meta device have no values: they get memory, and :meth:`adopt` follows when it is filled.
        """
        values = [None if e.is_meta else e.local_value for e in self.entries]
        for entry, view in zip(self.entries, self.weights.load(values, self.entries[0].key.dtype), strict=True):
            entry.point_to(view)
        self.adopted = False
        if all(value is not None for value in values):
            self.adopt()

    def adopt(self) -> None:
        """What the parameters point to now are their values: make main weights of them."""
        self.adopted = True
        self.weights.adopt()
        for i, entry in enumerate(self.entries):
            if entry.key.dtype != self.dtypes.compute:
                entry.point_to(self.weights.compute.views[i])
            entry.piece = self._piece(i)
            local = self._local(self.weights.main, entry.piece)
            entry.main = nn.Parameter(self._distribute(local, i), requires_grad=self.requires_grad)
            # Frameworks mark parameters with attributes, and read them from whichever the optimizer holds.
            for name, value in vars(entry.compute).items():
                if not callable(value):
                    setattr(entry.main, name, value)
            entry.take_hooks()

    def is_divided(self, i: int) -> bool:
        """True if no rank owns the whole of parameter ``i``."""
        parallel = self.entries[i].tensor_parallel
        if parallel is not None and not all(placement.is_replicate() for placement in parallel[1]):
            return True
        slot, size = self.layout.slots[i], self.layout.shard_numel
        return slot.numel > 0 and slot.offset // size != (slot.end - 1) // size

    def _piece(self, i: int) -> Piece:
        if self.weights.owned.index is not None:
            return self.layout.piece(i, self.weights.owned.index)
        slot = self.layout.slots[i]
        return Piece(0, slot.numel, 0, slot.shape, slot.offset)

    @staticmethod
    def _local(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        """This rank's part of a parameter as a view of a tensor that is flat like the main weights."""
        return part_view(flat, piece.shard_offset, piece.shape)

    def _distribute(self, local: torch.Tensor, i: int) -> DTensor:
        """The main weight of parameter ``i`` as a DTensor, which tensors like it are made after."""
        mesh: DeviceMesh = self.axes.mesh
        axes = [self.sharding.inner] if self.axes.outer is None else [self.sharding.outer, self.sharding.inner]
        placements: list[Placement] = []
        stride = 1
        # The inner axis divides the buffer, and the outer one each inner rank's part: outer neighbours lie together.
        for number, axis in enumerate(axes):
            placements.append(RaggedShard.of(self.layout, i, stride) if axis.shards_optimizer else Replicate())
            stride *= mesh.size(number) if axis.shards_optimizer else 1
        entry, tp_mesh = self.entries[i], self._env.tp_mesh
        if tp_mesh is not None:
            # Also what is no DTensor, so that all main weights have one mesh, as clipping expects.
            expert = self.axes is self._env.index.experts
            if entry.tensor_parallel is not None:
                tp_mesh = entry.tensor_parallel[0]
            elif expert:
                tp_mesh = self._env.index.tensor_parallel_mesh(expert)
            mesh = self._env.index.with_tensor_parallel(mesh, tp_mesh, entry.name, expert)
            tp_placements = [Replicate()] if entry.tensor_parallel is None else entry.tensor_parallel[1]
            placements += tp_placements if entry.sections is None else [SectionedShard(entry.sections)]
        return make_dtensor(local, mesh, entry.shape, placements)

    def shard(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a whole tensor in parameter ``i``'s shape, as a DTensor."""
        piece = self.entries[i].piece
        if isinstance(tensor, DTensor):
            tensor = local_part(tensor)
        local = tensor.detach().reshape(-1)[piece.start : piece.stop].view(piece.shape).clone()
        return make_like(local, self.entries[i].main)

    def show(self, compute: bool) -> None:
        """Register compute weights (or else main weights) as the modules' parameters."""
        for entry in self.entries:
            parameter = entry.compute if compute else entry.main
            for module, attribute in entry.sites:
                module._parameters[attribute] = parameter

    def follow_freezing(self) -> bool:
        """Freeze and unfreeze what the user has frozen and unfrozen; True if that is new."""
        changed = any([entry.follow_freezing() for entry in self.entries])
        self.requires_grad = any(entry.trained for entry in self.entries)
        return changed

    def collect_gradients(self) -> list[torch.Tensor | None]:
        """Take this micro-batch's gradients off the parameters: one per parameter, None where there is none."""
        grads = [entry.take_gradient() for entry in self.entries]
        # As in torch, what was frozen since forward gets none.
        grads = [grad if e.main.requires_grad else None for e, grad in zip(self.entries, grads, strict=True)]
        if self._env.report_nan:
            for entry, grad in zip(self.entries, grads, strict=True):
                _require_finite(entry.name, grad)
        return grads

    def reduce_gradients(self, last: bool) -> Handle | None:
        """Hand this micro-batch's gradients over; see :meth:`megatron.fsdp.runtime.unit.Unit.reduce_gradients`."""
        grads = self.collect_gradients()
        self._recover_handed()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        self.pending = True
        if last or self.sharding.inner.shards_gradients:
            return self.gradients.reduce(grads, self.device, last)
        self.gradients.accumulate(grads)
        return None

    def has_gradients(self) -> bool:
        """True if a gradient of this micro-batch has not been collected."""
        return any(entry.has_gradient for entry in self.entries)

    def let_kernels_write(self) -> None:
        """Let fused kernels write weight gradients into buffers of ours, instead of returning them to autograd.

        Transformer Engine and Megatron-Core's tensor-parallel layers ask a parameter that has ``__fsdp_param__`` for
        a buffer (``get_main_grad()``), keep it as ``main_grad`` while the kernel runs, and set
        ``grad_added_to_main_grad``. Autograd then gets a placeholder of undefined content as ``.grad``, unless
        ``zero_out_wgrad`` is set.
        """
        for i, entry in enumerate(self.entries):
            parameter = entry.compute
            parameter.__fsdp_param__ = True  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            # The parameter must not keep its group alive: the group keeps the parameter.
            parameter.get_main_grad = functools.partial(weak_method(self.main_grad), i)  # type: ignore[attr-defined]

    def main_grad(self, i: int) -> torch.Tensor:
        """A new buffer of zeros, in parameter ``i``'s shape and ``main_grads_dtype``, for a kernel to write into."""
        entry = self.entries[i]
        buffer = torch.zeros(entry.local_shape, dtype=self.dtypes.main_grads, device=self._env.device)
        entry.fused.append(buffer)
        return buffer

    def attach_gradients(self, used: list[bool], zero_unused: bool) -> list[ParameterEntry]:
        """Add what was reduced to the main weights' ``.grad``, and return whose.

        Args:
            used: For each parameter, whether any rank had a gradient for it.
            zero_unused: Give the others zeros instead of nothing, unless they are frozen.
        """
        self.used = [False] * len(self.entries)
        self._recover_handed()
        self.pending = False
        # Optimizers ask of a gradient that its dtype is the weight's, but not of one that is apart.
        decoupled = self._env.grad_attribute != "grad"
        dtype = self.dtypes.main_grads if decoupled else self.dtypes.main_params
        reduced = self.gradients.take(dtype)
        if reduced is None and zero_unused:
            reduced = torch.zeros_like(self.weights.main, dtype=dtype)
        if reduced is None:
            return []
        self._handed = reduced if self._env.pool.recycles else None
        arrived = []
        for i, entry in enumerate(self.entries):
            if not used[i] and not (zero_unused and entry.trained):
                continue
            local, before = self._local(reduced, entry.piece), getattr(entry.main, self._env.grad_attribute, None)
            if before is None or entry.main._backward_hooks:
                grad = entry.hooked(make_like(local, entry.main))
                local = local_part(grad)
            if before is None:
                setattr(entry.main, self._env.grad_attribute, grad)
            else:
                local_part(before).add_(local)
            arrived.append(entry)
        return arrived

    def _recover_handed(self) -> None:
        """Give gradients of an earlier step back to a pool that uses them again, if nobody has them any more."""
        handed = self._handed
        if handed is None:
            return
        name, memory = self._env.grad_attribute, handed.untyped_storage().data_ptr()
        held = [getattr(entry.main, name, None) for entry in self.entries]
        if all(grad is None or local_part(grad).untyped_storage().data_ptr() != memory for grad in held):
            self._handed = None
            self.gradients.give_back(handed)

    def clear_gradients(self) -> None:
        """Drop gradients in every form."""
        self.abandon_gradients()
        for entry in self.entries:
            entry.main.grad = None
            if hasattr(entry.main, self._env.grad_attribute):
                setattr(entry.main, self._env.grad_attribute, None)

    def abandon_gradients(self) -> None:
        """Drop gradients that are not synchronized yet."""
        self.gradients.clear()
        self.used = [False] * len(self.entries)
        self.pending = False
        for entry in self.entries:
            entry.compute.grad = None
            entry.fused.clear()


def _require_finite(name: str, grad: torch.Tensor | None) -> None:
    if grad is not None and not torch.isfinite(grad).all():
        kind = "NaN" if torch.isnan(grad).any() else "infinity"
        raise RuntimeError(f"The gradient of {name} has {kind} on this rank, before it is reduced.")
