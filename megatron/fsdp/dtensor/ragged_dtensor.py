"""A DTensor with shards of any size, and the operations that it supports.

Main weights, their gradients and optimizer state are :class:`RaggedDTensor`. Its dispatch bypasses torch's sharding
rules, which assume even shards. It supports:

* element-wise operations between tensors of one layout and with scalars, on the local shards without communication;
* reductions of the full tensor, on the local shard and then over the ranks. They are collectives;
* random initialization in place, with the same values as for a full tensor;
* ``copy_`` from a full tensor or from a tensor with another layout.

Every other operation raises NotImplementedError: :mod:`megatron.fsdp.dtensor.unsupported` says what to write instead.

``DTensorSpec``, ``DTensor._spec`` and ``DTensor._local_tensor`` are private in torch. No public interface creates a
DTensor with uneven shards without communication; tests on every supported version of torch notice a change.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.fsdp.comm.backends import is_on_host
from megatron.fsdp.comm.collectives import broadcast
from megatron.fsdp.comm.context import finish_host_reads
from megatron.fsdp.dtensor.gathering import ToFull, ToLocal, gather_full, on_device, reduce_over
from megatron.fsdp.dtensor.placements import (
    InChunks,
    contiguous_stride,
    is_ragged,
    is_replicated,
    local_slice,
    reported,
    spanning_mesh,
    spec_like,
)
from megatron.fsdp.dtensor.reductions import NeedsFullTensor, call, in_graph, norms, reduce_tensor, require_no_graph
from megatron.fsdp.dtensor.schemas import written, written_values
from megatron.fsdp.dtensor.unsupported import (
    NO_COPY,
    NO_MEMORY,
    OWNER,
    SHARED_DATA,
    Unsupported,
    explained,
    refuse_memory,
    refuse_reads,
    refuse_tracing,
)


def has_ragged(*values: Any) -> bool:
    """Whether a :class:`RaggedDTensor` is among values or in their lists, tuples and dictionaries."""
    return any(isinstance(value, RaggedDTensor) for value in tree_flatten(values)[0])


class _Dispatching(TorchDispatchMode):
    """Dispatches operations to this module where torch would apply its rules to every DTensor."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_ragged(args, kwargs):
            return _dispatch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


# Up to torch 2.12, DTensor's C++ dispatch ignores __torch_dispatch__ of subclasses. A dispatch mode runs before it.
_IS_OLD = TorchVersion(torch.__version__) < "2.13"
_dispatching: Any = _Dispatching if _IS_OLD else torch._C.DisableTorchFunctionSubclass


