"""A DTensor with shards of any size, and the operations that it supports.

Main weights, their gradients and optimizer state are :class:`RaggedDTensor`. Its dispatch bypasses torch's sharding
rules, which assume even shards. It supports:

* element-wise operations between tensors of one layout and with scalars, on the local shards without communication;
* reductions of the whole tensor, on the local shard; reading the result reduces it over the ranks;
* random initialization in place, with the same values as for a whole tensor;
* ``copy_`` from a whole tensor or from a tensor with another layout.

Every other operation raises NotImplementedError: :mod:`megatron.fsdp.dtensor.unsupported` says what to write instead.

``DTensorSpec``, ``DTensor._spec`` and ``DTensor._local_tensor`` are private in torch. No public interface creates a
DTensor with uneven shards without communication; tests on every supported version of torch notice a change.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim import optimizer as torch_optimizer
from torch.torch_version import TorchVersion
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.fsdp.comm.collectives import broadcast
from megatron.fsdp.dtensor.gathering import ToFull, ToLocal, gather_whole, reduce_whole
from megatron.fsdp.dtensor.placements import (
    InChunks,
    contiguous_stride,
    is_ragged,
    is_replicated,
    local_slice,
    reported,
    spec_like,
)
from megatron.fsdp.dtensor.reductions import call, in_graph, require_no_graph, shard_norm, shard_result
from megatron.fsdp.dtensor.unsupported import (
    NO_MEMORY,
    Unsupported,
    explained,
    refuse_memory,
    refuse_reads,
    refuse_tracing,
)


class _Dispatching(TorchDispatchMode):
    """Dispatches operations to the classes of this module where torch would apply its rules to every DTensor."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {type(value) for value in tree_flatten((args, kwargs))[0]}
        if RaggedDTensor in given:
            return _dispatch(func, args, kwargs or {})
        if PartialDTensor in given:
            return PartialDTensor.__torch_dispatch__(func, tuple(given), args, kwargs)
        return func(*args, **(kwargs or {}))


_IS_OLD = TorchVersion(torch.__version__) < "2.13"
_dispatching: Any = _Dispatching if _IS_OLD else torch._C.DisableTorchFunctionSubclass


class _OwnDispatch(DTensor):
    """Base class of DTensors with a different dispatch.

    Up to torch 2.12, DTensor's C++ dispatch ignores ``__torch_dispatch__`` of subclasses. A dispatch mode runs before
    it, and ``__torch_function__`` enables one for every operation that is called from Python. Attributes pass through
    that, too: code that runs in every step reads them in ``torch._C.DisableTorchFunctionSubclass()``.
    """

    def __init__(self, *unused: Any, **unused_options: Any) -> None:
        """Do nothing: ``__new__`` sets all attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), _dispatching():
            return call(func, args, kwargs or {}) if torch.is_grad_enabled() else func(*args, **(kwargs or {}))


class RaggedDTensor(InChunks, _OwnDispatch):
    """A DTensor with :class:`RaggedShard` or :class:`SectionedShard` among the placements of its spec."""

    def __new__(cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> "RaggedDTensor":
        """Create a tensor from this rank's shard and a spec; see :func:`make_dtensor`."""
        # DTensor's constructor copies the storage offset of the local tensor, which is a view of a flat buffer. Code
        # that copies tensors (pickling, staging of asynchronous checkpoints) would apply the offset to the wrapper.
        meta = spec.tensor_meta
        assert meta is not None
        tensor: RaggedDTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=local_tensor.dtype,
            layout=local_tensor.layout,
            device=local_tensor.device,
            requires_grad=requires_grad,
        )
        tensor._spec = spec
        tensor._local_tensor = local_tensor
        return tensor

    def _get_data(self) -> torch.Tensor:
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if refuse_reads is not None:
            refuse_reads(data.untyped_storage()._cdata, NO_MEMORY)
        return data

    def _copy_data(self, value: torch.Tensor) -> None:
        self.detach().copy_(value)  # torch's setter would replace the memory of the wrapper, which has none

    data = property(_get_data, _copy_data)
    numpy = tolist = storage = refuse_memory
    __tensor_flatten__ = refuse_tracing

    def data_ptr(self) -> int:
        """Return 0: the wrapper has no memory, and torch pickles it for that."""
        return 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements as torch's types, with ``Shard(0)`` instead of ragged ones."""
        return reported(self._spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def full_tensor(self, *, grad_placements: object = None) -> torch.Tensor:
        """Gather the whole tensor. Differentiable. A collective over the mesh, and so is its backward."""
        if in_graph([self]):
            full: torch.Tensor = ToFull.apply(self)
            return full
        return gather_whole(self)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Gather the whole tensor and distribute it with torch's placements. Differentiable. A collective."""
        if placements is None:
            raise ValueError("redistribute: expected placements.")
        if tuple(placements) == self.placements:
            return self
        mesh = device_mesh or self.device_mesh
        replicated = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated if is_replicated(placements) else replicated.redistribute(mesh, placements)

    def to_local(self, *, grad_placements: object = None) -> torch.Tensor:
        """This rank's shard: rows of the tensor, or a one-dimensional range if it cuts a row. Differentiable."""
        if in_graph([self]):
            local: torch.Tensor = ToLocal.apply(self)
            return local
        return self._local_tensor

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copied: torch.Tensor = RaggedDTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=False)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        mine = local_slice(self._spec)
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, elements {mine.start} to {mine.stop} on this rank: "
            f"{self._local_tensor}, device_mesh={self.device_mesh})"
        )


