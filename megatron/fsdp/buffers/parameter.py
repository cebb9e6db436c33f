"""One sharded parameter of the model: its compute weight, its main weight, and where it is registered."""

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from megatron.fsdp.dtensor.ragged_dtensor import local_shard, make_dtensor, make_like
from megatron.fsdp.helpers.codes import holds_codes, of_codes
from megatron.fsdp.helpers.weak import weak_method
from megatron.fsdp.quantized.storage import WeightStorage, quantized_on_meta, storage_of
from megatron.fsdp.sharding.layout import ShardSlice

# Attribute of a plain tensor that is this rank's slice of a tensor-parallel parameter: a pair of the mesh and its
# placements. Megatron-Core's layers have such parameters.
TENSOR_PARALLEL = "_fsdp_tensor_parallel"
# A second attribute if rows are of several kinds, and a rank has a slice of each kind: how many rows of each it has.
SECTIONS = "_fsdp_sections"


# Attributes that a class of parameters may define although its values are those of a plain tensor.
_HARMLESS = set("__deepcopy__ __doc__ __init__ __module__ __new__ __reduce_ex__ __repr__ __setstate__".split())


def check_class(name: str, parameter: nn.Parameter) -> None:
    """Raise unless a parameter's values are those of a plain tensor, which can become a view of a flat buffer.

    Parameters of a registered class are accepted: :mod:`megatron.fsdp.quantized` knows how they are stored. Another
    tensor subclass may keep quantized values and report a different dtype. Assigning to its ``.data`` would train a
    copy. Classes that only add attributes to ``nn.Parameter`` are fine.

    Raises:
        NotImplementedError: The class or its layout is not supported; the message names parameter and class.
        ValueError: The parameter is lazy and has no shape yet.
    """
    if storage_of(parameter) is not None or of_codes(parameter):
        return
    value: torch.Tensor = local_shard(parameter) if isinstance(parameter, DTensor) else parameter
    cls = type(value)
    where = f"Parameter {name} is a {cls.__module__}.{cls.__qualname__}"
    if is_lazy(parameter):
        raise ValueError(f"{where}, which has no shape yet. Run the model once before it is sharded.")
    own = [base for base in cls.__mro__[: cls.__mro__.index(torch.Tensor)] if base is not nn.Parameter]
    if any(vars(base).keys() & set(dir(torch.Tensor)) - _HARMLESS for base in own):
        raise NotImplementedError(
            f"{where}, a tensor subclass that keeps its values differently from a plain tensor (quantized, for "
            "example). Sharding it is not supported, and it would never be trained. Shard the model before it is "
            "converted, or convert its parameters to plain tensors."
        )
    if value.layout is not torch.strided:
        raise NotImplementedError(f"Parameter {name} has the layout {value.layout}: only strided ones are supported.")


class GroupKey(NamedTuple):
    """Parameters of a unit with equal keys share a group.

    Attributes:
        dtype: Dtype of the parameters.
        requires_grad: Whether they take gradients.
        divisible: False for scalars and for replicated parameters, which every rank holds.
        expert: Sharded over the mesh of experts.
        repeated: Another pipeline stage has the same parameter (tied embeddings) and must shard it in the same way, so
            it does not share a group with others.
        storage: How quantized parameters are stored; None for others.
        codes: They hold codes of frozen quantized weights, which are sharded as they are.
    """

    dtype: torch.dtype
    requires_grad: bool
    divisible: bool
    expert: bool
    repeated: bool
    storage: Hashable = None
    codes: bool = False


