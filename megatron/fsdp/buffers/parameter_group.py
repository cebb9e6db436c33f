"""The parameters of one unit that share dtype and ``requires_grad``: their weights, gradients and DTensors."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from megatron.fsdp.buffers.flat_buffer import part_view
from megatron.fsdp.buffers.gradients import GradientBuffer
from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.buffers.pool import Pool, users_of
from megatron.fsdp.buffers.quantizing import QuantizationBatch
from megatron.fsdp.buffers.reduction import Reduction
from megatron.fsdp.buffers.weights import PlaneSet, WeightBuffer
from megatron.fsdp.comm.context import CommContext
from megatron.fsdp.comm.streams import Handle
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.placements import RaggedShard, SectionedShard
from megatron.fsdp.dtensor.ragged_dtensor import RaggedDTensor, local_shard, make_dtensor, make_like
from megatron.fsdp.dtensor.unsupported import local_gradient
from megatron.fsdp.helpers.autograd import in_backward
from megatron.fsdp.helpers.codes import keep_codes, scales_of
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.quantized.storage import WeightShard, WeightStorage, storage_of
from megatron.fsdp.sharding.layout import Granularity, Layout, ShardSlice
from megatron.fsdp.sharding.mesh import DataParallelAxes, MeshIndex
from megatron.fsdp.sharding.ownership import shards_of
from megatron.fsdp.sharding.packing import plan_layout, plan_layout_of_blocks
from megatron.fsdp.sharding.strategy import UNSHARDED


class ParameterGroup:
    """Parameters of one unit in one flat buffer.

    Args:
        params: Parameters with equal keys; at least one.
        config: Settings of the unit.
        index: Mesh and process groups.
        context: How the model communicates.
        pool: Provides the memory of temporary buffers.
        tp_mesh: Tensor-parallel axis, if any parameter of the model is a DTensor over it.
        from_first: For dense parameters and for experts: whether the first data-parallel rank gives initial values to
            the others, whose parameters may be on the meta device if ``config`` says so.

    Attributes:
        device: Where the group computes.
        requires_grad: Whether any of the parameters takes gradients.
        storage: How quantized compute weights are stored; None for others.
        initialized: Whether the parameters have values; those on the meta device have none until
            :meth:`initialize_main`.
        draws_shards: Whether each rank initializes its shards of main weights, and no rank the full parameters.
        used: For each parameter, whether this rank has had a gradient for it since the last synchronization.
        pending: Gradients were collected since then, if only zeros.
    """

    def __init__(
        self,
        params: list[ShardedParameter],
        config: FSDPConfig,
        index: MeshIndex,
        context: CommContext,
        pool: Pool,
        tp_mesh: DeviceMesh | None,
        from_first: tuple[bool, bool] = (False, False),
    ) -> None:
        key = params[0].key
        self._from_first = from_first[key.expert]
        self.requires_grad = key.requires_grad
        self.params = params
        self._config = config
        self._index = index
        self._tp_mesh = tp_mesh
        self._pool = pool
        self.device = context.device
        self.sharding = config.sharding_of(key.expert) if key.divisible else UNSHARDED
        self.storage = storage_of(params[0].compute)
        self.dtypes = config.mixed_precision_policy.resolve(key.dtype, params[0].name, key.codes)
        self.axes: DataParallelAxes = index.experts if key.expert else index.dense
        shards = shards_of(self.sharding, self.axes)
        self.layout = layout_of([e.local_shape for e in params], shards, config.granularity, self.storage)
        planes = () if self.storage is None else self.storage.planes
        shared = self.layout, self.dtypes, self.sharding, self.axes
        self.weights = WeightBuffer(*shared, context, pool, planes, config.reshard_after_forward)
        for plane in self.weights.planes:
            plane.buffer.kept = (
                f"This tensor is a weight of a sharded model ({params[0].name} or one of its group) that was kept from "
                "the forward of its FSDP unit. Its memory is freed after that: keep a copy, .clone(), instead."
            )
        reduction = Reduction(*shared, config, context, pool)
        self.gradients = GradientBuffer(reduction)
        self.used = [False] * len(params)
        self._attached: tuple[torch.Tensor, int] | None = None
        self._persistent: torch.Tensor | None = None
        self.pending = False
        self._move_into_buffers()

    def unshard_bytes(self, planes: PlaneSet = PlaneSet.ALL) -> int:
        """Size of the full compute weights."""
        return sum(plane.buffer.flat.nbytes for plane in self.weights.planes if planes.includes(plane))

    @property
    def reduce_bytes(self) -> int:
        """Size of one micro-batch's full gradients, as they are sent."""
        return self.layout.numel * self.gradients.reduction.sent_dtype.itemsize

    def _move_into_buffers(self) -> None:
        """Move the parameters' values into the buffers and make the parameters views of them.

        Parameters on the meta device have no values. They get memory, and the caller calls :meth:`initialize_main`
        after it has initialized them.
        """
        params, storage = self.params, self.storage
        plain = storage is None and not any(isinstance(param.compute, DTensor) for param in params)
        self.draws_shards = self._config.init_per_shard and plain and all(param.is_meta for param in params)
        if self.draws_shards:
            self.initialized = False
            return

        if params[0].key.codes:
            for owner in (owner for param in params for owner, _ in param.sites):
                keep_codes(owner)

        def value(param: ShardedParameter) -> torch.Tensor:
            return param.local_value if storage is None else storage.initial(param.compute)

        values = [None if param.is_meta else value(param) for param in params]
        self.initialized = bool(self._config.sync_module_states) or not any(param.is_meta for param in params)
        # Initial values of quantized parameters may be more precise than the dtype that these appear to have.
        exact = storage is not None and self.initialized
        views = self.weights.load(values, self.dtypes.main_params if exact else params[0].key.dtype)
        for param, view in zip(params, views, strict=True):
            if storage is None:
                param.point_to(view)
            elif not self.initialized:
                param.initialize_in(view)
        if self.initialized:
            self.initialize_main()

    def shards(self) -> list[tuple[torch.Tensor, int]]:
        """This rank's part of each main weight, flat, and its first element in the flat parameter."""
        parts = [self._shard_slice(i) for i in range(len(self.params))]
        return [(self.weights.main[p.shard_offset :][: p.stop - p.start], p.start) for p in parts]

    def initialize_main(self) -> None:
        """Make main weights of the parameters' present values, or begin with those that were drawn."""
        self.initialized = True
        if self.draws_shards:
            self.weights.begin()
        else:
            self.weights.initialize_main(self._from_first)
        for i, param in enumerate(self.params):
            if self.storage is not None:
                planes = [plane.buffer.views[i] for plane in self.weights.planes]
                param.bind(self.storage, planes, self.dtypes.compute)
            elif self.draws_shards or param.key.dtype != self.dtypes.compute:
                param.point_to(self.weights.compute.views[i])
            param.shard_slice = self._shard_slice(i)
            local = self._local(self.weights.main, param.shard_slice)
            param.main = nn.Parameter(self._distribute(local, i), requires_grad=self.requires_grad)
            # Frameworks mark parameters with attributes, and read them from the parameters that the optimizer holds.
            stored = frozenset() if self.storage is None else self.storage.fields
            for name, value in (vars(param.compute) | scales_of(param.compute)).items():
                if not callable(value) and name not in stored:
                    setattr(param.main, name, value)
            param.take_hooks(self.weights.temporary or self.weights.main_is_apart)
            param.watch_reads(functools.partial(weak_method(self._add_read), i))

    def quantize_with(self, batch: QuantizationBatch) -> None:
        """Let ``batch`` quantize the main weights of this group, whose compute weights are quantized."""
        assert self.storage is not None
        shards = []
        for param in self.params:
            part = param.shard_slice
            start, stop = part.shard_offset, part.shard_offset + part.stop - part.start
            planes = tuple(
                plane.own[start // kind.values_per_byte : stop // kind.values_per_byte]
                for plane, kind in zip(self.weights.planes, self.storage.planes, strict=True)
            )
            shards.append(WeightShard(param.compute, self.weights.main[start:stop], part.start, planes))
        batch.add(self.storage, self.weights.shared_by(), shards)
        self.weights.batch = batch

    def use_collectives(self, **operations: Any) -> None:
        """Communicate by other operations from now on; see :meth:`Collectives.replaced`. No task may be in flight."""
        self.weights.collectives = self.weights.collectives.replaced(**operations)
        reduction = self.gradients.reduction
        reduction.use(reduction.dtypes, reduction.collectives.replaced(**operations))

    def is_divided(self, i: int) -> bool:
        """True if no rank holds all of parameter ``i``."""
        parallel = self.params[i].tensor_parallel
        if parallel is not None and not all(placement.is_replicate() for placement in parallel[1]):
            return True
        slot, size = self.layout.slots[i], self.layout.shard_numel
        return slot.numel > 0 and slot.offset // size != (slot.end - 1) // size

    def _shard_slice(self, i: int) -> ShardSlice:
        if self.weights.owned.index is not None:
            return self.layout.shard_slice(i, self.weights.owned.index)
        slot = self.layout.slots[i]
        return ShardSlice(0, slot.numel, 0, slot.shape, slot.offset)

    @staticmethod
    def _local(flat: torch.Tensor, shard_slice: ShardSlice) -> torch.Tensor:
        """This rank's slice of a parameter, as a view of a tensor that is flat like the main weights."""
        return part_view(flat, shard_slice.shard_offset, shard_slice.shape)

    def _distribute(self, local: torch.Tensor, i: int) -> DTensor:
        """``local`` as a DTensor with the mesh and placements of parameter ``i``."""
        mesh: DeviceMesh = self.axes.mesh
        axes = [self.sharding.inner] if self.axes.outer is None else [self.sharding.outer, self.sharding.inner]
        placements: list[Placement] = []
        stride = 1
        # The inner axis shards the buffer, and the outer axis each inner rank's slice. Shards of outer neighbours
        # are adjacent, and those of inner neighbours are ``stride`` shards apart.
        for number, axis in enumerate(axes):
            placements.append(RaggedShard.of(self.layout, i, stride) if axis.shards_optimizer else Replicate())
            stride *= mesh.size(number) if axis.shards_optimizer else 1
        param, tp_mesh = self.params[i], self._tp_mesh
        if tp_mesh is not None:
            # Parameters that are not DTensors get this axis as well: clipping expects one mesh for all main weights.
            expert = self.axes is self._index.experts
            if param.tensor_parallel is not None:
                tp_mesh = param.tensor_parallel[0]
            elif expert:
                tp_mesh = self._index.tensor_parallel_mesh(expert)
            mesh = self._index.with_tensor_parallel(mesh, tp_mesh, param.name, expert)
            tp_placements = [Replicate()] if param.tensor_parallel is None else param.tensor_parallel[1]
            placements += tp_placements if param.sections is None else [SectionedShard(param.sections)]
        return make_dtensor(local, mesh, param.shape, placements, main=True)

    def show(self, compute: bool) -> None:
        """Register compute weights (or else main weights) as the modules' parameters.

        Other tensors stay: ``torch.func.functional_call`` puts those in their place that forward is to use. Of sharded
        ones, such as averages of weights, it uses the full tensors.
        """
        for param in self.params:
            shown, hidden = (param.compute, param.main) if compute else (param.main, param.compute)
            for module, attribute in param.sites:
                found = module._parameters.get(attribute)
                if found is hidden:
                    module._parameters[attribute] = shown
                elif compute and found is not shown and isinstance(found, RaggedDTensor):
                    module._parameters[attribute] = found.full_tensor()

    def follow_freezing(self) -> bool:
        """Freeze and unfreeze parameters as the user has; True if that changes anything."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = any([param.follow_freezing() for param in self.params])
        self.requires_grad = any(param.trained for param in self.params)
        return changed

    def collect_gradients(self) -> list[torch.Tensor | None]:
        """Remove this micro-batch's gradients from the parameters: one per parameter, None where there is none."""
        if any(param.autograd_may_write for param in self.params):
            self.gradients.for_kernels = None
        grads = [param.take_gradient() for param in self.params]
        # As in torch, parameters that were frozen since forward get none.
        with torch._C.DisableTorchFunctionSubclass():
            grads = [grad if e.main.requires_grad else None for e, grad in zip(self.params, grads, strict=True)]
        if self._config.report_nan_in_param_grad:
            for param, grad in zip(self.params, grads, strict=True):
                _require_finite(param.name, grad)
        return grads

    def reduce_gradients(self, last: bool) -> Handle | None:
        """Reduce or accumulate this micro-batch's gradients.

        Args:
            last: See :meth:`megatron.fsdp.runtime.unit.Unit.reduce_gradients`.

        Returns:
            The handle of the reduction; None if gradients were only accumulated.
        """
        grads = self.collect_gradients()
        self._recover_attached()
        self.used = [used or grad is not None for used, grad in zip(self.used, grads, strict=True)]
        self.pending = True
        if last or self.sharding.inner.shards_gradients:
            return self.gradients.reduce(grads, last)
        self.gradients.accumulate(grads)
        return None

    def has_gradients(self) -> bool:
        """True if a gradient of this micro-batch has not been collected."""
        return any(param.has_gradient for param in self.params)

    def enable_fused_gradients(self) -> None:
        """Let fused kernels write weight gradients into the buffer that is reduced, instead of giving them to autograd.

        In backward, Transformer Engine and Megatron-Core's tensor-parallel layers request memory from a parameter with
        ``__fsdp_param__`` (``get_main_grad()``), and keep it as ``main_grad``. ``overwrite_main_grad`` tells them to
        overwrite it; Megatron-Core's layers always do. Then they set ``grad_added_to_main_grad``. Autograd gets a
        placeholder of undefined content as ``.grad``, unless ``zero_out_wgrad`` is set.
        """
        for i, param in enumerate(self.params):
            parameter = param.compute
            parameter.__fsdp_param__ = True  # type: ignore[attr-defined]
            parameter.overwrite_main_grad = True  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            # A weak reference: the group holds the parameter, and a cycle would need the garbage collector.
            parameter.get_main_grad = functools.partial(weak_method(self.main_grad), i)  # type: ignore[attr-defined]

    def main_grad(self, i: int) -> torch.Tensor:
        """Memory for a kernel to overwrite with parameter ``i``'s gradient, in its shape and ``main_grads_dtype``.

        Outside of backward, where layers only check that there is some, it is a placeholder that cannot be written.
        """
        param = self.params[i]
        if not in_backward():
            return self._placeholder.expand(param.local_shape)
        return param.next_fused(self.gradients.for_kernel(i))

    @functools.cached_property
    def _placeholder(self) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtypes.main_grads, device=self.device)

    def take_gradients(self) -> torch.Tensor | None:
        """Remove and return the reduced gradients, flat like the main weights; None if there are none.

        A copy to the host has only been started.
        """
        self.used = [False] * len(self.params)
        self._recover_attached()
        self.pending = False
        return self.gradients.take(self._grad_dtype)

    @property
    def _grad_dtype(self) -> torch.dtype:
        # torch requires that ``.grad`` has the weight's dtype. A decoupled gradient may have another.
        decoupled = self._config.grad_attribute != "grad"
        return self.dtypes.main_grads if decoupled else self.dtypes.main_params

    @property
    def _grad_device(self) -> torch.device:
        return self.weights.main.device if self._config.offloads_gradients else self.device

    def attach_gradients(self, reduced: torch.Tensor | None, used: list[bool]) -> list[ShardedParameter]:
        """Add reduced gradients to the main weights' ``.grad``, and return the parameters that got one.

        With ``zero_unused_gradients``, parameters that are not frozen get zeros instead of nothing.

        Args:
            reduced: The result of :meth:`take_gradients`.
            used: For each parameter, whether any rank had a gradient for it.
        """
        zero_unused = self._config.zero_unused_gradients
        if self._config.cuda_graph_mode:
            return self._add_to_persistent(reduced)
        if reduced is None and zero_unused:
            reduced = torch.zeros(self.weights.main.numel(), dtype=self._grad_dtype, device=self._grad_device)
        if reduced is None:
            return []
        self._attached = (reduced, users_of(reduced)) if self._pool.keeps_gradients else None
        arrived = [e for e, flag in zip(self.params, used, strict=True) if flag or (zero_unused and e.trained)]
        for param in arrived:
            self._add_gradient(param, self._local(reduced, param.shard_slice))
        self._recover_attached()  # at once if everything was added to gradients that were there before
        self._pool.trim()
        return arrived

    def _add_gradient(self, param: ShardedParameter, local: torch.Tensor) -> None:
        """Add this rank's slice of a reduced gradient to the main weight's ``.grad``, or make it that."""
        with torch._C.DisableTorchFunctionSubclass():
            before = getattr(param.main, self._config.grad_attribute, None)
            hooks = param.main._backward_hooks
        if before is None or hooks:
            grad = param.hooked(make_like(local, param.main))
            local = local_shard(grad)
        if before is None:
            with torch._C.DisableTorchFunctionSubclass():
                setattr(param.main, self._config.grad_attribute, grad)
        else:
            local_gradient(param.main, before).add_(local)

    def _add_read(self, i: int, grads: tuple[torch.Tensor | None]) -> tuple[None]:
        """Add a gradient that autograd would accumulate in main weight ``i``, which was read outside of forward.

        Raises:
            NotImplementedError: The main weight has gradient hooks, which would see parts of its gradient.
        """
        param, (grad,) = self.params[i], grads
        if grad is not None and param.main.requires_grad:  # autograd looks at this now, too
            if param.has_hooks:
                raise NotImplementedError(
                    f"{param.name} has gradient hooks, and a loss reads it outside of the model's forward, as a "
                    "penalty on weights does. The hooks would see a part of its gradient. Read it in the forward of "
                    "the sharded model, or change .grad before the optimizer's step in place of the hooks."
                )
            if self._config.cuda_graph_mode:
                self._add_to_persistent(None)
            own = local_shard(grad)
            local = torch.zeros_like(local_shard(param.main), dtype=self._grad_dtype, device=self._grad_device)
            local.add_(own.to(local.device), alpha=self.gradients.reduction.factor_of_mean)
            self._add_gradient(param, local)
        return (None,)

    def _add_to_persistent(self, reduced: torch.Tensor | None) -> list[ShardedParameter]:
        """Add gradients to ``.grad`` tensors that keep their memory.

        A graph that is replayed runs the addition, but none of this code: ``.grad`` must be the tensor that it adds to.
        """
        if self._persistent is None:
            self._persistent = torch.zeros_like(self.weights.main, dtype=self._grad_dtype)
        name, trained = self._config.grad_attribute, [param for param in self.params if param.trained]
        for param in trained:
            local = self._local(self._persistent, param.shard_slice)
            grad = getattr(param.main, name, None)
            if grad is None:
                setattr(param.main, name, make_like(local.zero_(), param.main))
            elif local_shard(grad).data_ptr() != local.data_ptr():
                raise RuntimeError(
                    f"cuda_graph_mode: {name} of {param.name} was replaced by another tensor, which a graph would not "
                    "write to. Change gradients in place."
                )
        if reduced is not None:
            self._persistent.add_(reduced)
            self.gradients.give_back(reduced)
        return trained

    def _recover_attached(self) -> None:
        """Give the memory of an earlier step's ``.grad`` back to a pool that keeps it, unless a tensor still has it."""
        if self._attached is not None:
            attached, users = self._attached
            if users_of(attached) == users:
                self._attached = None
                self.gradients.give_back(attached)

    def clear_gradients(self, set_to_none: bool = True) -> None:
        """Drop all gradients: collected, reduced, and in ``.grad``, or fill that with zeros.

        Args:
            set_to_none: Drop ``.grad`` as well; has no effect in ``cuda_graph_mode``.
        """
        self.abandon_gradients()
        if self._persistent is not None:
            self._persistent.zero_()
            return
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                for name in {"grad", self._config.grad_attribute}:
                    if set_to_none and hasattr(param.main, name):
                        setattr(param.main, name, None)
                    elif (grad := getattr(param.main, name, None)) is not None:
                        local_shard(grad).zero_()

    def abandon_gradients(self) -> None:
        """Drop gradients that are not synchronized yet."""
        self.gradients.clear()
        self.used = [False] * len(self.params)
        self.pending = False
        for param in self.params:
            param.drop_gradient()


def _require_finite(name: str, grad: torch.Tensor | None) -> None:
    if grad is not None and not torch.isfinite(grad).all():
        kind = "NaN" if torch.isnan(grad).any() else "infinity"
        raise RuntimeError(f"The gradient of {name} has {kind} on this rank, before it is reduced.")


def layout_of(
    shapes: Sequence[tuple[int, ...]], shards: int, granularity: Granularity, storage: WeightStorage | None
) -> Layout:
    """The layout of a group.

    Args:
        shapes: Shape of each parameter on this tensor-parallel rank.
        shards: Number of ranks that shard it.
        granularity: Where the user allows to cut parameters.
        storage: How quantized parameters are stored, which may restrict it further.
    """
    if storage is None or storage.block_rows is None:
        return plan_layout(shapes, shards, granularity)
    ratio = math.lcm(*(plane.values_per_byte for plane in storage.planes))
    return plan_layout_of_blocks(shapes, shards, granularity, storage.block_rows, ratio)
