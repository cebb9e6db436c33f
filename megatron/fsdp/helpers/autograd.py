"""Functions of autograd's engine that have no public interface."""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def in_backward() -> bool:
    """True if this thread runs a backward. A forward that runs then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward that runs. If that raises, autograd drops the callback uncalled."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError, which begins with ``what``, inside of torch.func, forward AD or torch.jit.trace."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{what}: torch.func (vmap, grad, jvp, jacrev) and forward-mode AD do not work through a sharded model. "
            "Use torch.autograd.grad, torch.autograd.functional.jacobian, or a loop in place of vmap."
        )
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"{what}: torch.jit.trace would keep weights as constants. Build an unsharded model, load the full "
            "weights, which full_tensor() of each value of the state dict gives on all ranks, and trace it."
        )
