"""Kernels of a GPU, as far as memory, messages and floating-point operations go: they are not run."""

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from megatron.fsdp.mcore.cpu.torch_view import COMPILED
from megatron.fsdp.tools.predict.ghosts import Cost
from megatron.fsdp.tools.predict.record import message_of


class Attention(torch.autograd.Function):
    """Causal fused attention, as far as memory, messages and floating-point operations go.

    Query, key and value are [tokens, batch, heads, channels], and the result is [tokens, batch, heads * channels]. With
    context parallelism, keys and values are passed on in a ring while those that have arrived are attended to, and
    equally many are left by the causal mask on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, entries: list[Any], ring: dist.ProcessGroup, query: Any, key: Any, value: Any
    ) -> torch.Tensor:
        """Record it, and keep what its backward reads."""
        tokens, batch, heads, channels = query.shape
        result = query.new_empty(tokens, batch, heads * value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(tokens, batch, heads, dtype=torch.float32))
        ctx.entries, ctx.ring = entries, ring
        # Two matmuls of tokens x tokens, of which a causal mask leaves half.
        ctx.flops = batch * heads * tokens * key.shape[0] * ring.size() * (channels + value.shape[-1])
        _pass_on(entries, ring, cost_of(ctx.flops, query, key, value, result), key, value)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Record it."""
        query, key, value, result, _ = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        # Five matmuls instead of two: the scores are computed again. Gradients of keys and values go with them.
        cost = cost_of(ctx.flops * 5 // 2, query, key, value, result, *made)
        _pass_on(ctx.entries, ctx.ring, cost, key, value, *made[1:])
        return None, None, *made


def _pass_on(entries: list[Any], ring: dist.ProcessGroup, cost: Cost, *sent: torch.Tensor) -> None:
    """Record attention, with what ranks send to the next one in its course."""
    size = sum(tensor.nbytes for tensor in sent) * ring.size()
    entries.append(cost if ring.size() == 1 else message_of("ring", ring, size)._replace(meanwhile=(cost,)))


class Kernel(torch.autograd.Function):
    """An operator on one tensor in one kernel, as far as memory goes. Its backward may need what it returns."""

    @staticmethod
    def forward(ctx: Any, run: Any, given: torch.Tensor, keeps: bool) -> torch.Tensor:
        """Record it, and keep what its backward reads."""
        result = torch.empty_like(given)
        ctx.save_for_backward(*[result] * keeps)
        ctx.run = run
        run.add(cost_of(0, given, result, kind="memory"))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Record it."""
        made = torch.empty_like(gradients[0])
        ctx.run.add(cost_of(0, gradients[0], made, *ctx.saved_tensors, kind="memory"))
        return None, made, None


class Grouped(torch.autograd.Function):
    """A linear layer per expert, as far as memory and floating-point operations go.

    The experts' tokens are [all tokens, channels], and their weights [experts * results, channels].
    """

    @staticmethod
    def forward(ctx: Any, run: Any, number: int, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Record it, and keep what its backward reads."""
        result = tokens.new_empty(len(tokens), len(weights) // number)
        ctx.save_for_backward(tokens, weights)
        ctx.run, ctx.own_weight, ctx.flops = run, weights, 2 * tokens.numel() * result.shape[1]
        run.add(cost_of(ctx.flops, tokens, result, weights, kind="matmul"))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Record it."""
        tokens, weights = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in (tokens, weights)]
        with ctx.run.quantized(ctx.own_weight, gradients[0]):
            for read, written in zip((weights, tokens), made, strict=True):
                ctx.run.add(cost_of(ctx.flops, gradients[0], read, written, kind="matmul"))
        return None, None, *made


def compiled() -> Iterator[tuple[Any, str]]:
    """Functions of Megatron that torch.compile makes one kernel of, and the modules that have them."""
    for path, module in [*sys.modules.items()]:
        if path.startswith("megatron.core."):
            for name, value in [*vars(module).items()]:
                if isinstance(value, FunctionType) and hasattr(value, COMPILED):
                    yield module, name


def one_adam(update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Adam in one kernel, as on a GPU."""
    update(*args, **{**kwargs, "foreach": False, "fused": True})


def cost_of(flops: int, *tensors: torch.Tensor, kind: str = "attention") -> Cost:
    """An operator that reads and writes some tensors, and computes in the dtype of the first."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Cost(kind, kind, dtype, flops, sum(tensor.nbytes for tensor in tensors))