class PartialDTensor(_OwnDispatch):
    """A partial result that is reduced over the ranks when it is read as a number.

    Reading torch's DTensor with a ``Partial`` placement would return this rank's value instead.
    """

    if not _IS_OLD:  # Partial results are in no graph.
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(each, RaggedDTensor) for each in types):
            return NotImplemented
        flat, tree = tree_flatten((args, kwargs or {}))
        # None for plain tensors, with which it becomes one.
        meshes = {getattr(value, "device_mesh", None) for value in flat if isinstance(value, torch.Tensor)}
        if func is aten._local_scalar_dense.default or len(meshes) > 1:
            args, kwargs = tree_unflatten([reduced(value) for value in flat], tree)
            return func(*args, **kwargs)
        args, kwargs = tree_unflatten([_as_plain(value) for value in flat], tree)
        return tree_map(_as_partial, func(*args, **kwargs))

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec)

    def full_tensor(self, *, grad_placements: object = None) -> torch.Tensor:
        """Reduce the result over the ranks. A collective over the mesh; not differentiable."""
        return reduce_whole(self)


# Creating and reading DTensors ----------------------------------------------------------------------------------


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], placements: Sequence[Placement], main: bool = False
) -> DTensor:
    """A DTensor with local tensor ``local``, which is not copied.

    Args:
        local: This rank's shard, possibly empty.
        mesh: Mesh that the tensor is sharded over.
        shape: Shape of the whole tensor.
        placements: One per mesh axis, from torch or from :mod:`megatron.fsdp.dtensor.placements`.
        main: Return a :class:`RaggedDTensor` even if no placement needs one. Only these count writes to their shards.
    """
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    kind = RaggedDTensor if main or is_ragged(spec) else DTensor
    return kind(local, spec, requires_grad=False)


def make_like(local: torch.Tensor, other: torch.Tensor) -> DTensor:
    """A DTensor with local tensor ``local`` and the layout of the DTensor ``other``. Not differentiable."""
    # Both share one spec: creating a spec would take most of the time of making a gradient.
    assert isinstance(other, DTensor)
    kind = RaggedDTensor if isinstance(other, RaggedDTensor) else DTensor
    return kind(local, spec_like(other._spec, local.dtype), requires_grad=False)


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """True for a DTensor that is not replicated on all ranks."""
    return isinstance(value, DTensor) and not is_replicated(value._spec.placements)


def same_layout(one: DTensor, other: DTensor) -> bool:
    """Whether every rank holds the same slice of both tensors."""
    return _same(one._spec, other._spec)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor itself; ``to_local`` may return a view of it for autograd.

    Raises:
        TypeError: ``tensor`` is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"expected a sharded tensor (a DTensor), such as torch.zeros_like(parameter); got {type(tensor).__name__}."
        )
    return tensor._local_tensor


def reduced(value: Any) -> Any:
    """The whole tensor of a DTensor, gathered or reduced by a collective if needed. Other values are returned as is."""
    if not isinstance(value, DTensor):
        return value
    if isinstance(value, PartialDTensor):
        return reduce_whole(value)
    return value._local_tensor if is_replicated(value._spec.placements) else value.full_tensor()


