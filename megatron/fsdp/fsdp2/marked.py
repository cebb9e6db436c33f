"""Models that are sharded in place, when that is first needed: what was said about each module, and their engine.

A module is *marked* by :class:`MarkedModule` being among its classes and a :class:`Mark`. Marking changes no parameter.
The outermost marked module is sharded with everything in it by :func:`shard_if_pending`; marked modules inside are its
units. It then owns an :class:`InPlaceModel`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter import check_class
from megatron.fsdp.comm.backends import default_device, local_device
from megatron.fsdp.comm.streams import communication_stream
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.ragged_dtensor import is_sharded
from megatron.fsdp.optim.hooks import attach_at_first_use, attach_optimizer
from megatron.fsdp.runtime.builder import UnitSettings, build_engine, examine, preorder
from megatron.fsdp.runtime.other_engines import check_no_other_engine, refuse_others
from megatron.fsdp.runtime.partition import UnitPart, is_wrapped, partition, root_modules
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.sharding.mesh import FSDPDistributedIndex, default_index
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.state.loading import hook_state_dict, load


class MarkedModule(nn.Module):
    """Base of the classes of marked modules."""


@dataclass(eq=False)
class Mark:
    """What was said about one marked module.

    Attributes:
        mesh: Mesh that was given.
        index: Its axes; the same object for all modules marked for one mesh, until they are sharded.
        world: Default process group at that time.
        device: Where the module will compute.
        policy: Dtypes.
        input_dtype: What inputs of the forward are cast to; None for nothing.
        output_dtype: What its outputs are cast to; None for nothing.
        offload: Main weights are in host memory.
        reshard_after_forward: Release weights after forward. None: all but the outermost module's.
        shard_granularity: What is not divided between ranks.
        requires_gradient_sync: Gradients are reduced.
        requires_all_reduce: Gradients are reduced over the outer axis too.
        is_last_backward: The next backward is the last before the step.
        divisor: What the sum of gradients is divided by. None: the number of ranks.
        model: The model that the module is sharded with; None until then.
        unit: Its unit there; None if it has no parameters.
    """

    mesh: DeviceMesh | None
    index: FSDPDistributedIndex
    world: object
    device: torch.device
    policy: MixedPrecisionPolicy
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    offload: bool
    reshard_after_forward: bool | None
    shard_granularity: str = "row"
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True
    divisor: float | None = None
    model: "Callable[[], InPlaceModel | None]" = field(default=lambda: None)
    unit: Callable[[], Unit | None] = field(default=lambda: None)

    @property
    def keeps_weights(self) -> bool:
        """Weights stay gathered from forward to backward."""
        return self.reshard_after_forward is False


# Kept in a module's __dict__ themselves: they are none of its parameters, buffers and modules.
_MARK = "_fsdp_mark"
_MODEL = "_fsdp_model"

_pending: weakref.WeakSet[MarkedModule] = weakref.WeakSet()


def mark_of(module: nn.Module) -> Mark:
    """What was said about a marked module."""
    mark: Mark = module.__dict__[_MARK]
    return mark


def set_mark(module: MarkedModule, mark: Mark) -> None:
    """Mark a module; its class is that of a marked one already."""
    module.__dict__[_MARK] = mark
    _pending.add(module)


def is_pending(module: MarkedModule) -> bool:
    """True until the module is sharded."""
    return module in _pending


def owned_model(module: MarkedModule) -> "InPlaceModel | None":
    """The model whose outermost module this is; None for modules inside it."""
    model: InPlaceModel | None = module.__dict__.get(_MODEL)
    return model


class InPlaceModel:
    """A model that is sharded in place: its engine, and what was said about its modules.

    The outermost module owns this object, which does not hold that module.

    Args:
        root: The outermost module.
        config: Settings of the engine.
        index: Mesh and process groups.

    Attributes:
        engine: The engine.
        marks: The marks of all marked modules.
    """

    def __init__(self, root: MarkedModule, config: FSDPConfig, index: FSDPDistributedIndex) -> None:
        blueprint = examine(root, config, index, [MarkedModule], mark_of(root).device, _settings_of)
        self.engine = engine = build_engine(blueprint)
        self._agreed = False
        modules = [module for module in root.modules() if isinstance(module, MarkedModule)]
        self.marks = [mark_of(module) for module in modules]
        for mark in self.marks:
            mark.model = weakref.ref(self)
        for unit, (part, _) in zip(engine.units, preorder(blueprint.root), strict=True):
            mark_of(part.module).unit = weakref.ref(unit)
        # Parameters know the modules that they are registered with. The outermost one owns the engine and must not be
        # held by it: a module with the same dict of parameters takes its place.
        place = nn.Module()
        place.__dict__["_parameters"] = root._parameters
        for param in engine.params():
            param.sites = [(place if owner is root else owner, name) for owner, name in param.sites]
        refuse_others(root, is_wrapped)
        hook_state_dict(engine, root_modules(root))
        attach_at_first_use(engine, _attach)
        self.update_sync()

    def before_forward(self) -> None:
        """Prepare a forward of the outermost module. The first one waits for all ranks."""
        if not self._agreed:
            # Sharding itself waits for no other rank, so ranks are compared, and given equal weights, only now.
            self.engine.agree()
            self._agreed = True
            self.engine.broadcast_weights()
        for group in self.engine.groups:
            # Main weights may have been changed without an optimizer. Weights that are resharded follow anyway.
            if not group.weights.temporary:
                group.weights.invalidate()

    def update_sync(self) -> None:
        """Synchronize gradients if every marked module says so."""
        sync = all(mark.requires_gradient_sync and mark.requires_all_reduce for mark in self.marks)
        self.engine.is_last_microbatch = sync
        self.engine.model_auto_sync = sync and all(mark.is_last_backward for mark in self.marks)

    def load(self, root: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load whole tensors, tensors that are sharded as the model is, and tensors that are sharded evenly."""
        if any(is_sharded(value) for value in state_dict.values()):
            self.engine.agree()  # a tensor that is sharded in another way is gathered
        return load(self.engine, root, "", state_dict, strict)


