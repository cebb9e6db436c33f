"""Labels of what the engine does, for profilers: torch's, and nsys by way of ``torch.autograd.profiler.emit_nvtx``."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_OF_CHECKPOINTS = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def profiled(what: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method of a class with a ``label``: a profiler that runs sees its calls as ``"FSDP <what> <label>"``.

    What selective checkpointing keeps of a forward and looks up in its recomputation does not contain the method's
    operations: the recomputation of a unit may reduce the gradients of another.

    Without a profiler that costs one look at torch's own flag. ``record_function`` alone would cost several times that.
    ``torch.autograd._profiler_enabled()`` is False where a profiler watches all threads, which sees the CPU's stream.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if torch._C._len_torch_dispatch_stack() and any(
                isinstance(mode, _OF_CHECKPOINTS) for mode in _get_current_dispatch_mode_stack()
            ):
                with _disable_current_modes():
                    return call(self, *args, **kwargs)
            if not torch.autograd.profiler._is_profiler_enabled:
                return method(self, *args, **kwargs)
            with torch.autograd.profiler.record_function(f"FSDP {what} {self.label}"):
                return method(self, *args, **kwargs)

        return call

    return decorate
