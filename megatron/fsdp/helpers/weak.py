"""Wrappers for callbacks: one that does not keep its object alive, and one that torch.compile does not trace."""

import weakref
from collections.abc import Callable
from typing import Any

import torch


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method so that the wrapper does not keep its object alive; it returns None once the object is gone.

    Hooks hold such wrappers, so that deleting a model frees its memory at once, without waiting for the garbage
    collector to find a cycle.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        return target(*args, **kwargs) if target is not None else None

    return call


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from torch.compile, which would otherwise trace communication and its waits into a graph."""
    return torch.compiler.disable(function)
