"""``torch.distributed.fsdp.fully_shard`` (FSDP2) on this engine: code that is written for it changes its import only.

    from megatron.fsdp.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

**When a model is sharded.** A call of :func:`fully_shard` marks a module and changes no parameter. The outermost
marked module, with everything in it, is sharded when something first asks for what sharding changes: ``parameters()``,
``named_parameters()``, ``state_dict()`` or ``load_state_dict()`` of a marked module, its forward, or a method of
:class:`FSDPModule` that needs weights. Marked modules inside are its units. So calls may be nested as deep as one
likes, a module that nothing marked is around is sharded by itself, and nobody has to say which call is the last.
Sharding waits for no other rank (process groups are made by the calls), so one rank may ask earlier than another, or
alone; whether all have the same model is compared before the first forward. Asking for the parameters of a part before
the call on the whole makes the part a model of its own; the whole is then refused.

**What the model is then.** The same object, also an instance of its own class and of :class:`FSDPModule`. At rest its
parameters are main weights: DTensors in the dtype that the model was built in, under their own names. The engine
(:class:`megatron.fsdp.runtime.engine.Engine`) belongs to the outermost module and refers to it weakly.

**The optimizer** needs no call either. At its first step, a hook that torch runs before every optimizer's step finds
parameters of such a model in it and does what :func:`megatron.fsdp.fully_shard_optimizer` does, also for parameters
that it got before the model was sharded.

``docs/fsdp2.md`` lists every argument and method: what works, what is accepted without effect, what is refused.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.fsdp2.marked import (
    Mark,
    MarkedModule,
    axes_of,
    is_pending,
    mark_of,
    model_of,
    owned_model,
    set_mark,
    shard_if_pending,
)
from megatron.fsdp.runtime.unit import Unit, WeightState
from megatron.fsdp.sharding.layout import parse_granularity
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy as EnginePolicy
from megatron.fsdp.state.loading import NO_COPY, NO_PICKLE, refuse_conversion

logger = logging.getLogger(__name__)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one module's computation.

    Attributes:
        param_dtype: What forward and backward compute with. None: the dtype that the parameters have. Main weights
            keep the parameters' own dtype and values.
        reduce_dtype: What gradients are reduced in. None: ``param_dtype``. They are accumulated in the parameters'
            own dtype.
        output_dtype: What floating-point outputs of the forward are cast to. None: nothing is cast.
        cast_forward_inputs: Cast floating-point inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is offloaded."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights, their gradients and so the optimizer's state are in host memory.

    Attributes:
        pin_memory: Accepted. The memory is pinned if the model computes on CUDA.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh are data-parallel. Can be imported; :func:`fully_shard` refuses it."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def _before_forward(module: "FSDPModule", args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Shard the model if it is not; cast the inputs of a forward, and move those of the outermost module."""
    model, dtype, device = model_of(module), mark_of(module).input_dtype, None
    if owned_model(module) is model:
        model.before_forward()
        device = None if is_on_host(model.engine.device) else model.engine.device
    return _cast((args, kwargs), dtype, device) if dtype or device else (args, kwargs)


def _after_forward(module: "FSDPModule", output: Any) -> Any:
    dtype = mark_of(module).output_dtype
    return output if dtype is None else _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Floating-point tensors in nested containers in another dtype, and all of them on another device."""

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and device is not None:
            item = item.to(device)
        if isinstance(item, torch.Tensor) and dtype is not None and item.is_floating_point():
            item = item.to(dtype)
        return item

    return tree_map(convert, value)


class UnshardHandle:
    """A gather that was started by ``unshard``."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for it, and make the whole weights the module's parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.state is WeightState.UNSHARDING:
            unit.use(WeightState.UNSHARDED)
        elif unit is not None and unit.state is WeightState.UNSHARDED:
            unit.show(compute=True)


