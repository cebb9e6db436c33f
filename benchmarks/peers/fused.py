"""A mock of kernels that write weight gradients by themselves, such as Transformer Engine's, in plain torch."""

import functools
from typing import Any

import torch
from torch import nn


class _Linear(torch.autograd.Function):
    """A linear layer whose backward overwrites ``get_main_grad()`` with the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias = weight, bias is not None
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        (x,), weight, grad = ctx.saved_tensors, ctx.weight, grads[0]
        flat_grad, flat_x = grad.flatten(0, -2), x.flatten(0, -2)
        weight.main_grad = weight.get_main_grad()
        torch.mm(flat_grad.to(weight.main_grad.dtype).t(), flat_x.to(weight.main_grad.dtype), out=weight.main_grad)
        weight.grad_added_to_main_grad = True
        # Autograd expects a gradient, which nobody reads.
        return grad @ weight, torch.empty_like(weight), flat_grad.sum(0) if ctx.has_bias else None


def fuse(model: nn.Module) -> None:
    """Make all linear layers of ``model`` use the mock."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Linear.apply(x, layer.weight, layer.bias)
    return out


def fused_numel(model: nn.Module) -> int:
    """Number of elements of all weights whose gradients the mock writes."""
    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
