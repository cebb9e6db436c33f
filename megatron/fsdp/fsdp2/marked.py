"""Models that are sharded in place on first need: the settings of each marked module, and the engine of the model.

A *marked* module inherits from :class:`MarkedModule` and has a :class:`Mark` with its settings. Marking changes no
parameter. :func:`shard_if_pending` shards the outermost marked module with everything in it; the marked modules inside
become its units. The outermost module then owns an :class:`InPlaceModel`.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.buffers.parameter import check_class, refuse_early_read
from megatron.fsdp.comm.backends import compute_device, local_device
from megatron.fsdp.comm.streams import communication_stream
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor import torch_patches
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.dtensor.unsupported import refuse_join
from megatron.fsdp.helpers.autograd import outside_transforms, refuse_transforms
from megatron.fsdp.init.materialize import NO_VALUES, check_has_values, initialized_by_caller
from megatron.fsdp.optim.hooks import attach_at_first_use, attach_if_needed, watch_steps
from megatron.fsdp.runtime.agreement import as_text, checksum, difference, receive
from megatron.fsdp.runtime.builder import UnitSettings, build_engine, make_blueprint
from megatron.fsdp.runtime.partition import UnitPart, check_no_other_engine, root_modules
from megatron.fsdp.runtime.unit import Unit
from megatron.fsdp.sharding.mesh import MeshIndex, default_index
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.state.loading import hook_state_dict

logger = logging.getLogger(__name__)


class MarkedModule(nn.Module):
    """Base of the classes of marked modules."""

    join_hook = refuse_join


class Misused(ValueError, AssertionError):
    """Raised if :func:`fully_shard` is called on a module twice, or with a mesh of two axes without names.

    torch raises an AssertionError. These errors have its words.
    """


@dataclass(eq=False)
class Mark:
    """The settings of one marked module, or of several that are one unit.

    ``model`` and ``unit`` are weak references, since the outermost module owns both: a strong reference from a module
    inside would keep them alive after the model has been deleted.

    Attributes:
        mesh: The mesh given by the caller.
        index: Its axes. Modules marked for the same mesh share one object until they are sharded.
        world: The default process group when the module was marked.
        device: Device of the computation.
        policy: Dtypes.
        input_dtype: Dtype that inputs of the forward are cast to. None: no cast.
        output_dtype: Dtype that outputs of the forward are cast to. None: no cast.
        offload: Whether main weights are in host memory.
        reshard_after_forward: Whether the unit is resharded after forward, or a number of ranks that it is resharded
            to. None: True, except for the outermost unit.
        shard_granularity: Smallest unit of a parameter that is never split between ranks.
        ignored: Parameters that are left as they are, if this is the innermost marked module around them.
        replicated: Likewise, parameters that every rank holds in full.
        requires_gradient_sync: Whether gradients are reduced.
        requires_all_reduce: Whether gradients are reduced over the outer axis.
        is_last_backward: Whether the next backward is the last one before the optimizer's step.
        divisor: Divides the sum of gradients. None: the number of ranks.
        collectives: Operations that communicate the unit's weights and gradients in place of the engine's.
        model: Returns the model that the module belongs to; None before it is sharded or after it is deleted.
        unit: Returns the module's unit in that model; None also if the module has no parameters.
        guards: Hooks that refuse gradients of the parameters before the model is sharded, which would be lost.
    """

    mesh: DeviceMesh | None
    index: MeshIndex
    world: object
    device: torch.device
    policy: MixedPrecisionPolicy
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    offload: bool
    reshard_after_forward: bool | int | None
    shard_granularity: str = "row"
    ignored: frozenset[nn.Parameter] = frozenset()
    replicated: frozenset[nn.Parameter] = frozenset()
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True
    divisor: float | None = None
    collectives: dict[str, Any] = field(default_factory=dict)
    model: "Callable[[], InPlaceModel | None]" = field(default=lambda: None)
    unit: Callable[[], Unit | None] = field(default=lambda: None)
    guards: list[RemovableHandle] = field(default_factory=list)

    @property
    def keeps_weights(self) -> bool | None:
        """Whether the unit stays unsharded from forward to backward; None if that depends on its place."""
        value = self.reshard_after_forward
        return None if value is None else value is not True and value in (False, 1)

    @property
    def ranks_after_forward(self) -> int | None:
        """Number of ranks that the unit is resharded to; None if it is not to a part of them."""
        value = self.reshard_after_forward
        return None if value is None or isinstance(value, bool) or value == 1 else value


def check_reshard_after_forward(value: bool | int | None, ranks: int) -> None:
    """Raise ValueError if ``value`` has another type, or is a number that does not divide ``ranks``."""
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward: expected a bool or a number of ranks; got {value!r}.")
    if value < 1 or ranks % value:
        raise ValueError(f"reshard_after_forward: expected a divisor of the mesh's {ranks} ranks; got {value}.")


def check_module(module: nn.Module, placement: Callable[[nn.Parameter], object] | None) -> None:
    """Raise if :func:`fully_shard` has marked the module, cannot call it, or shards a parameter by other than rows."""
    if isinstance(module, MarkedModule):
        words = "Each distinct composable distributed API can only be applied to a module once."  # torch's
        raise Misused(f"fully_shard was called on this {type(module).__name__} before. {words}")
    if not isinstance(module, nn.Module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: expected a module that has one; "
            f"got {type(module).__name__}."
        )
    if placement is None:
        return
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and placement(parameter) not in (None, Shard(0), Shard(-parameter.ndim)):
                raise NotImplementedError(
                    f"shard_placement_fn: expected None or Shard(0), which is all that is supported; got "
                    f"{placement(parameter)} for {type(owner).__name__}.{name}."
                )


# Keys in the __dict__ of modules. Marks and models are stored there directly, without nn.Module.__setattr__.
_MARK = "_fsdp_mark"
_MODEL = "_fsdp_model"

# Marked modules that are not sharded yet.
_pending: weakref.WeakSet[MarkedModule] = weakref.WeakSet()


class _Unsharded(nn.Parameter):
    """A parameter of a marked module that is not sharded yet: the first use as a DTensor shards the model."""

    def __getattr__(self, name: str) -> Any:
        if name in ("full_tensor", "to_local", "redistribute", "device_mesh", "placements"):
            for module in list(_pending):
                if any(p is self for part in module.modules() for p in part._parameters.values()):
                    shard_if_pending(module)
                    return getattr(self, name)  # of the sharded parameter, which this one stands for now
        raise AttributeError(f"'Parameter' object has no attribute '{name}'")


def _set_class(root: nn.Module, before: type, after: type) -> None:
    for module in root.modules():
        for parameter in module._parameters.values():
            if type(parameter) is before:
                parameter.__class__ = after


def mark_of(module: nn.Module) -> Mark:
    """Return the settings of a marked module."""
    mark: Mark = module.__dict__[_MARK]
    return mark


def set_mark(module: MarkedModule, mark: Mark) -> None:
    """Store the settings of a module whose class has already been replaced by a marked one."""
    module.__dict__[_MARK] = mark
    ignored = _own_parameters(module, "ignored")
    mark.guards += [
        parameter.register_hook(functools.partial(refuse_early_read, name))
        for name, parameter in nn.Module.named_parameters(module)  # the module's own method would shard it
        if parameter.requires_grad and parameter not in ignored
    ]
    _set_class(module, nn.Parameter, _Unsharded)
    _pending.add(module)
    torch_patches.apply()  # state dicts may be the first need
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    watch_steps()  # now, because sharding in a step must not register hooks
    register_optimizer_step_pre_hook(_shard_before_step)


def _shard_before_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Shard the models whose parameters a step updates: its closure would shard them when the step has begun."""
    held = {id(p) for options in optimizer.param_groups for p in options["params"]} if _pending else set()
    for module in list(_pending):
        owned = (p for part in module.modules() for p in part._parameters.values() if p is not None)
        if held and any(id(parameter) in held for parameter in owned):
            shard_if_pending(module)
            attach_if_needed(optimizer)