def _accepted(name: str) -> Callable[..., None]:
    """A method without effect on what is computed."""

    def method(self: "FSDPModule", *args: Any, **kwargs: Any) -> None:
        """Accepted without effect; docs/fsdp2.md says why."""

    method.__name__ = name
    return method


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """A method that is not supported."""

    def method(self: "FSDPModule", *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError; docs/fsdp2.md says why."""
        raise NotImplementedError(f"{name}: {reason}")

    method.__name__ = name
    return method


class FSDPModule(MarkedModule):
    """What :func:`fully_shard` makes of a module: a class of its own that inherits from this and the module's class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of the original class: containers make one of their own class when they are sliced."""
        original: Any = cls.__bases__[1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise NotImplementedError(NO_COPY)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotImplementedError(NO_PICKLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; before the first time, shard the model."""
        args, kwargs = _before_forward(self, args, kwargs)
        return _after_forward(self, super().__call__(*args, **kwargs))

    # Parameters ------------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Main weights, by their names."""
        shard_if_pending(self)
        return super().named_parameters(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> "FSDPModule":
        """Freeze or unfreeze all parameters. Those that were frozen when the model was sharded remain so."""
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FSDPModule":
        """Apply ``to()``, ``to_empty()`` and the like: to everything before the model is sharded, then to buffers."""
        if is_pending(self) and not any(
            p.is_meta for m in self.modules() for p in m._parameters.values() if p is not None
        ):
            return super()._apply(fn, recurse)
        refuse_conversion(model_of(self).engine.params(), fn)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    # State -----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Main weights as DTensors, and buffers, under the names that the model has without sharding."""
        model_of(self).engine.show_main()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy whole tensors, or DTensors that are sharded as here or evenly, into the main weights.

        Args:
            state_dict: By the names that ``state_dict()`` uses.
            strict: Every parameter and buffer must be there, and nothing else.
            assign: Accepted. The values are copied all the same.

        Raises:
            RuntimeError: ``strict``, and keys are missing or unexpected.
            ValueError: A shape differs.
            NotImplementedError: This is a part of a sharded model.
        """
        model = model_of(self)
        if owned_model(self) is not model:
            raise NotImplementedError("load_state_dict of a part of a sharded model: load into the whole model.")
        return model.load(self, state_dict, strict)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module that belong to no marked module inside it, until its next forward.

        Args:
            async_op: Return a handle to wait for instead of waiting.
        """
        model_of(self).engine.agree()
        unit = mark_of(self).unit()
        if unit is not None and unit.state is WeightState.SHARDED:
            unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release what :meth:`unshard`, or a forward, has left gathered of this module's own parameters."""
        unit = mark_of(self).unit()
        if unit is not None and unit.state is WeightState.UNSHARDING:
            unit.reshard_unused()
        elif unit is not None and unit.state is WeightState.UNSHARDED:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that raised, and gradients that are not in ``.grad`` yet.

        Raises:
            RuntimeError: This is a part of a sharded model.
        """
        model = model_of(self)
        if owned_model(self) is not model:
            raise RuntimeError("reset_iter_state: call it on the outermost module that fully_shard was called on.")
        model.engine.abandon_pass()

    # Settings --------------------------------------------------------------------------------------------------

    def _marks(self, recurse: bool) -> list[Mark]:
        modules = self.modules() if recurse else [self]
        return [mark_of(module) for module in modules if isinstance(module, FSDPModule)]

    def _update_sync(self) -> None:
        model = mark_of(self).model()
        if model is not None:
            model.update_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether gradients are synchronized in backward, or accumulated for a later one that does it."""
        for mark in self._marks(recurse):
            mark.requires_gradient_sync = mark.requires_all_reduce = requires_gradient_sync
        self._update_sync()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether gradients are reduced over the outer axis, or accumulated for a later backward."""
        for mark in self._marks(recurse):
            mark.requires_all_reduce = requires_all_reduce
        self._update_sync()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether backward ends with gradients in ``.grad``, or leaves that to a later backward."""
        mark_of(self).is_last_backward = is_last_backward
        self._update_sync()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether weights are released after forward. Those of the outermost module never are."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward: expected a bool; got {reshard_after_forward!r}.")
        for mark in self._marks(recurse):
            mark.reshard_after_forward = reshard_after_forward
            if (unit := mark.unit()) is not None:
                unit.keeps_weights = mark.keeps_weights

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the gradients of this module's own parameters by ``factor``."""
        mark = mark_of(self)
        before, mark.divisor = mark.divisor, factor
        unit, model = mark.unit(), mark.model()
        if unit is not None and model is not None:
            unit.rescale_gradients((before or model.engine.index.size) / factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_modules_to_forward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """Accepted: the engine records in which order modules run, and gathers ahead in that order."""
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise ValueError(f"Expected modules that fully_shard was called on; got {type(module).__name__}.")

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch
    set_reshard_after_backward = _accepted("set_reshard_after_backward")
    set_unshard_in_backward = _accepted("set_unshard_in_backward")
    set_post_optim_event = _accepted("set_post_optim_event")
    set_force_sum_reduction_for_comms = _accepted("set_force_sum_reduction_for_comms")
    set_reduce_scatter_unused_params = _accepted("set_reduce_scatter_unused_params")
    set_reduce_scatter_max_input_buffers = _accepted("set_reduce_scatter_max_input_buffers")
    set_separate_reduce_scatter_group = _accepted("set_separate_reduce_scatter_group")
    _OWN = "the engine has collectives of its own. "
    set_custom_all_gather = _refused("set_custom_all_gather", _OWN + "Leave it out.")
    set_custom_reduce_scatter = _refused("set_custom_reduce_scatter", _OWN + "Leave it out.")
    set_all_reduce_hook = _refused("set_all_reduce_hook", _OWN + "Change .grad of the parameters after backward.")
    _BUFFERS = "buffers are registered with NCCL by megatron.fsdp.fully_shard_model(nccl_ub=True)."
    set_allocate_memory_from_process_group_for_comm = _refused(
        "set_allocate_memory_from_process_group_for_comm", _BUFFERS
    )
    set_symm_mem_for_comm = _refused("set_symm_mem_for_comm", _BUFFERS)


_classes: dict[type[nn.Module], type[FSDPModule]] = {}


def _marked_class(cls: type[nn.Module]) -> type[FSDPModule]:
    if cls not in _classes:
        metaclass: Any = type(cls)
        named = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = metaclass(f"FSDP{cls.__name__}", (FSDPModule, cls), named)
    return _classes[cls]


def fully_shard[T: nn.Module | list[nn.Module]](
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_granularity: str = "row",
) -> T:
    """Mark a module as one whose parameters are gathered and released together; see the head of this file.

    All ranks must call this alike.

    Args:
        module: The module, or a list of them, each of which is marked.
        mesh: One data-parallel axis, or two with names: parameters are sharded over the second, and the first repeats
            that (HSDP). None: one axis over all ranks. The same for all modules of a model.
        reshard_after_forward: Release weights after forward, and gather them again for backward. None: True. Those of
            the outermost module stay until backward in any case. A number of ranks, which divides the mesh's: 1 is
            False, and any other True. (torch leaves weights divided between as many, which are gathered faster.)
        shard_placement_fn: Must return None or ``Shard(0)`` for every parameter.
        mp_policy: Dtypes; may differ between the modules of a model.
        offload_policy: ``CPUOffloadPolicy()`` for main weights in host memory. The same for all modules of a model.
        ignored_params: Must be empty.
        dp_mesh_dims: Must be None.
        shard_granularity: What is not divided between ranks, as :func:`megatron.fsdp.fully_shard_model` has it:
            ``"tensor"`` for Muon, ``"parameter"`` for Adafactor or 8-bit Adam. May differ between modules. torch's
            function has no such argument.

    Returns:
        ``module`` itself, which is also an :class:`FSDPModule` from now on.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: An argument is not fit, or the module is marked already.
        NotImplementedError: An argument asks for what is not supported.
    """
    require_process_group()
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if ignored_params:
        raise NotImplementedError("ignored_params: every parameter inside is sharded. Leave it empty.")
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims: give the data-parallel axes as mesh, for instance mesh['dp'].")
    parse_granularity(shard_granularity)
    for each in modules:
        _check_module(each, shard_placement_fn)
    # torch's own policies, which have the same attributes, will do as well.
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    engine_policy = EnginePolicy(
        main_params_dtype=None,
        grad_comm_dtype=policy.reduce_dtype or policy.param_dtype,
        compute_dtype=policy.param_dtype,
    )
    for each in modules:
        index, device = axes_of(mesh, each)
        reshard = _reshard_after_forward(reshard_after_forward, index.dense.inner.size())
        each.__class__ = _marked_class(type(each))
        assert isinstance(each, FSDPModule)
        mark = Mark(
            mesh=mesh,
            index=index,
            world=dist.group.WORLD,
            device=device,
            policy=engine_policy,
            input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
            output_dtype=policy.output_dtype,
            offload=hasattr(offload_policy, "pin_memory"),
            reshard_after_forward=reshard,
            shard_granularity=shard_granularity,
        )
        set_mark(each, mark)
    return module


def _reshard_after_forward(value: bool | int | None, ranks: int) -> bool | None:
    """Whether weights are released after forward, also where a number of ranks says among how many they are to stay.

    Raises:
        ValueError: It is nothing of that, or not a divisor of ``ranks``.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward: expected a bool or a number of ranks; got {value!r}.")
    if value < 1 or ranks % value:
        raise ValueError(f"reshard_after_forward: expected a divisor of the mesh's {ranks} ranks; got {value}.")
    if 1 < value < ranks:
        _log_resharding(value, ranks)
    return value > 1


@functools.cache
def _log_resharding(value: int, ranks: int) -> None:
    logger.info(
        "reshard_after_forward=%d: weights are resharded to all %d ranks. Training is the same, with less memory than "
        "%d ranks would need, and with gathers from all ranks before backward.",
        value,
        ranks,
        value,
    )


def _check_module(module: nn.Module, placement: Callable[[nn.Parameter], object] | None) -> None:
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard was called on this {type(module).__name__} before. Call it once per module.")
    if not isinstance(module, nn.Module) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"fully_shard: expected a module that has a forward; got {type(module).__name__}.")
    if placement is None:
        return
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and placement(parameter) not in (None, Shard(0)):
                raise NotImplementedError(
                    f"shard_placement_fn: {type(part).__name__}.{name} is to be {placement(parameter)}. Only Shard(0) "
                    "on the mesh of fully_shard is supported."
                )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a marked module do what its forward does: gather the weights before, release them after.

    Args:
        module: The module. One that is not marked is left as it is.
        method_name: Name of the method.

    Raises:
        ValueError: It has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}.")
    # What is stored on the module must not keep it: a bound method does.
    bound, function, reference = hasattr(method, "__func__"), getattr(method, "__func__", method), weakref.ref(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "it is called through the module"
        args, kwargs = _before_forward(target, args, kwargs)
        unit, output = mark_of(target).unit(), None
        if unit is not None:
            args, kwargs = unit.pre_forward(target, args, kwargs) or (args, kwargs)
        try:
            output = function(target, *args, **kwargs) if bound else function(*args, **kwargs)
        finally:
            if unit is not None:
                unit.post_forward(target, args, kwargs, output)
        return _after_forward(target, output)

    setattr(module, method_name, functools.update_wrapper(run, function))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted: all models of a process share one communication stream per device."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expected modules that fully_shard was called on; got {type(module).__name__}.")
