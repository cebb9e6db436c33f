"""Callbacks that do not keep their object alive, so that deleting a model frees its memory at once."""

import weakref
from collections.abc import Callable
from typing import Any

import torch


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a bound method that returns None once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        return target(*args, **kwargs) if target is not None else None

    return call


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which torch.compile calls and does not look into: communication has no place in a graph."""
    return torch.compiler.disable(function)
