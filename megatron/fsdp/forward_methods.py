"""Methods other than ``forward`` that use parameters: calling one unshards and reshards units as forward does."""

import functools
import inspect
import weakref
from typing import Any

from torch import nn

from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.runtime.engine import engines_of
from megatron.fsdp.runtime.unit import as_forward

_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method that uses parameters of a sharded model callable outside of ``forward``.

    Parameters are unsharded only during the forward of their unit. A registered method unshards the unit that contains
    its module, as forward does. Inside that unit's forward, it has no additional effect.

    Args:
        module: A module of a sharded model, or the sharded model itself, which then also gets the wrapped model's
            method.
        method_name: Name of the method.

    Raises:
        ValueError: The module does not belong to a sharded model, or does not have the method, or it is a generator or
            a coroutine.
    """
    wrapper = module if isinstance(module, ShardedModel) else None
    inner = wrapper.module if wrapper is not None else module
    engines = [wrapper.engine] if wrapper is not None else engines_of(inner.parameters())
    unit = engines[0].unit_around(inner) if len(engines) == 1 else None
    if unit is None:
        raise ValueError(
            f"register_forward_method: expected a module of a sharded model; got a {type(inner).__name__} that does "
            "not belong to one. Shard the model first."
        )
    own = vars(inner).get(method_name)
    if not callable(own or getattr(type(inner), method_name, None)):
        hint = did_you_mean(method_name, dir(type(inner)))
        raise ValueError(f"register_forward_method: {type(inner).__name__} has no method {method_name!r}.{hint}")
    function = own or getattr(type(inner), method_name)
    if any(runs(function) for runs in _LATER):
        raise ValueError(
            f"register_forward_method: {method_name} computes after its call has returned, when weights are sharded "
            "again. Register a method that returns its results, or those that it calls."
        )
    bound = not isinstance(inspect.getattr_static(inner, method_name), staticmethod | classmethod)
    call = as_forward(unit, inner, own or (_Unbound(inner, method_name) if bound else function))
    setattr(inner, method_name, call)
    if wrapper is not None:
        setattr(wrapper, method_name, call)


class _Unbound:
    """A method with a weak reference to its module. A bound method in the module's ``__dict__`` would be a cycle."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._function = getattr(type(module), name)
        functools.update_wrapper(self, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs)