def _same(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one is other or (one.placements == other.placements and one.shape == other.shape and one.mesh == other.mesh)


def _as_plain(value: Any) -> Any:
    if isinstance(value, _OwnDispatch):
        return DTensor(value._local_tensor, value._spec, requires_grad=False)
    return value


def _as_ragged(value: Any) -> Any:
    if type(value) is not DTensor or any(placement.is_partial() for placement in value._spec.placements):
        return value
    return RaggedDTensor(value._local_tensor, value._spec, requires_grad=False)


def _as_partial(value: Any) -> Any:
    if isinstance(value, DTensor):
        return PartialDTensor(value._local_tensor, value._spec, requires_grad=False)
    return value


# Dispatch --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten

# Element-wise operations that torch does not tag as pointwise.
_ELEMENTWISE = {
    f"aten::{name}"
    for name in "alias clone detach _to_copy zeros_like ones_like empty_like full_like copy_ zero_ fill_ lerp lerp_ "
    "is_pinned pin_memory _pin_memory lift_fresh _amp_update_scale_ masked_fill masked_fill_".split()
}


_ALIASES = (aten.alias.default, aten.detach.default)


def _dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    try:
        result = _run(func, args, kwargs)
    except Unsupported as error:
        raise explained(error, tree_flatten((args, kwargs))[0]) from None
    if func._schema.is_mutable:
        # Autograd counts writes to a tensor, but not those to its ``.data`` or in a list, and not in the shard.
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written(func)]
        tensors = [each for each in tree_flatten(written)[0] if isinstance(each, RaggedDTensor)]
        torch._C._increment_version([*tensors, *(each._local_tensor for each in tensors)])
    return result


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    name = func._schema.name
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(func, args, kwargs)
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        return _on_lists(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(func, args, kwargs)
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return _elementwise(func, args, kwargs)
    flat, tree = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor) and value.dim()]
    if any(not isinstance(each, DTensor) or is_ragged(each._spec) for each in tensors):
        raise Unsupported(func)
    require_no_graph(func, flat)
    # torch has rules for tensors that are not sharded, or evenly over a tensor-parallel axis only.
    args, kwargs = tree_unflatten([_as_plain(value) for value in flat], tree)
    return tree_map(_as_ragged, func(*args, **kwargs))


def _first(values: Sequence[Any]) -> "RaggedDTensor":
    return next(value for value in values if isinstance(value, RaggedDTensor))


def _operand(func: Any, value: Any, spec: DTensorSpec, local: torch.Tensor) -> Any:
    """The operand that stands for ``value`` in an element-wise operation on this rank's shard."""
    if isinstance(value, RaggedDTensor):
        if not _same(value._spec, spec):
            shapes = f"{tuple(spec.shape)} and {tuple(value.shape)}"
            raise Unsupported(func, f"operands of shapes {shapes} are sharded differently")
        return value._local_tensor
    value = reduced(value)
    if isinstance(value, torch.Tensor) and value.dim():
        if value.shape == spec.shape:
            return local_slice(spec).take_from(value)
        if value.numel() != 1 or value.dim() > len(spec.shape):
            raise Unsupported(func, f"an operand is a plain tensor of shape {tuple(value.shape)}")
        return value.reshape((1,) * local.dim())
    return value


def _needs_full(func: Any, value: Any, spec: DTensorSpec) -> bool:
    """Whether, in a graph, an operand may differ between ranks or would take a gradient that a shard does not have."""
    if isinstance(value, RaggedDTensor):
        return not _same(value._spec, spec)
    if isinstance(value, torch.Tensor):
        return value.requires_grad or not isinstance(value, DTensor)
    # Exponents are constants, such as the 2 of squares.
    return type(value) in (int, float) and torch.Tag.pointwise in func.tags and func._schema.name != "aten::pow"


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    flat, tree = tree_flatten((args, kwargs))
    first = _first(flat)
    if func._schema.is_mutable and not isinstance(args[0], DTensor):
        # A plain tensor that is changed in place needs all elements, for instance an average of weights.
        require_no_graph(func, flat)
        args, kwargs = tree_unflatten([reduced(value) for value in flat], tree)
        return func(*args, **kwargs)
    if func in _ALIASES:
        # The result shares the shard itself, and with it the counter of writes.
        return RaggedDTensor(first._local_tensor, first._spec, requires_grad=False)
    spec, local = first._spec, first._local_tensor
    if in_graph(flat) and any(_needs_full(func, value, spec) for value in flat):
        if func._schema.is_mutable:
            raise Unsupported(func, "in a loss, it is supported in place only with tensors that are sharded alike")
        require_no_graph(func, flat)
    operands = [_operand(func, value, spec, local) for value in flat]
    own_args, own_kwargs = tree_unflatten(operands, tree)
    result = func(*own_args, **own_kwargs)
    return tree_map(lambda value: _wrapped(func, value, flat, operands, spec, local.shape), result)


