"""Reductions of a sharded tensor: of one rank's shard, and then over the ranks, at once.

A loss that reads a parameter outside of the model's forward, such as a penalty on weights, reduces it at once: on every
rank, that is a function of the full tensor.
"""

import copy
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.fsdp.dtensor.gathering import OfAllShards, reduce_over, unreplicated_axes
from megatron.fsdp.dtensor.unsupported import Unsupported, explained

_SUM, _PRODUCT, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN


def reduce_tensor(name: str, tensor: DTensor, given: dict[str, Any]) -> torch.Tensor:
    """Reduce all elements of a sharded tensor, on every rank. A collective over the axes that shard it.

    Args:
        name: Name of torch's operation.
        tensor: The tensor.
        given: Arguments of the operation, by name.

    Returns:
        A scalar.
    """
    if name in ("linalg_vector_norm", "norm"):
        order = given.get("ord", given.get("p"))
        return norms([tensor], 2.0 if order is None else float(order), given.get("dtype"))[0]
    local, dtype = tensor._local_tensor.reshape(-1), given.get("dtype")
    # The result of an empty shard is the neutral element.
    if name in ("max", "amax", "min", "amin"):
        largest = "max" in name
        empty = local.new_full((1,), _extreme(local.dtype, largest=not largest))
        own = local if local.numel() else empty
        value, operation = (own.amax(), _MAX) if largest else (own.amin(), _MIN)
    elif name == "mean":
        # The sum of many elements may be too large for their own dtype.
        value = local.sum(dtype=torch.promote_types(dtype or local.dtype, torch.float32)) / tensor.numel()
        mean = reduce_over(value, _SUM, tensor.device_mesh, unreplicated_axes(tensor), [tensor])
        return mean.to(dtype or local.dtype) if local.is_floating_point() else mean
    elif name in ("all", "any"):
        value, operation = (local.all(), _MIN) if name == "all" else (local.any(), _MAX)
    elif name == "count_nonzero":
        value, operation = local.count_nonzero(), _SUM
    else:
        value, operation = getattr(local, name)(dtype=dtype), _PRODUCT if name == "prod" else _SUM
    return reduce_over(value, operation, tensor.device_mesh, unreplicated_axes(tensor), [tensor])


