"""PyTorch's FSDP2 interface on this engine. Code written for torch's ``fully_shard`` only changes its import.

    from megatron.fsdp.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

**Sharding is deferred.** :func:`fully_shard` marks a module and changes no parameter. The outermost marked module is
sharded, with everything in it, on first need: ``parameters()``, ``named_parameters()``, ``state_dict()`` or
``load_state_dict()`` of a marked module, its forward, or a method of :class:`FSDPModule` that reads weights. The marked
modules inside it become its units. Deferral is necessary because a call on a submodule cannot tell whether a call on
its parent will follow, and the engine shards a whole model at once. A marked module without a marked parent is a model
of its own. Reading the parameters of a submodule before the call on its parent therefore makes the submodule a model,
and sharding the parent then raises an error.

**Sharding communicates nothing.** The process groups are created by :func:`fully_shard`, so one rank may shard earlier
than the others, or alone. The ranks compare their models before the first forward.

**The sharded model** is the same object, and an instance of both its original class and :class:`FSDPModule`. While it
is sharded, its parameters are main weights: DTensors in the dtype of the original parameters, under the same names.
The outermost module owns the engine (:class:`megatron.fsdp.runtime.engine.Engine`), which does not hold the module: a
deleted model frees its memory at once, without waiting for the garbage collector.

**The optimizer** needs no call. A hook that torch runs before every optimizer's step looks for parameters of a sharded
model and attaches the optimizer as :func:`megatron.fsdp.fully_shard_optimizer` does. The optimizer may have been built
before the model was sharded.

``docs/reference/fsdp2.md`` lists all arguments and methods: those that work, have no effect, or raise.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _apply_to_tensors
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map

from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.comm.process_groups import require_process_group
from megatron.fsdp.comm.streams import communication_stream
from megatron.fsdp.config import parameter_set
from megatron.fsdp.dtensor.unsupported import NO_COPY, OWNER
from megatron.fsdp.fsdp2.custom_collectives import all_gather_by, hook_in, reduce_scatter_by
from megatron.fsdp.fsdp2.marked import (
    Mark,
    MarkedModule,
    axes_of,
    check_module,
    check_reshard_after_forward,
    equalize,
    is_pending,
    mark_of,
    model_of,
    owned_model,
    set_mark,
    shard_if_pending,
)
from megatron.fsdp.helpers.autograd import outside_transforms
from megatron.fsdp.helpers.weak import not_compiled
from megatron.fsdp.runtime.structure import reject_conversion
from megatron.fsdp.runtime.unit import Unit, WeightState
from megatron.fsdp.sharding.layout import parse_granularity
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy as EnginePolicy
from megatron.fsdp.state.loading import NO_PICKLE, load

T = TypeVar("T", bound=nn.Module | list[nn.Module])


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one module's computation.

    Attributes:
        param_dtype: Dtype of compute weights. None: that of the original parameters. Main weights keep the dtype and
            values of the original parameters.
        reduce_dtype: Dtype in which gradients are reduced. None: as in the installed torch, ``param_dtype`` before
            2.15, and from then on the dtype of the original parameters. Gradients are accumulated in the latter.
        output_dtype: Dtype of the forward's floating-point outputs. None: outputs are not cast.
        cast_forward_inputs: Whether to cast floating-point inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Keeps everything on the device of the computation."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps main weights and their gradients, and therefore the optimizer's state, in host memory.

    Attributes:
        pin_memory: No effect. The memory is pinned if the model computes on CUDA.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names the data-parallel axes of a mesh. It can be imported, but :func:`fully_shard` raises if it is given."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def _before_forward(module: "FSDPModule", args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Shard the model if it is not sharded yet. Cast the forward's inputs, and move those of the outermost module."""
    model, dtype, device = model_of(module, computes=True), mark_of(module).input_dtype, None
    if owned_model(module) is model:
        outside_transforms(model.before_forward)
        device = None if is_on_host(model.engine.device) else model.engine.device
    return _cast((args, kwargs), dtype, device) if dtype or device else (args, kwargs)


def _after_forward(module: nn.Module, args: tuple, output: Any) -> Any:
    return output if (dtype := mark_of(module).output_dtype) is None else _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Cast floating-point tensors in nested containers to ``dtype``, and move all tensors to ``device``."""

    def convert(item: torch.Tensor) -> torch.Tensor:
        if device is not None:
            item = item.to(device)
        return item.to(dtype) if dtype is not None and item.is_floating_point() else item

    # torch's function enters dataclasses, and tree_map classes that are registered with it.
    return tree_map(functools.partial(_apply_to_tensors, convert), value)


class NotCopied(NotImplementedError, AssertionError):
    """Raised by ``copy.deepcopy`` of a sharded module. torch raises an AssertionError."""


class UnshardHandle:
    """The all-gathers that ``unshard(async_op=True)`` has started."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gathers, and make compute weights the module's parameters."""
        unit, self._unit = self._unit, None
        # A forward that has skipped the unit has not waited for its unshard.
        if unit is not None and unit.state in (WeightState.UNSHARDING, WeightState.UNSHARDED):
            unit.use(WeightState.UNSHARDED)