class RaggedDTensor(InChunks, DTensor):
    """A DTensor with :class:`RaggedShard` or :class:`SectionedShard` among the placements of its spec.

    Main weights and results of reductions are RaggedDTensors even if they are replicated.

    ``__torch_function__`` sees every operation that is called from Python. Attributes pass through that, too: code that
    runs in every step reads them in ``torch._C.DisableTorchFunctionSubclass()``.
    """

    def __init__(self, *unused: Any, **unused_options: Any) -> None:
        """Do nothing: ``__new__`` sets all attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), _dispatching():
            return call(func, args, kwargs or {})

    def __new__(cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> "RaggedDTensor":
        """Create a tensor from this rank's shard and a spec; see :func:`make_dtensor`."""
        # DTensor's constructor copies the storage offset of the local tensor, which is a view of a flat buffer. Code
        # that copies tensors (pickling, staging of asynchronous checkpoints) would apply the offset to the wrapper.
        assert (meta := spec.tensor_meta) is not None
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

    def _set_data(self, value: torch.Tensor) -> None:
        # torch's setter would replace the memory of the wrapper, which has none. A main weight cannot move either, so
        # tensors that share its shard, such as an earlier .data, take the old values elsewhere with them.
        local, other = self._local_tensor, value if isinstance(value, RaggedDTensor) else None
        if other is not None and other._local_tensor is local:
            return
        if other is not None and _in_buffer(other._local_tensor):
            raise ValueError(SHARED_DATA)
        if not torch.can_cast(value.dtype, self.dtype):
            raise TypeError(f"A sharded parameter keeps its dtype: expected values of {self.dtype}; got {value.dtype}.")
        self._local_tensor, kept = local.view(local.shape), local.clone()
        self.detach().copy_(value)
        local.data = kept
        if other is not None and same_layout(other, self) and other.dtype == self.dtype:
            other._local_tensor = self._local_tensor  # as without sharding, a write to either is one to both

    data = property(_get_data, _set_data)
    storage = share_memory_ = apply_ = map_ = __dlpack__ = refuse_memory
    __tensor_flatten__, __tensor_unflatten__ = lambda self: (("_local_tensor",), None), staticmethod(refuse_tracing)

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
        """Gather the full tensor. Differentiable. A collective over the mesh, and so is its backward."""
        return ToFull.apply(self) if in_graph([self]) else gather_full(self)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Gather the full tensor and distribute it with torch's placements. Differentiable. A collective."""
        if placements is None:
            raise ValueError("redistribute: expected placements.")
        if tuple(placements) == self.placements:
            return self
        mesh = device_mesh or self.device_mesh
        replicated = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated if is_replicated(placements) else replicated.redistribute(mesh, placements)

    def to_local(self, *, grad_placements: object = None) -> torch.Tensor:
        """This rank's shard: rows of the tensor, or a one-dimensional range if it cuts a row. Differentiable."""
        local: torch.Tensor = ToLocal.apply(self) if in_graph([self]) else self._local_tensor
        return local

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if any(isinstance(each, nn.Module) for each in memo.values()):
            raise NotImplementedError(NO_COPY)  # the copy of a module has no engine
        copied: torch.Tensor = RaggedDTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=False)
        copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The attributes of a main weight refer to the model, which cannot be pickled.
        bare = nn.Parameter(self.detach(), self.requires_grad) if hasattr(self, OWNER) else self
        return DTensor.__reduce_ex__(bare, protocol)

    def __float__(self) -> float:
        """Read the only element. torch.tensor() of a list of norms does that while it dispatches no operation."""
        return float(reduced(self))

    def numpy(self, **options: Any) -> Any:
        """Return a number, such as a norm that is logged."""
        return refuse_memory() if self.dim() else reduced(self).numpy(**options)

    def tolist(self) -> Any:
        """Return a number."""
        return refuse_memory() if self.dim() else self.item()

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec or not self.dim() else repr(self)

    def __repr__(self) -> str:  # type: ignore[override]
        mine = local_slice(self._spec)
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, elements {mine.start} to {mine.stop} on this rank: "
            f"{self._local_tensor}, device_mesh={self.device_mesh})"
        )


# Creating and reading DTensors ----------------------------------------------------------------------------------


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], placements: Sequence[Placement], main: bool = False
) -> DTensor:
    """A DTensor with local tensor ``local``, which is not copied.

    Args:
        local: This rank's shard, possibly empty.
        mesh: Mesh that the tensor is sharded over.
        shape: Shape of the full tensor.
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


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor that is replicated over the mesh."""
    return make_dtensor(value, mesh, tuple(value.shape), [Replicate()] * mesh.ndim, main=True)


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
    """The full tensor of a DTensor, gathered by a collective if needed. Other values are returned as is."""
    if not isinstance(value, DTensor):
        return value
    return value._local_tensor if is_replicated(value._spec.placements) else value.full_tensor()


def _in_buffer(local: torch.Tensor) -> bool:
    """Whether a shard lies in a flat buffer, as those of parameters and of their gradients do."""
    base = local._base
    return base is not None and base.untyped_storage()._cdata == local.untyped_storage()._cdata