def _own_modules(module: nn.Module) -> list[nn.Module]:
    """The module and those inside it, without marked ones and what these contain."""
    found = [module]
    for owner in found:
        found += [child for child in owner.children() if not isinstance(child, MarkedModule)]
    return found


def _own_parameters(root: nn.Module, kind: str) -> frozenset[nn.Parameter]:
    """The parameters in ``root`` that the innermost marked modules around them were given as ``kind``."""
    return frozenset(
        parameter
        for module in root.modules()
        if isinstance(module, MarkedModule)
        for owner in _own_modules(module)
        for parameter in owner._parameters.values()
        if parameter is not None and parameter in getattr(mark_of(module), kind)
    )


def is_pending(module: MarkedModule) -> bool:
    """Whether the module is marked but not sharded yet."""
    return module in _pending


def owned_model(module: MarkedModule) -> "InPlaceModel | None":
    """The model that the module owns as its outermost module; None for the modules inside."""
    model: InPlaceModel | None = module.__dict__.get(_MODEL)
    return model


class InPlaceModel:
    """A model that is sharded in place: its engine, and the settings of its marked modules.

    The outermost module owns this object. The object must not hold that module: the cycle would keep the model's memory
    until the garbage collector ran.

    Args:
        root: The outermost module.
        config: Settings of the engine.
        index: Mesh and process groups.

    Attributes:
        engine: The engine.
        marks: The settings of all marked modules.
        unset: Names of parameters that were NaN when the model was sharded, for the caller to initialize.
    """

    def __init__(self, root: MarkedModule, config: FSDPConfig, index: MeshIndex) -> None:
        with initialized_by_caller(root) as self.unset:
            blueprint = make_blueprint(root, config, index, [MarkedModule], mark_of(root).device, _settings_of, mark_of)
            self.engine = engine = build_engine(blueprint)
        self._agreed = False
        modules = [module for module in root.modules() if isinstance(module, MarkedModule)]
        self.marks = [mark_of(module) for module in modules]
        for mark in self.marks:
            mark.model = weakref.ref(self)
        for unit, part in zip(engine.units, blueprint.root.walk(), strict=True):
            mark = mark_of(part.module)
            mark.unit = weakref.ref(unit)
            if mark.collectives:
                engine.use_collectives(unit, **mark.collectives)
        # A parameter's sites name the modules that it is registered with, so that main and compute weights can be
        # swapped there. The outermost module owns the engine and must not be held by it, so a proxy that shares its
        # dict of parameters replaces it.
        holder = nn.Module()
        holder.__dict__["_parameters"] = root._parameters
        for param in engine.params():
            param.sites = [(holder if owner is root else owner, name) for owner, name in param.sites]
        hook_state_dict(engine, root_modules(root))
        attach_at_first_use(engine)
        self.update_sync()

    def before_forward(self) -> None:
        """Prepare a forward of the outermost module. The first call waits for all ranks."""
        if not self._agreed:
            # Sharding waits for no other rank, so this is the first point where ranks can compare their models and
            # receive equal weights.
            self.engine.agree()
            self._check_has_values()
            self._agreed = True
            self.engine.broadcast_weights()
        for group in self.engine.groups:
            # Main weights may have been changed without an optimizer. Units that are resharded need no invalidation:
            # their next unshard reads the main weights again, unless these are quantized in advance.
            if not group.weights.temporary or group.storage is not None:
                group.weights.invalidate()

    def _check_has_values(self) -> None:
        """Raise RuntimeError on all ranks if the caller has not initialized a parameter that was NaN."""
        if params := [param for param in self.engine.params() if param.name in self.unset]:
            flags = [bool(local_shard(param.main).isnan().any()) for param in params]
            for param, lacks in zip(params, self.engine.context.any_rank(flags).read(), strict=True):
                if lacks:
                    raise RuntimeError(NO_VALUES.format(param.name))

    def update_sync(self) -> None:
        """Apply the synchronization settings of the marked modules: the model synchronizes if all of them do."""
        sync = all(mark.requires_gradient_sync and mark.requires_all_reduce for mark in self.marks)
        self.engine.is_last_microbatch = sync
        self.engine.model_auto_sync = sync and all(mark.is_last_backward for mark in self.marks)


