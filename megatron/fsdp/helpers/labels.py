"""Labels of what the engine does, for profilers: torch's, and nsys by way of ``torch.autograd.profiler.emit_nvtx``."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Any)


def profiled(what: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method of a class with a ``label``: a profiler that runs sees its calls as ``"FSDP <what> <label>"``.

    Without a profiler that costs one look at torch's own flag. ``record_function`` alone would cost several times that.
    ``torch.autograd._profiler_enabled()`` is False where a profiler watches all threads, which sees the CPU's stream.
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.autograd.profiler._is_profiler_enabled:
                return method(self, *args, **kwargs)
            with torch.autograd.profiler.record_function(f"FSDP {what} {self.label}"):
                return method(self, *args, **kwargs)

        return call

    return decorate