@dataclass
class ShardedParameter:
    """One parameter of the model, however often it is registered.

    A parameter may be a DTensor over a tensor-parallel mesh, or be marked as a slice of such a parameter
    (``TENSOR_PARALLEL``). Its local slice is what is sharded here.

    Attributes:
        name: First of its names in the wrapped model.
        compute: The compute weight: the Parameter that forward and backward read.
        sites: Every (module, attribute) under which it is registered: more than one if it is tied.
        names: Its name at each site.
        original: The Parameter that the model had before it was sharded, which an optimizer may hold. From then on it
            stands for the present one, unless it is quantized.
        main: The main weight: the Parameter that the optimizer updates, a DTensor.
        shard_slice: The slice of it that this rank owns.
        trained: Whether it takes gradients, as of the last :meth:`follow_freezing`.
        quantized: The quantized parameter on the meta device whose place a plain one takes until it is initialized.
        fused: Gradients that fused kernels have written in this backward, and last the memory of the next one. The
            first takes the sum.
        replicated: Whether the user wants every rank to hold it in full.
    """

    name: str
    compute: nn.Parameter
    sites: list[tuple[nn.Module, str]]
    names: list[str]
    original: nn.Parameter = field(init=False)
    main: nn.Parameter = field(init=False)
    shard_slice: ShardSlice = field(init=False)
    trained: bool = field(init=False)
    quantized: nn.Parameter | None = field(default=None, init=False)
    fused: list[torch.Tensor] = field(default_factory=list)
    replicated: bool = False

    def __post_init__(self) -> None:
        self.original = self.compute
        self.trained = self.compute.requires_grad

    @property
    def key(self) -> GroupKey:
        """Which group of its unit it belongs to."""
        parameter = self.compute
        # Megatron-Core's mark of parameters that are not reduced over all data-parallel ranks.
        expert = not getattr(parameter, "allreduce", True)
        repeated = getattr(parameter, "shared_embedding", False)
        storage = storage_of(parameter)
        stored = None if storage is None else storage.key
        divisible = len(self.local_shape) > 0 and not self.replicated
        codes = storage is None and holds_codes(parameter)
        return GroupKey(parameter.dtype, parameter.requires_grad, divisible, expert, repeated, stored, codes)

    @property
    def is_meta(self) -> bool:
        """True if the parameter has no values yet."""
        return self.compute.device.type == "meta"

    @property
    def tensor_parallel(self) -> tuple[DeviceMesh, Sequence[Placement]] | None:
        """Mesh and placements of a parameter that is tensor-parallel; None for others."""
        value = self.compute.data
        if isinstance(value, DTensor):
            return value.device_mesh, value.placements
        marked: tuple[DeviceMesh, Sequence[Placement]] | None = getattr(self.compute, TENSOR_PARALLEL, None)
        return marked

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        shape = list(self.compute.shape)
        if self.tensor_parallel is not None and not isinstance(self.compute.data, DTensor):
            mesh, placements = self.tensor_parallel
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    shape[placement.dim] *= mesh.size(axis)
        return tuple(shape)

    @property
    def local_value(self) -> torch.Tensor:
        """This rank's tensor-parallel slice of the parameter, or the full parameter."""
        value = self.compute.data
        return local_shard(value) if isinstance(value, DTensor) else value

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the compute weight on this rank."""
        return tuple(self.local_value.shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where this rank's tensor-parallel slice begins in the full parameter."""
        if self.tensor_parallel is None:
            return (0,) * self.compute.dim()
        mesh, placements = self.tensor_parallel
        return tuple(compute_local_shape_and_global_offset(self.shape, mesh, placements)[1])

    @property
    def sections(self) -> tuple[int, ...] | None:
        """How many rows of each kind this tensor-parallel rank has, if the rows are of several kinds."""
        marked: tuple[int, ...] | None = getattr(self.compute, SECTIONS, None)
        return marked

    def point_to(self, memory: torch.Tensor) -> None:
        """Make the compute weight a view of ``memory``, which has its local shape."""
        # ``.data`` shares no version counter with the buffer. Otherwise autograd would take an unshard, which writes to
        # this memory, for a change of the parameter.
        value, before = memory.data, self.compute
        if isinstance(before.data, DTensor):
            assert self.tensor_parallel is not None
            value = make_dtensor(value, self.tensor_parallel[0], tuple(before.shape), self.tensor_parallel[1])
            self._replace(nn.Parameter(value, requires_grad=before.requires_grad))
            before._local_tensor = _without_memory(value._local_tensor)  # type: ignore[attr-defined]
            return
        # The new object has the class of the old one, which only adds attributes (see check_class).
        self._replace(torch.Tensor._make_subclass(type(before), value, before.requires_grad))
        before.data = _without_memory(before.data)  # drops the parameter's own memory, which users may still share

    def _replace(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` the compute weight, with the marks of the present one."""
        _copy_marks(self.compute, parameter)
        self.compute = parameter
        for module, attribute in self.sites:
            module._parameters[attribute] = parameter

    def expect_quantization(self) -> None:
        """Treat a plain parameter on the meta device as quantized if that is what its modules will make of it.

        Raises:
            NotImplementedError: They will make a tensor of an unknown class of it.
        """
        if not self.is_meta:
            return
        made = [quantized_on_meta(module, attribute) for module, attribute in self.sites]
        # If only some of the modules quantize a tied parameter, it stays plain, and their initialization is refused.
        if made[0] is not None and all(tensor is not None for tensor in made):
            quantized = nn.Parameter(made[0], requires_grad=self.compute.requires_grad)
            check_class(self.name, quantized)
            _copy_marks(self.compute, quantized)
            self.compute = quantized

    def reclaim(self) -> None:
        """Register the compute weight again where modules have replaced it when they initialized it, with their marks.

        Raises:
            NotImplementedError: A module has removed the parameter, or has made a quantized one of it, unexpectedly.
                Its memory is that of a plain one, and would be trained without the module's.
        """
        for module, attribute in self.sites:
            now = module._parameters[attribute]
            if now is None or (self.quantized is None and storage_of(now) is not None):
                what = "removed" if now is None else f"made a quantized {type(now).__name__} of"
                raise NotImplementedError(
                    f"init_model_with_meta_device: {type(module).__name__} {what} {self.name} when it initialized it. "
                    "Build the model without the meta device instead."
                )
            if now is not self.compute:
                _copy_marks(now, self.compute)
                module._parameters[attribute] = self.compute

    def initialize_in(self, memory: torch.Tensor) -> None:
        """Let a plain parameter take the place of a quantized one on the meta device until :meth:`bind`.

        Args:
            memory: Gets the initial values, in the parameter's shape and dtype.
        """
        self.quantized = self.compute
        self._replace(nn.Parameter(memory.data, requires_grad=self.compute.requires_grad))

    def bind(self, storage: WeightStorage, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Store the bytes of a quantized compute weight in other memory.

        Args:
            storage: How it is stored.
            planes: One flat uint8 tensor per plane.
            dtype: Dtype that it appears to have from now on.
        """
        bound = storage.bind(self.compute if self.quantized is None else self.quantized, planes, dtype)
        if bound is not self.compute:
            self._replace(nn.Parameter(bound, requires_grad=self.compute.requires_grad))
        self.quantized = None

    def follow_freezing(self) -> bool:
        """Freeze or unfreeze both weights if the user has done so with one of them; True if that changes anything."""
        wanted = not self.trained
        if wanted not in (self.main.requires_grad, self.compute.requires_grad):
            return False
        self.trained = wanted
        self.main.requires_grad_(wanted)
        self.compute.requires_grad_(wanted)
        return True

    # Hooks -----------------------------------------------------------------------------------------------------

    def take_hooks(self, counts_writes: bool) -> None:
        """Move gradient hooks from the parameter to the main weight.

        Autograd would call them with unreduced gradients. Handles that users hold still remove them. Later hooks must
        be registered with the main weight: registering them with the parameter raises an error.

        Args:
            counts_writes: What a forward writes through ``.data`` counts as written, because an unshard undoes it.
        """
        for kind, register in (
            ("_backward_hooks", nn.Parameter.register_hook),
            ("_post_accumulate_grad_hooks", nn.Parameter.register_post_accumulate_grad_hook),
        ):
            hooks = getattr(self.original, kind) or {}
            for key, hook in list(hooks.items()):
                hooks[key] = _no_hook
                with _requiring_grad(self.main):
                    register(self.main, functools.partial(_if_kept, hooks, key, hook))
        if type(self.compute) is nn.Parameter and storage_of(self.compute) is None:
            self.compute.__class__ = _CountingParameter if counts_writes else _ComputeParameter
        self.compute.register_hook = weak_method(self._register_hook)  # type: ignore[method-assign]
        self.compute.register_post_accumulate_grad_hook = weak_method(self._refuse_hook)  # type: ignore[method-assign]
        if self.original.requires_grad and self.original is not self.compute:
            torch.Tensor.register_hook(self.original, functools.partial(refuse_early_read, self.name))
        if self.original is not self.compute and storage_of(self.original) is None:
            self.original._fsdp_stands_for = weakref.ref(self), self.main  # type: ignore[attr-defined]
            is_dtensor = isinstance(self.original, DTensor)
            self.original.__class__ = _EarlierDTensor if is_dtensor else _EarlierParameter  # type: ignore[assignment]

    def watch_reads(self, callback: Callable[[tuple], tuple]) -> None:
        """Call ``callback`` with the gradient that autograd would accumulate in the main weight; it returns another."""
        if not self.main.is_floating_point():
            return  # integers take no gradients
        with _requiring_grad(self.main), torch.enable_grad():
            main: Any = self.main
            local = main.to_local()  # with torch 2.11, its node would not outlive it
            self._reads = local.grad_fn.next_functions[0][0]
        self._reads.register_prehook(callback)

    def _register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        """Register a hook of a layer with its compute weight, for the gradient of this micro-batch and rank."""
        module, attribute = self.sites[0]
        if module._parameters[attribute] is self.compute:
            return torch.Tensor.register_hook(self.compute, hook)
        return self._refuse_hook(hook)

    def _refuse_hook(self, hook: Callable[..., Any]) -> NoReturn:
        raise RuntimeError(
            f"{self.name} is a compute weight, whose gradient autograd has before it is reduced. Register hooks with "
            "the parameters that the sharded model's parameters() returns: they are called with reduced gradients."
        )

    def hooked(self, grad: DTensor) -> DTensor:
        """The reduced gradient after the hooks of the main weight, which may return another.

        Raises:
            ValueError: A hook returned something else than a DTensor like the gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            hooks = tuple((self.main._backward_hooks or {}).values())
        for hook in hooks:
            with torch.no_grad():
                returned = hook(grad)
            if returned is None:
                continue
            if not isinstance(returned, DTensor) or local_shard(returned).shape != local_shard(grad).shape:
                raise ValueError(
                    f"A gradient hook of {self.name} returned a {type(returned).__name__} of shape "
                    f"{tuple(returned.shape)}: expected a DTensor like the gradient that it was given."
                )
            grad = make_like(local_shard(returned), self.main)
        return grad

    @property
    def has_hooks(self) -> bool:
        """Whether the user has registered gradient hooks with the main weight."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(self.main._backward_hooks or self.main._post_accumulate_grad_hooks)

    def run_gradient_hooks(self) -> None:
        """Call the main weight's post-accumulate hooks: its gradient is complete."""
        with torch._C.DisableTorchFunctionSubclass():
            hooks = tuple((self.main._post_accumulate_grad_hooks or {}).values())
        for hook in hooks:
            with torch.no_grad():
                hook(self.main)

    # Gradients -------------------------------------------------------------------------------------------------

    def take_gradient(self) -> torch.Tensor | None:
        """Remove this micro-batch's gradient from the parameter and return it in its local shape; None without one."""
        grad, self.compute.grad = self.compute.grad, None
        if self.fused:
            grad = self._take_fused(grad)
        if grad is not None and grad.requires_grad:
            grad = grad.detach()  # of backward(create_graph=True), or of delayed weight gradients, which need none
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if isinstance(grad, DTensor):
            assert self.tensor_parallel is not None
            placements = self.tensor_parallel[1]
            # Autograd may leave it as a sum that is not yet reduced over the tensor-parallel ranks.
            return local_shard(
                grad if tuple(grad.placements) == tuple(placements) else grad.redistribute(None, placements)
            )
        return grad

    @property
    def has_gradient(self) -> bool:
        """True if the parameter has a gradient of this micro-batch."""
        return self.compute.grad is not None or bool(self.fused)

    def next_fused(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the memory that a kernel overwrites with a gradient of this parameter.

        The kernel then sets ``grad_added_to_main_grad``. If a parameter is used more than once in a backward, each
        kernel gets other memory, because it overwrites what it is given.

        Args:
            memory: For the first gradient, in the parameter's shape.
        """
        if self.fused:
            self._settle()
            memory = torch.empty_like(memory)
        self.fused.append(memory)
        self._is_written = False
        return memory

    @property
    def _is_written(self) -> bool:
        """Kernels set this mark when they have written the gradient."""
        return bool(self.compute.grad_added_to_main_grad)  # type: ignore[attr-defined]

    @_is_written.setter
    def _is_written(self, value: bool) -> None:
        self.compute.grad_added_to_main_grad = value  # type: ignore[attr-defined]

    @property
    def _is_delayed(self) -> bool:
        """Whether kernels set that mark before they write: the layer computes weight gradients after its backward.

        Transformer Engine's layers tell Megatron-Core's DDP so.
        """
        return bool(getattr(self.compute, "skip_backward_post_hook", False))

    @property
    def autograd_may_write(self) -> bool:
        """Whether autograd may have the memory itself, and add this backward's other gradients to it later.

        It can only if dtypes are equal. Otherwise it has made a copy.
        """
        waits = bool(self.fused) and not self._is_written and self.compute.grad is None
        return waits and self.fused[-1].dtype == self.compute.dtype

    def _settle(self) -> None:
        """Add the last gradient to the first if a kernel has written it.

        Otherwise nothing was written, or autograd has it: Transformer Engine's BasicLinear passes the memory itself to
        autograd and sets no mark.
        """
        if not self._is_written:
            self.fused.pop()
        elif len(self.fused) > 1 and not self._is_delayed:
            self.fused[0].add_(self.fused.pop())

    def _take_fused(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The sum of what fused kernels wrote, and of autograd's ``grad`` if that is marked as real.

        If no kernel has written anything, ``grad`` is all there is.
        """
        self._settle()
        if self.fused:
            total = self.fused[0]
            for other in self.fused[1:]:
                total.add_(other)
            if grad is not None and getattr(self.compute, "zero_out_wgrad", False):
                total.add_(grad)
            grad = total
        self._end_fusing()
        return grad

    def _end_fusing(self) -> None:
        """Return to the state before the first kernel: what stays in ``main_grad`` would keep its buffer alive."""
        self.fused = []
        self._is_written = False
        self.compute.main_grad = None  # type: ignore[attr-defined]

    def drop_gradient(self) -> None:
        """Drop this micro-batch's gradient."""
        self.compute.grad = None
        if self.fused:
            self._end_fusing()


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape that shares one element, for graphs that end in :func:`refuse_early_read`."""
    return _zero(tensor.dtype, tensor.device).expand(tensor.shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def refuse_early_read(name: str, grad: torch.Tensor) -> NoReturn:
    """Raise an error about a gradient of a parameter from before the model was sharded."""
    raise RuntimeError(
        f"A loss has read {name} before the model was sharded: its gradient would be lost. Shard the model first, or "
        "discard gradients with zero_grad(). With megatron.fsdp.fsdp2, run its forward before parameters are read."
    )


class _Earlier:
    """Base of the classes of parameter objects from before sharding. Each stands for what the model has in its place.

    Lists, optimizers, averages and modules that hold such objects then act on the sharded parameter. In forward, that
    is the compute weight: recurrent layers of torch keep their parameters in a list.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = args, kwargs or {}
        args, kwargs = tree_map(lambda value: _present(value) if isinstance(value, _Earlier) else value, given)
        return func(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else getattr(_present(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_present(self), name, value)

    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(_present(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _present(self).__reduce_ex__(protocol)

    def __repr__(self, **unused: Any) -> str:
        return repr(_present(self))


class _EarlierParameter(_Earlier, nn.Parameter):  # type: ignore[misc]
    pass


class _EarlierDTensor(_Earlier, DTensor):  # type: ignore[misc]
    pass


class _ComputeParameter(nn.Parameter):
    """A compute weight: ``.data = x`` writes its elements, because its memory is the engine's."""

    _counts_writes = False

    @property
    def data(self) -> torch.Tensor:
        return self.detach() if self._counts_writes else _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.data_ptr() != self.data_ptr():  # else nothing changes, as in ``p.data = p.data.to(device)``
            self.data.copy_(value)


class _CountingParameter(_ComputeParameter):
    """Its version counts what is written through ``.data``, because the next unshard undoes that."""

    _counts_writes = True


_DATA: Any = torch.Tensor.data


def _present(earlier: Any) -> nn.Parameter:
    """The parameter that the model has in place of one from before sharding."""
    reference, main = vars(earlier)["_fsdp_stands_for"]
    if (param := reference()) is None:
        return main
    module, attribute = param.sites[0]
    return param.compute if module._parameters.get(attribute) is param.compute else main


def _copy_marks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Set the attributes on ``target`` that frameworks have set on ``source``."""
    storage = storage_of(source)
    fields = frozenset() if storage is None else storage.fields
    for name, mark in vars(source).items():
        # A method of the source would keep it alive.
        if name not in fields and getattr(mark, "__self__", None) is not source:
            setattr(target, name, mark)


def _no_hook(*unused: Any) -> None:
    """Takes the place of a hook that was moved to the main weight."""


def _if_kept(hooks: Mapping[int, Any], key: int, hook: Callable[..., Any], value: torch.Tensor) -> Any:
    """Call a hook that was moved, unless its handle has removed it."""
    return hook(value) if key in hooks else None


@contextmanager
def _requiring_grad(parameter: nn.Parameter) -> Iterator[None]:
    """Context in which a parameter requires gradients: torch registers hooks only then, but it may be unfrozen."""
    before = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(before)