def _settings_of(part: UnitPart) -> UnitSettings:
    mark = mark_of(part.module)
    kept = mark.keeps_weights, mark.ranks_after_forward
    return UnitSettings(mark.policy, mark.shard_granularity, *kept, mark.divisor)


def model_of(module: MarkedModule, computes: bool = False) -> InPlaceModel:
    """Return the model that the module belongs to. Shard it if it is not sharded yet.

    Args:
        module: The module.
        computes: Whether a forward follows.

    Raises:
        RuntimeError: The model has been deleted, and this module inside it has survived; or a forward follows, and the
            model is on the meta device.
    """
    shard_if_pending(module, computes)
    model = mark_of(module).model()
    if model is None:
        raise RuntimeError("The model that this module was sharded with has been deleted, and its weights with it.")
    return model


def shard_if_pending(module: MarkedModule, computes: bool = False) -> None:
    """Shard the outermost marked module around ``module``, unless that is done or in progress; see :func:`model_of`."""
    if module in _pending:
        around = [m for m in _pending if any(inner is module for inner in m.modules())]
        outermost = max(around, key=lambda m: sum(1 for _ in m.modules()))
        if computes:
            refuse_transforms(type(module).__name__)
            check_has_values(outermost)
        outside_transforms(_shard, outermost)


