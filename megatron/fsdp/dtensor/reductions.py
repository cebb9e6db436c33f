"""Reductions of a sharded tensor: the result of one shard, and the placement that combines the results of all ranks.

A loss that reads a parameter outside of the model's forward, such as a penalty on weights, reduces it at once: on every
rank, that is a function of the full tensor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from megatron.fsdp.dtensor.gathering import OfAllShards


def shard_result(name: str, local: torch.Tensor, numel: int, given: dict[str, Any]) -> tuple[torch.Tensor, Placement]:
    """Reduce one rank's shard. The result of an empty shard is the neutral element.

    Args:
        name: Name of torch's operation.
        local: The shard, flattened.
        numel: Number of elements in the whole tensor.
        given: Arguments of the operation, by name.

    Returns:
        A scalar, and the partial placement that reduces the scalars of all ranks.
    """
    dtype = given.get("dtype")
    if name in ("max", "amax", "min", "amin"):
        largest = "max" in name
        if not local.numel():
            return local.new_full((), _extreme(local.dtype, largest=not largest)), Partial("max" if largest else "min")
        return local.amax() if largest else local.amin(), Partial("max" if largest else "min")
    if name in ("linalg_vector_norm", "norm"):
        order = given.get("ord", given.get("p"))
        return shard_norm(local, 2.0 if order is None else float(order), dtype)
    if name == "mean":
        return local.sum(dtype=dtype) / numel, Partial("sum")
    if name in ("all", "any"):
        return getattr(local, name)(), Partial("product" if name == "all" else "sum")
    if name == "count_nonzero":
        return local.count_nonzero(), Partial("sum")
    return getattr(local, name)(dtype=dtype), Partial("product" if name == "prod" else "sum")


def shard_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> tuple[torch.Tensor, Placement]:
    """The norm of one rank's flattened shard, and the partial placement that reduces the norms of all ranks."""
    special: dict[float, str] = {math.inf: "max", -math.inf: "min", 0.0: "sum"}
    placement = Partial(special[order]) if order in special else _NormPartial(order)
    if not local.numel():
        # torch raises an error for the infinity norm of an empty tensor.
        return local.new_full((), math.inf if order == -math.inf else 0.0, dtype=dtype or local.dtype), placement
    return torch.linalg.vector_norm(local, order, dtype=dtype), placement


def _extreme(dtype: torch.dtype, largest: bool) -> float | int | bool:
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


class NeedsFullTensor(NotImplementedError):
    """A step of a read for which shards are not enough: ranks may give other operands, or its derivative needs all."""


def in_graph(values: Sequence[Any]) -> bool:
    """Whether autograd records an operation of these arguments."""
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def require_no_graph(func: Any, values: Sequence[Any]) -> None:
    """Raise NeedsFullTensor if autograd records an operation of these arguments: see :func:`call`."""
    if in_graph(values):
        raise NeedsFullTensor(f"{func} in a loss")


def call(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call a function of torch with sharded tensors under grad: on shards where that is exact, else on full tensors."""
    if (result := _sum_or_norm(func, args, kwargs)) is not None:
        return result
    try:
        return func(*args, **kwargs)
    except NeedsFullTensor:
        args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
        return func(*args, **kwargs)


def _sum_or_norm(func: Callable[..., Any], args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The sum, mean or norm of all elements as a plain tensor, from the results of all shards; None for others."""
    name, given = getattr(func, "__name__", ""), [*args[1:], *kwargs.values()]
    is_norm = name in ("norm", "linalg_vector_norm")
    order = 2.0 if not given or given == ["fro"] else given[0]
    # With other arguments, such as dimensions, the full tensor is gathered.
    simple = len(given) <= is_norm and isinstance(order, (int, float)) and 0 < order < math.inf
    if not simple or not (is_norm or name in ("sum", "mean")) or not in_graph(args[:1]):
        return None
    local, spec = args[0].to_local().reshape(-1), args[0]._spec
    if is_norm:
        return torch.linalg.vector_norm(OfAllShards.apply(torch.linalg.vector_norm(local, order), spec), order)
    total: torch.Tensor = OfAllShards.apply(local.sum(), spec).sum()
    return total / args[0].numel() if name == "mean" else total