def _same(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one is other or (one.placements == other.placements and one.shape == other.shape and one.mesh == other.mesh)


def _as_plain(value: Any) -> Any:
    if isinstance(value, RaggedDTensor):
        return DTensor(value._local_tensor, value._spec, requires_grad=False)
    return value


def _as_ragged(value: Any) -> Any:
    if type(value) is not DTensor or any(placement.is_partial() for placement in value._spec.placements):
        return value
    return RaggedDTensor(value._local_tensor, value._spec, requires_grad=False)


# Dispatch --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten

# Element-wise operations that torch does not tag as pointwise.
_ELEMENTWISE = {
    f"aten::{name}"
    for name in "alias clone detach _to_copy zeros_like ones_like empty_like full_like copy_ zero_ fill_ lerp lerp_ "
    "is_pinned pin_memory _pin_memory lift_fresh _amp_update_scale_ masked_fill masked_fill_ "
    "floor_divide floor_divide_".split()
}


@functools.cache
def _is_elementwise(func: Any) -> bool:
    name, overload = func._schema.name, func._overloadname
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return True
    # torch does not tag all operations in place whose other form it tags.
    other = getattr(getattr(aten, name.removeprefix("aten::").rstrip("_"), None), overload, None)
    return name.endswith("_") and other is not None and torch.Tag.pointwise in other.tags


_ALIASES = (aten.alias.default, aten.detach.default)


def _dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    written = written_values(func, args, kwargs) if func._schema.is_mutable else []
    tensors = [each for each in tree_flatten(written)[0] if isinstance(each, RaggedDTensor)]
    if any(is_on_host(each.device) for each in tensors):
        finish_host_reads()
    try:
        result = _run(func, args, kwargs)
    except Unsupported as error:
        raise explained(error, tree_flatten((args, kwargs))[0]) from None
    if not func._schema.is_mutable:
        return result
    # Autograd counts writes to a tensor, but not those to its ``.data`` or in a list, and not in the shard.
    torch._C._increment_version([*tensors, *(each._local_tensor for each in tensors)])
    return None if result is None else tuple(written) if isinstance(result, tuple) else written[0]


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    name = func._schema.name
    # Arguments that are written and given by name: out=.
    if kwargs and any(n in kwargs for _, n in written(func)) and not _writes_shards(func, args, kwargs):
        return _on_full(func, args, kwargs)
    handler = _HANDLERS.get(name)
    if handler is not None:
        return handler(func, args, kwargs)
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        return _on_lists(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(func, args, kwargs)
    if _is_elementwise(func):
        return _elementwise(func, args, kwargs)
    flat, tree = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    if all(not isinstance(each, RaggedDTensor) or is_replicated(each._spec.placements) for each in tensors):
        return _on_full(func, args, kwargs)
    if any(not isinstance(each, DTensor) or is_ragged(each._spec) for each in tensors if each.dim()):
        raise Unsupported(func)
    require_no_graph(func, flat)
    if len({each.device_mesh for each in tensors if isinstance(each, DTensor)}) > 1:
        raise NeedsFullTensor(str(func))
    # torch has rules for tensors that are sharded evenly over a tensor-parallel axis only.
    args, kwargs = tree_unflatten([_as_plain(value) for value in flat], tree)
    return tree_map(_as_ragged, func(*args, **kwargs))


def _writes_shards(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether ``out=`` takes sharded tensors, into which an element-wise operation writes shards."""
    targets = written_values(func, args, kwargs)
    if not any(isinstance(each, RaggedDTensor) for each in targets):
        return False
    lead = _leading(tree_flatten((args, kwargs))[0])
    if not _is_elementwise(func) or not all(same_layout(each, lead) for each in targets):
        raise Unsupported(func)
    return True


def _on_full(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute with full tensors: the result is replicated, or plain if plain tensors are among the arguments."""
    flat, tree = tree_flatten((args, kwargs))
    # Full tensors are gathered for the call: what is written to them, or a shape that changes in place, would be lost.
    targets = [each for each in written_values(func, args, kwargs) if isinstance(each, DTensor)]
    if torch.Tag.inplace_view in func.tags or any(is_sharded(each) or in_graph(flat) for each in targets):
        raise Unsupported(func, "it would change a tensor that is made for it")
    require_no_graph(func, flat)
    args, kwargs = tree_unflatten([reduced(value) for value in flat], tree)
    # A view counts its writes with its base, as of a row of a main weight that is full.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        result = func(*args, **kwargs)
    if any(isinstance(value, torch.Tensor) and not isinstance(value, DTensor) for value in flat):
        return result
    mesh = _leading(flat).device_mesh
    return tree_map(lambda value: replicated(value, mesh) if isinstance(value, torch.Tensor) else value, result)


def _leading(values: Sequence[Any]) -> "RaggedDTensor":
    """The argument whose layout the result of an element-wise operation has."""
    ragged = [value for value in values if isinstance(value, RaggedDTensor)]
    return max(ragged, key=lambda each: (each.dim(), not is_replicated(each._spec.placements)))


def _operand(func: Any, value: Any, lead: DTensor) -> Any:
    """The operand for ``value`` in an element-wise operation with this rank's shard of ``lead``."""
    if isinstance(value, DTensor):
        if same_layout(value, lead):
            return value._local_tensor
        if isinstance(value, RaggedDTensor) and is_sharded(value) and value.shape != lead.shape:
            shapes = f"{tuple(lead.shape)} and {tuple(value.shape)}"
            raise Unsupported(func, f"operands of shapes {shapes} are sharded differently")
    value = reduced(value)
    if isinstance(value, torch.Tensor) and value.dim():
        if value.shape == lead.shape:
            return local_slice(lead._spec).take_from(value)
        if value.numel() != 1 or value.dim() > lead.dim():
            raise Unsupported(func, f"an operand is a plain tensor of shape {tuple(value.shape)}")
        return value.reshape((1,) * lead._local_tensor.dim())
    return value


def _result(func: Any, value: Any, lead: Any) -> Any:
    """The DTensor for a local result of an element-wise operation."""
    if not isinstance(value, torch.Tensor) or not isinstance(lead, DTensor):
        return value
    if value.shape != lead._local_tensor.shape:
        raise Unsupported(func)
    return make_like(value, lead)


def _needs_full(func: Any, value: Any, lead: DTensor) -> bool:
    """Whether, in a graph, an operand may differ between ranks or would take a gradient that a shard does not have."""
    if isinstance(value, RaggedDTensor):
        return not same_layout(value, lead)
    if isinstance(value, torch.Tensor):
        return value.requires_grad or not isinstance(value, DTensor)
    # Exponents are constants, such as the 2 of squares.
    return type(value) in (int, float) and torch.Tag.pointwise in func.tags and func._schema.name != "aten::pow"


_ONLY_ALIKE = "in a loss, it is supported in place only with tensors that are sharded alike"


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    flat, tree = tree_flatten((args, kwargs))
    in_place = func._schema.is_mutable
    # A plain tensor that is changed in place needs all elements, for instance an average of weights.
    if in_place and not isinstance(written_values(func, args, kwargs)[0], DTensor):
        return _on_full(func, args, kwargs)
    # A full tensor on every rank stays so if it is changed by a sharded one.
    lead = written_values(func, args, kwargs)[0] if in_place else _leading(flat)
    plain = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)]
    if not is_sharded(lead) and any(value.dim() > lead.dim() for value in plain):
        return _on_full(func, args, kwargs)
    if func in _ALIASES:
        # The result shares the shard itself, and with it the counter of writes, which inference tensors lack.
        with torch.inference_mode(False):
            return RaggedDTensor(lead._local_tensor, lead._spec, requires_grad=False)
    if in_graph(flat) and any(_needs_full(func, value, lead) for value in flat):
        if in_place:
            raise Unsupported(func, _ONLY_ALIKE)
        require_no_graph(func, flat)
    own_args, own_kwargs = tree_unflatten([_operand(func, value, lead) for value in flat], tree)
    result = func(*own_args, **own_kwargs)
    return result if in_place else tree_map(lambda value: _result(func, value, lead), result)


def _on_lists(func: Any, args: tuple, kwargs: dict) -> Any:
    """``_foreach_`` and fused operations: element-wise between tensors at the same position of each list."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    leading: Sequence[Any] = lists[0]
    sharded = [isinstance(lead, DTensor) for lead in leading]
    if not func._schema.is_mutable or not all(sharded):
        values = [value for each in lists for value in each]
        if func._schema.is_mutable and any(sharded) and in_graph(values):
            raise Unsupported(func, _ONLY_ALIKE)
        require_no_graph(func, values)
    targets = [each for each in written_values(func, args, kwargs) if isinstance(each, (list, tuple))]
    for value, lead in (pair for each in targets for pair in zip(each, leading, strict=False)):
        if is_sharded(lead) and value.dim() and not (isinstance(value, DTensor) and same_layout(value, lead)):
            raise Unsupported(func, "it writes a tensor that is sharded differently")

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(leading):
            return reduced(value)
        pairs = zip(value, leading, strict=True)
        return [_operand(func, each, lead) if isinstance(lead, DTensor) else reduced(each) for each, lead in pairs]

    result = func(*(local(value) for value in args), **{key: local(value) for key, value in kwargs.items()})
    if func._schema.is_mutable or not isinstance(result, (list, tuple)):
        return result
    return [_result(func, value, lead) for value, lead in zip(result, leading, strict=True)]


def _unscale(func: Any, args: tuple, kwargs: dict) -> None:
    """Unscale gradients, and set ``found_inf`` if any rank has a non-finite one. A collective."""
    grads, found_inf, inv_scale = args
    func([each._local_tensor if isinstance(each, DTensor) else each for each in grads], found_inf, reduced(inv_scale))
    # torch reduces over the axes along which the first gradient is sharded, so that ranks would skip different steps.
    mesh, _ = spanning_mesh(grads)
    found_inf.copy_(reduce_over(found_inf, dist.ReduceOp.MAX, mesh, range(mesh.ndim)))


def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """``copy_`` into a ragged tensor from a full tensor or from one with another layout."""
    target, source = args[:2]
    if not isinstance(target, DTensor):
        require_no_graph(func, args)
        return target.copy_(reduced(source), *args[2:], **kwargs)
    if not isinstance(target, RaggedDTensor):
        raise Unsupported(func, "the target is sharded evenly")
    if isinstance(source, DTensor) and not (isinstance(source, RaggedDTensor) and same_layout(source, target)):
        if in_graph([source]):
            raise Unsupported(func, _ONLY_ALIKE)
        source = gather_full(source)
    if isinstance(source, RaggedDTensor):
        source = source._local_tensor
    elif source.dim() and source.shape == target.shape:
        source = local_slice(target._spec).take_from(source)
    elif source.numel() != 1:
        raise ValueError(f"copy_: expected a tensor of shape {tuple(target.shape)}; got {tuple(source.shape)}.")
    target._local_tensor.copy_(source, *args[2:], **kwargs)
    return target


def _random(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw the full tensor as without sharding, and keep this rank's slice.

    If the random states of ranks differ, replicas take the values of the first rank of their axis.
    """
    target = args[0]
    if (draw := {"aten::randn_like": "normal_", "aten::rand_like": "uniform_"}.get(func._schema.name)) is not None:
        return getattr(torch.empty_like(target, **kwargs), draw)()
    if not isinstance(target, RaggedDTensor) or not func._schema.is_mutable:
        raise Unsupported(func, "random numbers are drawn in place only, such as by torch.empty_like(p).normal_()")
    spec, local = target._spec, target._local_tensor
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(whole, *args[1:], **kwargs)
    drawn = local_slice(spec).take_from(whole).contiguous()
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate) and spec.mesh.size(axis) > 1:
            sent = on_device(drawn, spec.mesh)
            broadcast(sent, 0, spec.mesh.get_group(axis))
            drawn.copy_(sent)
    return local.copy_(drawn)