def _settings_of(part: UnitPart) -> UnitSettings:
    mark = mark_of(part.module)
    return UnitSettings(mark.policy, mark.shard_granularity, mark.keeps_weights, mark.divisor)


def model_of(module: MarkedModule) -> InPlaceModel:
    """The model that the module is sharded with. Shards it if it is not sharded yet.

    Raises:
        RuntimeError: The model that the module was a part of is gone.
    """
    shard_if_pending(module)
    model = mark_of(module).model()
    if model is None:
        raise RuntimeError("The model that this module was sharded with has been deleted, and its weights with it.")
    return model


def shard_if_pending(module: MarkedModule) -> None:
    """Shard the outermost marked module around ``module``, unless it is sharded or about to be."""
    if module in _pending:
        around = [m for m in _pending if any(part is module for part in m.modules())]
        _shard(max(around, key=lambda m: sum(1 for _ in m.modules())))


def _shard(root: MarkedModule) -> None:
    mark = mark_of(root)
    marked = {name: module for name, module in root.named_modules() if isinstance(module, MarkedModule)}
    for name, module in marked.items():
        if module not in _pending:
            raise RuntimeError(
                f"{name} is sharded by itself already, because its parameters were asked for, or it was run, before "
                "fully_shard was called on a module around it. Call fully_shard on the whole model first."
            )
        if _ranks(mark_of(module).index) != _ranks(mark.index):
            raise NotImplementedError(f"mesh: {name} and the modules around it must have the same mesh.")
        if mark_of(module).offload != mark.offload:
            raise NotImplementedError(f"offload_policy: {name} and the modules around it must have the same.")
    check_no_other_engine(root)
    tensors = [t for m in root.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    _check_dtypes(partition(root, (MarkedModule,)))
    config = FSDPConfig(
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),  # each unit has its own
        init_model_with_meta_device=any(tensor.is_meta for tensor in tensors),
        offload_optimizer=mark.offload,
    )
    for module in marked.values():
        _pending.discard(module)
    try:
        root.__dict__[_MODEL] = InPlaceModel(root, config, _with_tensor_parallel(mark.index, tensors))
    except BaseException:
        # Whoever asks next must be told the same.
        for module in marked.values():
            _pending.add(module)
        raise


def _ranks(index: FSDPDistributedIndex) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in index.dense.groups]


def _check_dtypes(part: UnitPart) -> None:
    for param in part.params:
        check_class(param.name, param.compute)
        mark_of(part.module).policy.resolve(param.compute.dtype, param.name)
    for child in part.children:
        _check_dtypes(child)


def _with_tensor_parallel(index: FSDPDistributedIndex, tensors: Sequence[torch.Tensor]) -> FSDPDistributedIndex:
    """The axes, and the tensor-parallel one if parameters are DTensors."""
    mesh = next((t.data.device_mesh for t in tensors if isinstance(t.data, DTensor)), None)
    if mesh is None:
        return index
    names, whole = mesh.mesh_dim_names, index.device_mesh._get_root_mesh()
    if not names or len(names) != 1 or mesh._get_root_mesh() != whole:
        raise ValueError(
            f"Parameters are DTensors over {mesh}: expected one named axis of the mesh that fully_shard's mesh is "
            "a part of."
        )
    both = None if index.dense.outer is None else index.dense.dp_group
    return FSDPDistributedIndex(whole, index.dp_shard_dim, index.dp_outer_dim, names[0], both)


def axes_of(mesh: DeviceMesh | None, module: nn.Module) -> tuple[FSDPDistributedIndex, torch.device]:
    """Data-parallel axes and device for ``mesh``. Makes the process groups that are needed: all ranks must call it.

    Raises:
        ValueError: The mesh has neither one nor two axes, or two without names.
    """
    for other in _pending:
        mark = mark_of(other)
        if mark.world is dist.group.WORLD and mark.mesh == mesh:
            return mark.index, mark.device
    if mesh is None:
        device = default_device(module)
        index = default_index(device)
    else:
        names = mesh.mesh_dim_names
        if mesh.ndim > 2 or (mesh.ndim == 2 and not names):
            raise ValueError(f"mesh: expected one axis, or two with names (outer, inner); got {mesh}.")
        device = local_device(mesh.device_type)
        outer = names[0] if names and mesh.ndim == 2 else None
        index = FSDPDistributedIndex(mesh, names[-1] if names else None, outer)
    stream = communication_stream(device, index.dense.dp_group)
    for group in (*index.dense.groups, index.dense.dp_group):
        stream.group(group)
    return index, device


def _attach(optimizer: torch.optim.Optimizer) -> None:
    attach_optimizer(optimizer, needs_gradient=False)
