"""Raises an error when code adds, replaces or converts parameters of a sharded model, which would not be trained."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import parametrize

from megatron.fsdp.dtensor.unsupported import BEFORE, OWNER
from megatron.fsdp.runtime.partition import owner_of

# The modules of sharded models, each with a reference to its engine.
_sharded: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


def reject_structural_changes(root: nn.Module, owner: object) -> None:
    """Raise an error from now on if parameters in ``root`` are replaced or added, and keep torch from moving them.

    The checks end with ``owner``.
    """
    for module in root.modules():
        _sharded[module] = weakref.ref(owner)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _keep_in_buffer  # type: ignore[method-assign]
    _watch()


def _keep_in_buffer() -> None:
    """In place of a recurrent layer's ``flatten_parameters``: on CUDA it moves the weights, at the next forward."""


def reject_conversion(parameters: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise NotImplementedError if ``fn``, the function that ``nn.Module._apply`` gets, changes dtype or device."""
    # Applied to an empty tensor of each dtype and device: nothing is converted for the check.
    for dtype, device in {(parameter.dtype, parameter.device): None for parameter in parameters}:
        changed = fn(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            raise NotImplementedError(
                f"The model is sharded: its parameters stay {dtype} on {device} and cannot become {changed.dtype} on "
                f"{changed.device}. Convert or move the model before sharding it, or set dtypes by the mixed precision "
                "policy."
            )


def apply_if_allowed(
    original: Callable[..., nn.Module],
    module: nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """``nn.Module._apply``, unless it would convert parameters of a part of a sharded model."""
    if _is_sharded(module):
        reject_conversion((p for p in module._parameters.values() if p is not None and hasattr(p, OWNER)), fn)
    return original(module, fn, *args, **kwargs)


def _is_sharded(module: nn.Module) -> bool:
    owner = _sharded.get(module)
    return owner is not None and owner() is not None


@functools.cache
def _watch() -> None:
    # torch's registration hooks are global, so they are registered once for all models.
    register_module_parameter_registration_hook(_parameter_registered)
    register_module_module_registration_hook(_module_registered)


def _parameter_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    kind = type(module).__name__
    if parameter is None:
        return
    if owner_of(parameter) is not None and module._parameters.get(name) is not parameter:
        if _is_sharded(module) or isinstance(module, parametrize.ParametrizationList):
            raise RuntimeError(f"{kind}.{name} would be a parameter that is sharded in another place. {BEFORE}")
    if not _is_sharded(module) or hasattr(parameter, OWNER):
        return
    before = module._parameters.get(name)
    if before is not None and not hasattr(before, OWNER):
        return  # an ignored parameter
    if before is not None:
        raise RuntimeError(
            f"{kind}.{name} is sharded: a parameter that replaces it would be neither sharded nor trained. Copy values "
            f"into it with torch.no_grad(): module.{name}.copy_(value), where value is the full tensor; or replace it "
            "before the model is sharded."
        )
    raise RuntimeError(
        f"{kind} is part of a sharded model: a new parameter {name!r} would be neither sharded nor synchronized "
        "between ranks. Add it before the model is sharded."
    )


def _module_registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or not _is_sharded(module):
        return
    new = [path for path, parameter in child.named_parameters() if not hasattr(parameter, OWNER)]
    if new:
        raise RuntimeError(
            f"{type(module).__name__} is part of a sharded model: parameters of a new module {name!r} "
            f"({', '.join(new[:3])}) would be neither sharded nor synchronized between ranks. Add modules, such as "
            "adapters, before the model is sharded."
        )