def _wrapped(
    func: Any, value: Any, given: Sequence[Any], operands: Sequence[Any], spec: DTensorSpec, shape: torch.Size
) -> Any:
    """The DTensor for a local result: the argument itself if the operation changed it in place."""
    if not isinstance(value, torch.Tensor):
        return value
    if func._schema.is_mutable:
        for original, operand in zip(given, operands, strict=True):
            if operand is value:
                return original
    if value.shape != shape:
        raise Unsupported(func)
    return RaggedDTensor(value, spec_like(spec, value.dtype), requires_grad=False)


def _on_lists(func: Any, args: tuple, kwargs: dict) -> Any:
    """``_foreach_`` and fused operations: element-wise between tensors at the same position of each list."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    if not func._schema.is_mutable:
        require_no_graph(func, [value for each in lists for value in each])
    leading: Sequence[Any] = lists[0]
    specs = [value._spec if isinstance(value, RaggedDTensor) else None for value in leading]

    def unwrap(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(leading):
            return reduced(value)
        return [
            reduced(each) if spec is None else _operand(func, each, spec, lead._local_tensor)
            for each, spec, lead in zip(value, specs, leading, strict=True)
        ]

    result = func(*(unwrap(value) for value in args), **{key: unwrap(value) for key, value in kwargs.items()})
    if func._schema.is_mutable or not isinstance(result, (list, tuple)):
        return result if not isinstance(result, (list, tuple)) else leading
    return [
        make_like(value, lead) if isinstance(lead, DTensor) else value
        for value, lead in zip(_checked(func, result, leading), leading, strict=True)
    ]


def _checked(func: Any, results: Sequence[torch.Tensor], leading: Sequence[Any]) -> Sequence[torch.Tensor]:
    if any(isinstance(d, DTensor) and r.shape != d._local_tensor.shape for r, d in zip(results, leading, strict=True)):
        raise Unsupported(func)
    return results


def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """``copy_`` into a ragged tensor from a whole tensor or from one with another layout."""
    target, source = args[:2]
    if not isinstance(target, DTensor):
        require_no_graph(func, args)
        return target.copy_(reduced(source), *args[2:], **kwargs)
    if not isinstance(target, RaggedDTensor):
        raise Unsupported(func, "the target is sharded evenly")
    if isinstance(source, DTensor) and not (isinstance(source, RaggedDTensor) and same_layout(source, target)):
        source = gather_whole(source)
    if isinstance(source, RaggedDTensor):
        source = source._local_tensor
    elif source.dim() and source.shape == target.shape:
        source = local_slice(target._spec).take_from(source)
    elif source.numel() != 1:
        raise ValueError(f"copy_: expected a tensor of shape {tuple(target.shape)}; got {tuple(source.shape)}.")
    target._local_tensor.copy_(source, *args[2:], **kwargs)
    return target


def _random(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw the whole tensor as without sharding, and keep this rank's slice.

    If the random states of ranks differ, replicas take the values of the first rank of their axis.
    """
    target = args[0]
    in_place = func._schema.is_mutable
    if not isinstance(target, RaggedDTensor) or not (in_place or func._schema.name.endswith("_like")):
        raise Unsupported(func)
    spec, local = target._spec, target._local_tensor
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    if in_place:
        func(whole, *args[1:], **kwargs)
    else:
        whole = func(whole, *args[1:], **kwargs)
    drawn = local_slice(spec).take_from(whole).contiguous()
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and spec.mesh.size(axis) > 1:
            group = spec.mesh.get_group(axis)
            sent = drawn.to(spec.mesh.device_type)
            broadcast(sent, 0, group)
            drawn.copy_(sent)
    if not in_place:
        return make_like(drawn, target)
    local.copy_(drawn)
    return target


def _new(func: Any, args: tuple, kwargs: dict) -> Any:
    """``new_empty`` and similar functions: a ragged tensor for the same shape, else a plain tensor."""
    tensor, size, rest = args[0], tuple(args[1]), args[2:]
    if size != tuple(tensor.shape):
        return func(tensor._local_tensor, size, *rest, **kwargs)
    return make_like(func(tensor._local_tensor, tuple(tensor._local_tensor.shape), *rest, **kwargs), tensor)


