"""Functions of autograd's engine that have no public interface."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_backward() -> bool:
    """True if this thread runs a backward. A forward that runs then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward that runs. If that raises, autograd drops the callback uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_forward_ad() -> bool:
    """True inside of torch.func.jvp and forward_ad.dual_level()."""
    return forward_ad._current_level >= 0


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func.jvp has wrapped; any other tensor as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError, which begins with ``what``, inside of torch.jit.trace and torch.func except jvp."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() != torch._C._functorch.TransformType.Jvp for level in levels):
        raise NotImplementedError(
            f"{what}: torch.func (vmap, grad, jacrev) does not work through a sharded model, except jvp. "
            "Use torch.autograd.grad, torch.autograd.functional.jacobian, or a loop in place of vmap."
        )
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"{what}: torch.jit.trace would keep weights as constants. Build an unsharded model, load the full "
            "weights, which full_tensor() of each value of the state dict gives on all ranks, and trace it."
        )


def outside_transforms(function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Call a function whose operators return plain tensors: torch.func.jvp wraps the results of all operators."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return function(*args, **kwargs)
    with temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)