@torch.inference_mode(False)  # the first forward may be an evaluation, whose tensors could not be trained later
def _shard(root: MarkedModule) -> None:
    mark = mark_of(root)
    marked = {name: module for name, module in root.named_modules() if isinstance(module, MarkedModule)}
    for name, module in marked.items():
        if module not in _pending:
            raise RuntimeError(
                f"{name} is already sharded as a separate model, because it was run or its parameters were read before "
                "fully_shard was called on a module around it. Call fully_shard on the whole model first."
            )
        if _ranks(mark_of(module).index) != _ranks(mark.index):
            raise NotImplementedError(f"mesh: {name} and the modules around it must have the same mesh.")
        if mark_of(module).offload != mark.offload:
            raise NotImplementedError(f"offload_policy: {name} and the modules around it must have the same policy.")
    check_no_other_engine(root)
    tensors = [t for m in root.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    _check_apart(root, set(marked.values()), {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)})
    config = FSDPConfig(
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),  # each unit has its policy
        sync_module_states=False,  # see equalize()
        init_model_with_meta_device=any(tensor.is_meta for tensor in tensors),
        offload_optimizer=mark.offload,
        ignored_params=_own_parameters(root, "ignored"),
        replicated_params=_own_parameters(root, "replicated"),
    )
    # Not pending from here on: building the engine reads parameters(), which must not shard the model again.
    for module in marked.values():
        _pending.discard(module)
        while guards := mark_of(module).guards:
            guards.pop().remove()
    _set_class(root, _Unsharded, nn.Parameter)
    try:
        root.__dict__[_MODEL] = InPlaceModel(root, config, _with_tensor_parallel(mark.index, tensors))
    except BaseException:
        # Pending again, so that the next access raises the same error instead of using an unsharded model.
        for module in marked.values():
            _pending.add(module)
        raise


def _check_apart(root: MarkedModule, inside: set[MarkedModule], mine: set[int]) -> None:
    """Check that no other model has a module of one of this model's units, or one of its parameters."""
    marks = {mark_of(module) for module in inside}
    for other in set(_pending) - {root}:
        if mark_of(other) is mark_of(root) or (other not in inside and mark_of(other) in marks):
            raise RuntimeError(
                f"FSDP requires a single root module but got a list with a {type(other).__name__}: call fully_shard on "
                "a module around all of the list, too, before the first of them runs or its parameters are read."
            )
    apart = (place for other in set(_pending) - inside for place in other.named_modules())
    keys = ((f"{name}.{key}".strip("."), p) for name, part in apart for key, p in part._parameters.items())
    if shared := [key for key, parameter in keys if id(parameter) in mine]:
        raise ValueError(
            f"Two sharded models share a parameter, {max(shared, key=len)}: shard a module that contains both."
        )