def _reduction(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor, given = args[0], _arguments(func, args, kwargs)
    _require_all_dims(func, tensor, given.get("dim"))
    name, local = func._schema.name.removeprefix("aten::"), tensor._local_tensor.reshape(-1)
    value, placement = shard_result(name, local, tensor.numel(), given)
    value = value.reshape((1,) * tensor.dim()) if given.get("keepdim") else value
    return _partial(value, placement, tensor._spec)


def _arguments(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a reduction by name. In a graph, :func:`call` reduces instead."""
    require_no_graph(func, args[0] if isinstance(args[0], (list, tuple)) else args[:1])
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _require_all_dims(func: Any, tensor: torch.Tensor, dim: Any) -> None:
    dims = [dim] if isinstance(dim, int) else list(dim or range(tensor.dim()))
    # `max` and `min` along a dimension return indices as well, so they have several results.
    if len(func._schema.returns) > 1 or {d % tensor.dim() for d in dims} != set(range(tensor.dim())):
        raise Unsupported(func, f"it reduces dimensions {dims} only")


# Specs of results by the spec of the reduced tensor. Clipping reduces every gradient in every step, and creating a spec
# would take most of that time. The cache is not an attribute of the spec, because specs are pickled with their tensors.
_specs_of_results: weakref.WeakKeyDictionary[DTensorSpec, dict[tuple, DTensorSpec]] = weakref.WeakKeyDictionary()


def _partial(value: torch.Tensor, placement: Placement, spec: DTensorSpec) -> DTensor:
    """Wrap the result of this rank's shard as a partial DTensor, to be reduced over the axes that shard the tensor."""
    known = _specs_of_results.setdefault(spec, {})
    key = (placement, value.dtype, value.shape)
    if key not in known:
        placements = tuple(p if isinstance(p, Replicate) else placement for p in spec.placements)
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        known[key] = DTensorSpec(spec.mesh, placements, tensor_meta=meta)
    return PartialDTensor(value, known[key], requires_grad=False)


def _spread(func: Any, args: tuple, kwargs: dict) -> DTensor:
    """Variance or standard deviation, of the full tensor."""
    tensor, _ = args[0], _arguments(func, args, kwargs)
    value = func(gather_whole(tensor), *args[1:], **kwargs)
    return DTensor.from_local(value, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False)


def _foreach_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    given = _arguments(func, args, kwargs)
    order, results = float(given.get("ord", 2)), []
    for tensor in args[0]:
        local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
        value, placement = shard_norm(local.reshape(-1), order, given.get("dtype"))
        results.append(_partial(value, placement, tensor._spec) if isinstance(tensor, DTensor) else value)
    return results


def _equal(func: Any, args: tuple, kwargs: dict) -> bool:
    """``torch.equal`` and ``allclose``, with the same result on every rank. A collective."""
    one, other = args[:2]
    spec = _first(args)._spec
    if one.shape != other.shape:
        return False
    local = _first(args)._local_tensor
    locals_ = [
        _operand(func, value, spec, local) if isinstance(value, DTensor) else local_slice(spec).take_from(value)
        for value in (one, other)
    ]
    equal = bool(func(*locals_, *args[2:], **kwargs))
    return bool(reduced(_partial(torch.tensor(float(equal), device=locals_[0].device), Partial("min"), spec)))


def _number(func: Any, args: tuple, kwargs: dict) -> Any:
    return func(gather_whole(args[0]), *args[1:], **kwargs)


_HANDLERS: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "aten::copy_": _copy,
    "aten::equal": _equal,
    "aten::allclose": _equal,
    "aten::is_same_size": lambda func, args, kwargs: args[0].shape == args[1].shape,
    "aten::_local_scalar_dense": _number,
    "aten::_foreach_norm": _foreach_norm,
    "aten::var": _spread,
    "aten::std": _spread,
    **{f"aten::new_{kind}": _new for kind in ("empty", "zeros", "ones", "full")},
    **{
        f"aten::{name}": _reduction
        for name in "sum mean max min amax amin linalg_vector_norm norm all any prod count_nonzero".split()
    },
}

# Let torch's clipping and optimizers use their foreach implementations for lists of RaggedDTensors.
for _supported in (_foreach_utils._foreach_supported_types, torch_optimizer._foreach_supported_types):
    _supported.append(RaggedDTensor)  # type: ignore[arg-type]