def _method_without_effect(name: str) -> Callable[..., None]:
    """Create a method that does nothing, for a setting of torch's that this engine does not need."""

    def method(self: "FSDPModule", *args: Any, **kwargs: Any) -> None:
        """No effect; docs/reference/fsdp2.md gives the reason."""

    method.__name__ = name
    return method


def _unsupported_method(name: str, reason: str) -> Callable[..., NoReturn]:
    """Create a method that raises NotImplementedError with ``reason``."""

    def method(self: "FSDPModule", *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError; docs/reference/fsdp2.md gives the reason."""
        raise NotImplementedError(f"{name}: {reason}")

    method.__name__ = name
    return method


class FSDPModule(MarkedModule):
    """Base of the classes that :func:`fully_shard` gives to modules, which also inherit from the module's own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a module of the original class. A sliced container calls its class, and the slice is not marked."""
        original: Any = cls.__bases__[1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise NotCopied(f"FSDP does not support deepcopy. {NO_COPY}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotImplementedError(NO_PICKLE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. The first call shards the model."""
        before = not_compiled(_before_forward) if torch.compiler.is_dynamo_compiling() else _before_forward
        args, kwargs = before(self, args, kwargs)  # how a model is sharded cannot be traced
        try:
            return super().__call__(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):  # after KeyboardInterrupt, torch calls no hook
                model_of(self).engine.schedule.forward_failed()
            raise

    # Parameters ------------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters. The first call shards the model."""
        shard_if_pending(self)
        return super().named_parameters(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> "FSDPModule":
        """Freeze or unfreeze all parameters."""
        # Not through parameters(), which would shard the model: freezing is common before the last fully_shard call.
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FSDPModule":
        """Apply ``to()`` or ``to_empty()``: to parameters and buffers before sharding, to buffers only afterwards."""
        # A model on the meta device is sharded first: each rank then allocates its shards instead of full parameters.
        if is_pending(self) and not any(
            p.is_meta for m in self.modules() for p in m._parameters.values() if p is not None
        ):
            return super()._apply(fn, recurse)
        model = model_of(self)
        reject_conversion((param.main for param in model.engine.params()), fn)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            for name, parameter in module._parameters.items():
                if parameter is not None and not hasattr(parameter, OWNER):
                    value = fn(parameter.data)
                    if parameter.is_meta:
                        module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
                    else:
                        parameter.data = value  # optimizers may hold this object
        return self

    # State -----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return main weights as DTensors, and buffers, under the names of the unsharded model."""
        model_of(self).engine.schedule.show_main()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy full tensors, DTensors of this model, or evenly sharded DTensors into the main weights.

        Args:
            state_dict: Tensors by the names that ``state_dict()`` uses.
            strict: Every parameter and buffer must be present, and nothing else.
            assign: No effect: values are always copied.

        Raises:
            RuntimeError: ``strict``, and keys are missing or unexpected. Or a shape differs: a ValueError, too.
        """
        model = model_of(self)
        return load(model.engine, self, "" if owned_model(self) is model else None, state_dict, strict)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this module's unit, until its next forward. Marked modules inside it are units of their own.

        Args:
            async_op: Return a handle to wait on, instead of waiting.
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
        """Reshard this module's unit, if :meth:`unshard` or a forward has left it unsharded."""
        unit = mark_of(self).unit()
        if unit is not None and unit.state in (WeightState.UNSHARDING, WeightState.UNSHARDED):
            unit.reshard()

    def mark_weights_changed(self) -> None:
        """Tell the model that main weights were written in a way that PyTorch does not count.

        Those are a collective, NumPy and ``to_local().data``. Call this before the next forward, on all ranks.
        """
        model_of(self).engine.invalidate_weights()

    def reset_iter_state(self) -> None:
        """Reset the model after a forward or backward that raised, and drop gradients that are not in ``.grad`` yet.

        Raises:
            RuntimeError: This is a submodule of a sharded model.
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
        if (model := mark_of(self).model()) is not None:
            model.update_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward synchronizes gradients, or accumulates them for a later backward that does."""
        for mark in self._marks(recurse):
            mark.requires_gradient_sync = mark.requires_all_reduce = requires_gradient_sync
        self._update_sync()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients over the outer axis, or accumulates them for a later backward."""
        for mark in self._marks(recurse):
            mark.requires_all_reduce = requires_all_reduce
        self._update_sync()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward ends with gradients in ``.grad``."""
        mark_of(self).is_last_backward = is_last_backward
        self._update_sync()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether units are resharded after forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward: expected a bool; got {reshard_after_forward!r}.")
        for mark in self._marks(recurse):
            mark.reshard_after_forward = reshard_after_forward
            if (unit := mark.unit()) is not None:
                unit.keep_weights(not reshard_after_forward)
        if (model := mark_of(self).model()) is not None:
            model.engine.schedule.plans.follow_units()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this module's unit by ``factor``, instead of by the number of ranks."""
        mark = mark_of(self)
        before, mark.divisor = mark.divisor, factor
        unit, model = mark.unit(), mark.model()
        if unit is not None and model is not None:
            unit.rescale_gradients((before or model.engine.index.size) / factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_custom_all_gather(self, comm: Any) -> None:
        """All-gather the weights of this module's unit by ``comm``.

        Args:
            comm: An ``AllGather`` of torch's FSDP2: ``allocate()`` returns its memory, and calling it gathers.
        """
        self._use_collectives(all_gather=all_gather_by(comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter the gradients of this module's unit by ``comm``.

        Args:
            comm: A ``ReduceScatter`` of torch's FSDP2: ``allocate()`` returns its memory, and calling it reduces.
        """
        self._use_collectives(reduce_scatter=reduce_scatter_by(comm))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with the reduced gradients of this module's unit, which it may change in place.

        Args:
            hook: Gets this rank's gradients, flat and divided, in the dtype that they are accumulated in: once in each
                backward that synchronizes, after the all-reduce of HSDP. On a CPU it runs in the communication thread.
            stream: CUDA stream to run it in. None: the communication stream.

        Raises:
            ValueError: ``stream`` is given for a mesh of two axes.
        """
        if stream is not None and mark_of(self).index.dense.outer is not None:
            raise ValueError("stream cannot be set when using native HSDP")  # torch's words
        self._use_collectives(reduced=hook if stream is None else hook_in(stream, hook))

    def _use_collectives(self, **operations: Any) -> None:
        mark = mark_of(self)
        mark.collectives |= operations
        unit, model = mark.unit(), mark.model()
        if unit is not None and model is not None:
            model.engine.use_collectives(unit, **operations)

    def set_modules_to_forward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """No effect: the engine records the order in which modules run, and prefetches in that order."""
        share_comm_ctx(modules)

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch
    set_reshard_after_backward = _method_without_effect("set_reshard_after_backward")
    set_unshard_in_backward = _method_without_effect("set_unshard_in_backward")
    set_post_optim_event = _method_without_effect("set_post_optim_event")
    set_force_sum_reduction_for_comms = _method_without_effect("set_force_sum_reduction_for_comms")
    set_reduce_scatter_unused_params = _method_without_effect("set_reduce_scatter_unused_params")
    set_reduce_scatter_max_input_buffers = _method_without_effect("set_reduce_scatter_max_input_buffers")
    set_separate_reduce_scatter_group = _method_without_effect("set_separate_reduce_scatter_group")
    _BUFFERS = "buffers are registered with NCCL by megatron.fsdp.fully_shard_model(nccl_ub=True)."
    set_allocate_memory_from_process_group_for_comm = _unsupported_method(
        "set_allocate_memory_from_process_group_for_comm", _BUFFERS
    )
    set_symm_mem_for_comm = _unsupported_method("set_symm_mem_for_comm", _BUFFERS)
    set_keep_unsharded_storage = _unsupported_method(
        "set_keep_unsharded_storage",
        "buffers keep their addresses with megatron.fsdp.fully_shard_model(cuda_graph_mode=True).",
    )
    _FINALIZATION = "call set_is_last_backward(False) before every backward but the last one."
    set_manual_backward_finalization = _unsupported_method("set_manual_backward_finalization", _FINALIZATION)
    finalize_backward = _unsupported_method("finalize_backward", _FINALIZATION)


_classes: dict[type[nn.Module], type[FSDPModule]] = {}


def _marked_class(cls: type[nn.Module]) -> type[FSDPModule]:
    # The metaclass of the original class makes the new one, since modules may have a metaclass other than ``type``.
    if cls not in _classes:
        metaclass: Any = type(cls)
        named = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = metaclass(f"FSDP{cls.__name__}", (FSDPModule, cls), named)
    return _classes[cls]


def fully_shard(
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
    replicated_params: set[nn.Parameter] | None = None,
) -> T:
    """Mark a module, or several, as a unit: its parameters are unsharded and resharded together.

    The model is sharded later, on first need; the docstring of this file says when. All ranks must make the same calls.

    Args:
        module: The module, or a list of modules. A list is one unit: it is unsharded before the first of them runs
            and resharded after the last one.
        mesh: One data-parallel axis, or two named ones: parameters are sharded over the second and replicated over the
            first (HSDP). None: one axis over all ranks. It must be the same for all modules of a model.
        reshard_after_forward: Whether to reshard the unit after forward and unshard it again for backward. None: True,
            but False for the outermost module. A number must divide the ranks of the (inner) axis: the unit is
            resharded to groups of so many neighbouring ranks, which makes the second all-gather faster and keeps a
            larger shard until backward. 1 means False.
        shard_placement_fn: Must return None or ``Shard(0)`` for every parameter.
        mp_policy: Dtypes. They may differ between the modules of a model.
        offload_policy: ``CPUOffloadPolicy()`` keeps main weights in host memory. It must be the same for all modules
            of a model.
        ignored_params: Parameters that stay as they are: neither moved nor sharded, and their gradients are those of
            each rank. As in torch, those inside a module that was marked before count only if that call got them.
        dp_mesh_dims: Must be None.
        shard_granularity: Smallest unit of a parameter that is never split between ranks, as in
            :func:`megatron.fsdp.fully_shard_model`: ``"tensor"`` for Muon, ``"parameter"`` for Adafactor or 8-bit Adam.
            It may differ between modules. torch's function has no such argument.
        replicated_params: Parameters that every rank keeps in full: not sharded, and their gradients are averaged as
            with DDP. Those inside a module that was marked before count only if that call got them. torch's function
            has no such argument.

    Returns:
        ``module`` itself, which is now also an :class:`FSDPModule`.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: An argument is invalid, or the module is already marked.
        NotImplementedError: An argument requests a feature that is not supported.
    """
    require_process_group()
    modules = list(dict.fromkeys(module)) if isinstance(module, (list, tuple)) else [module]
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims: give the data-parallel axes as mesh, for instance mesh['dp'].")
    parse_granularity(shard_granularity)
    for each in modules:
        check_module(each, shard_placement_fn)
    # torch's policy classes are accepted too: only attributes are read, and theirs have the same names.
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    engine_policy = _engine_policy(policy)
    ignored = parameter_set("ignored_params", ignored_params)
    replicated = parameter_set("replicated_params", replicated_params)
    index, device = axes_of(mesh, nn.ModuleList(modules))
    check_reshard_after_forward(reshard_after_forward, index.dense.inner.size())
    mark = Mark(
        mesh=mesh,
        index=index,
        world=dist.group.WORLD,
        device=device,
        policy=engine_policy,
        input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
        output_dtype=policy.output_dtype,
        offload=hasattr(offload_policy, "pin_memory"),
        reshard_after_forward=reshard_after_forward,
        shard_granularity=shard_granularity,
        ignored=ignored,
        replicated=replicated,
    )
    if (near := index.dense.neighbours(mark.ranks_after_forward)) is not None:
        communication_stream(device, index.dense.dp_group).group(near)  # now: sharding communicates nothing
    for each in modules:
        equalize(each, index, device, ignored)
        each.__class__ = _marked_class(type(each))
        assert isinstance(each, FSDPModule)
        set_mark(each, mark)
        if mark.output_dtype is not None:  # as torch does: hooks that are registered later see the cast
            each.register_forward_hook(_after_forward)
    return module


def _state(module: nn.Module) -> Mark | None:
    """The settings of a module that :func:`fully_shard` was called on; None for others."""
    return mark_of(module) if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]


def _engine_policy(policy: MixedPrecisionPolicy) -> EnginePolicy:
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError("param_dtype_override_fn: the parameters of a module have one dtype. Leave it out.")
    reduce_dtype = policy.reduce_dtype
    if reduce_dtype is None and TorchVersion(torch.__version__) < "2.15":
        reduce_dtype = policy.param_dtype
    return EnginePolicy(main_params_dtype=None, grad_comm_dtype=reduce_dtype, compute_dtype=policy.param_dtype)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a marked module unshard and reshard its unit as forward does.

    Args:
        module: The module. A module that is not marked is not changed.
        method_name: Name of the method.

    Raises:
        ValueError: The module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}.")
    # The wrapper is stored on the module. A bound method would hold the module, and the cycle would keep it alive.
    bound, function, reference = hasattr(method, "__func__"), getattr(method, "__func__", method), weakref.ref(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "the method was called after its module had been deleted"
        args, kwargs = _before_forward(target, args, kwargs)
        unit, output = mark_of(target).unit(), None
        if unit is not None:
            args, kwargs = unit.pre_forward(target, args, kwargs) or (args, kwargs)
        try:
            output = function(target, *args, **kwargs) if bound else function(*args, **kwargs)
        finally:
            if unit is not None:
                unit.post_forward(target, args, kwargs, output)
        return _after_forward(target, args, output)

    setattr(module, method_name, functools.update_wrapper(run, function))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """No effect: all models of a process already share one communication stream per device."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expected modules that fully_shard was called on; got {type(module).__name__}.")