def _ranks(index: MeshIndex) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in index.dense.groups]


def _with_tensor_parallel(index: MeshIndex, tensors: Sequence[torch.Tensor]) -> MeshIndex:
    """The index, extended by the tensor-parallel axis if parameters are DTensors."""
    mesh = next((t.data.device_mesh for t in tensors if isinstance(t.data, DTensor)), None)
    if mesh is None:
        return index
    names, whole = mesh.mesh_dim_names, index.device_mesh._get_root_mesh()
    if not names or len(names) != 1 or mesh._get_root_mesh() != whole:
        raise ValueError(
            f"Parameters are DTensors over {mesh}: expected a mesh with one named axis and with the same root mesh as "
            "the mesh given to fully_shard."
        )
    both = None if index.dense.outer is None else index.dense.dp_group
    extended = MeshIndex(whole, index.dp_shard_dim, index.dp_outer_dim, names[0], both)
    extended.dense.near.update(index.dense.near)
    return extended


def axes_of(mesh: DeviceMesh | None, module: nn.Module) -> tuple[MeshIndex, torch.device]:
    """Return the data-parallel axes and the device for ``mesh``. Creates process groups: all ranks must call this.

    Raises:
        ValueError: The mesh has more than two axes, or two without names.
    """
    # Marked modules of one model share the groups. New groups for every call would cost memory and time on each rank.
    for other in _pending:
        mark = mark_of(other)
        if mark.world is dist.group.WORLD and mark.mesh == mesh:
            return mark.index, mark.device
    if mesh is None:
        device = compute_device(module)
        index = default_index(device)
    else:
        names = mesh.mesh_dim_names
        if mesh.ndim > 2:
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: replicate and shard.")
        if mesh.ndim == 2 and not names:
            raise Misused(f"Please init the 2D mesh for HSDP with mesh_dim_names specified; got {mesh}.")
        device = local_device(mesh.device_type)
        outer = names[0] if names and mesh.ndim == 2 else None
        index = MeshIndex(mesh, names[-1] if names else None, outer)
    # The stream's own process groups must be created here, in a call that all ranks make together: sharding later
    # communicates nothing, and one rank may do it before the others.
    stream = communication_stream(device, index.dense.dp_group)
    for group in (*index.dense.groups, index.dense.dp_group):
        stream.group(group)
    return index, device


# Models of which a difference between ranks was reported.
_reported: weakref.WeakSet[MeshIndex] = weakref.WeakSet()


def equalize(module: nn.Module, index: MeshIndex, device: torch.device, ignored: frozenset[nn.Parameter]) -> None:
    """Give the weights and buffers of the first rank to the others if they differ. A collective.

    Later there is no time for it: sharding communicates nothing, and leaves every rank with its shards. Marked modules
    inside the module were compared when they were marked.
    """
    for name, parameter in nn.Module.named_parameters(module):  # the module's own method would shard it
        if is_lazy(parameter) and parameter not in ignored:
            check_class(name, parameter)
    tensors: dict[str, torch.Tensor] = {}
    for owner in _own_modules(module):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or tensor in ignored:
                continue
            if isinstance(tensor.data, DTensor) or type(tensor.data) is torch.Tensor:
                value = local_shard(tensor.data) if isinstance(tensor.data, DTensor) else tensor.data
                tensors[f"{name} of {type(owner).__name__}, tensor {len(tensors)}"] = value
    found = {f"shape of {name}": f"{value.shape}, {value.dtype}, {value.is_meta}" for name, value in tensors.items()}
    real = {f"values of {name}": value for name, value in tensors.items() if not value.is_meta}
    found |= as_text({name: checksum(value) for name, value in real.items()}, device)
    group = index.dense.dp_group
    with suppress(ValueError):  # other shapes: all ranks raise an error before the first forward
        if text := difference(group, found, None):
            if group.rank() == 0 and index not in _reported:
                logger.warning("FSDP: %s", text)
            _reported.add(index)
            for value in real.values():
                receive(value, communication_stream(device, group), group)