def norms(tensors: Sequence[DTensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norms of sharded tensors, on every rank. A collective for all tensors that the same axes shard."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device_mesh, unreplicated_axes(tensor)), []).append(i)
    found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    is_power = order != 0 and math.isfinite(order)
    for (mesh, axes), places in alike.items():
        of = [tensors[i] for i in places]
        values = torch.stack(_norms_of_shards([tensor._local_tensor.reshape(-1) for tensor in of], order, dtype))
        if is_power and axes:
            powers = values.to(torch.promote_types(values.dtype, torch.float32)) ** order
            values = reduce_over(powers, _SUM, mesh, axes, of) ** (1 / order)
        else:
            operation = {math.inf: _MAX, -math.inf: _MIN}.get(order, _SUM)
            values = reduce_over(values, operation, mesh, axes, of)
        for i, value in zip(places, values.unbind(), strict=True):
            found[i] = value.to(dtype or tensors[i].dtype)
    return found


def _norms_of_shards(shards: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    held = [shard for shard in shards if shard.numel()]
    # On CUDA, one kernel for many tensors.
    found = iter(torch._foreach_norm(held, order, dtype=dtype) if held else ())
    # The neutral element: torch has 0, or an error, for the norms of an empty tensor that are minima.
    empty = shards[0].new_full((), math.inf if order < 0 else 0.0, dtype=dtype or shards[0].dtype)
    return [next(found) if shard.numel() else empty for shard in shards]


def _extreme(dtype: torch.dtype, largest: bool) -> float | int | bool:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


class Whole(torch.Tensor):
    """A full tensor that a graph has computed from sharded ones alone, such as a penalty on weights.

    Outside of graphs, such results are DTensors. Code for torch's FSDP2 calls ``full_tensor()`` of both.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # torch.compile follows the base of a view, which itself has none.
        return result if func.__name__ == "__get__" else _whole(result, args, kwargs)

    def full_tensor(self, *, grad_placements: object = None) -> torch.Tensor:
        """Return the plain tensor."""
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(self.full_tensor(), memo)

    def __format__(self, format_spec: str) -> str:
        return format(self.full_tensor(), format_spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.full_tensor())


def _whole(result: Any, args: tuple, kwargs: dict | None) -> Any:
    """The plain tensors of a result as :class:`Whole`, unless plain tensors, such as activations, are its operands."""
    for value in tree_leaves((args, kwargs)):
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, (DTensor, Whole))
        if value is result or (is_plain and value.dim()):
            return result
    return tree_map_only(torch.Tensor, lambda t: t.as_subclass(Whole) if type(t) is torch.Tensor else t, result)


class NeedsFullTensor(NotImplementedError):
    """A step of a read for which shards are not enough: ranks may give other operands, or its derivative needs all.

    :func:`call` catches it. Users see it only where torch calls operations by another way, as torch.func does.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} of sharded parameters inside torch.func (vmap, grad, jacrev), which cannot gather them: pass "
            "parameter.full_tensor() instead of the parameter."
        )


def in_graph(values: Sequence[Any]) -> bool:
    """Whether autograd records an operation of these arguments."""
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def require_no_graph(func: Any, values: Sequence[Any]) -> None:
    """Raise NeedsFullTensor if autograd records an operation of these arguments: see :func:`call`."""
    if in_graph(values):
        raise NeedsFullTensor(str(func))


def call(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call a function of torch with sharded tensors: on shards where that is exact, else on full tensors."""
    if (result := _sum_or_norm(func, args, kwargs)) is not None:
        return _whole(result, args, kwargs)
    # A function in Python may have drawn random numbers before it needs a full tensor.
    states = [(each, each.get_state()) for each in _generators()] if isinstance(func, FunctionType) else []
    try:
        return func(*args, **kwargs)
    except NeedsFullTensor:
        if func is torch.Tensor.view_as and args[0] is args[1]:
            # How hooks of several gradients find where torch accumulates a gradient, which is not where we do.
            raise explained(Unsupported(torch.ops.aten.view.default), args) from None
        for generator, state in states:
            generator.set_state(state)
        # A tensor-parallel module outside of units computes with activations of torch's own class, and returns one.
        mesh = next((v.device_mesh for v in tree_leaves((args, kwargs)) if type(v) is DTensor), None)

        def full(tensor: DTensor) -> torch.Tensor:
            if mesh is None:
                return tensor.full_tensor()
            return tensor if type(tensor) is DTensor else tensor.redistribute(mesh, [Replicate()] * mesh.ndim)

        return _whole(func(*tree_map_only(DTensor, full, args), **tree_map_only(DTensor, full, kwargs)), args, kwargs)


def _generators() -> list[torch.Generator]:
    """The generators of random numbers that functions draw from on this rank."""
    on_cuda = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    return [torch.default_generator, *([torch.cuda.default_generators[torch.cuda.current_device()]] if on_cuda else [])]


def _sum_or_norm(func: Callable[..., Any], args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The sum, mean or norm of all elements as a plain tensor, from the results of all shards; None for others."""
    name, given = getattr(func, "__name__", ""), [*args[1:], *kwargs.values()]
    is_norm = name in ("norm", "linalg_vector_norm")
    order = 2.0 if not given or given == ["fro"] else given[0]
    # With other arguments, such as dimensions, the full tensor is gathered.
    simple = len(given) <= is_norm and kwargs.keys() <= {"p", "ord"}
    simple = simple and isinstance(order, (int, float)) and 0 < order < math.inf
    if not simple or not (is_norm or name in ("sum", "mean")) or not in_graph(args[:1]):
        return None
    local, spec = args[0].to_local().reshape(-1), args[0]._spec
    if is_norm:
        return torch.linalg.vector_norm(OfAllShards.apply(torch.linalg.vector_norm(local, order), spec), order)
    total: torch.Tensor = OfAllShards.apply(local.sum(), spec).sum()
    return total / args[0].numel() if name == "mean" else total