def _new(func: Any, args: tuple, kwargs: dict) -> Any:
    """``new_empty`` and similar functions: a ragged tensor for the same shape, else a plain tensor."""
    tensor, size, rest = args[0], tuple(args[1]), args[2:]
    if size != tuple(tensor.shape):
        return func(tensor._local_tensor, size, *rest, **kwargs)
    return make_like(func(tensor._local_tensor, tuple(tensor._local_tensor.shape), *rest, **kwargs), tensor)


def _reduction(func: Any, args: tuple, kwargs: dict) -> Any:
    """A reduction. A collective: of all elements, this rank's are reduced first; else the full tensor is gathered."""
    tensor, given = args[0], _arguments(func, args, kwargs)
    require_no_graph(func, args[:1])
    dim = given.get("dim")
    size = max(tensor.dim(), 1)  # a scalar may be reduced along a dimension
    dims = [dim] if isinstance(dim, int) else list(dim or range(size))
    # `max` and `min` along a dimension return indices as well, so they have several results.
    if len(func._schema.returns) > 1 or {d % size for d in dims} != set(range(size)):
        return _on_full(func, args, kwargs)
    value = reduce_tensor(func._schema.name.removeprefix("aten::"), tensor, given)
    return replicated(value.reshape((1,) * tensor.dim()) if given.get("keepdim") else value, tensor.device_mesh)


def _arguments(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _foreach_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors, given = args[0], _arguments(func, args, kwargs)
    require_no_graph(func, tensors)
    order, dtype = float(given.get("ord", 2)), given.get("dtype")
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    found = iter(norms(sharded, order, dtype))
    return [
        replicated(next(found), each.device_mesh)
        if isinstance(each, DTensor)
        else torch.linalg.vector_norm(each, order, dtype=dtype)
        for each in tensors
    ]


_HANDLERS: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "aten::copy_": _copy,
    "aten::is_same_size": lambda func, args, kwargs: args[0].shape == args[1].shape,
    "aten::_foreach_norm": _foreach_norm,
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **{f"aten::new_{kind}": _new for kind in ("empty", "zeros", "ones", "full")},
    **{f"aten::{name}": _on_full for name in "equal allclose var std _local_scalar_dense".split()},
    **{
        f"aten::{name}": _reduction
        for name in "sum mean max min amax amin linalg_vector_norm norm all any prod count_nonzero".split()
    },
}
