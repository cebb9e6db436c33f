"""Tells values of weights from codes of quantized ones, which mean nothing without their scales."""

from typing import Any

import torch
from torch import nn

# Classes whose parameters hold codes, in memory of any dtype, and the attribute that says that they do by now.
_CLASSES = {("bitsandbytes.nn.modules", "Params4bit"): "bnb_quantized"}


def can_be_trained(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of floating-point numbers of 16 bits or more, which every backend sends, too."""
    return dtype.is_floating_point and dtype.itemsize > 1


def of_codes(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen, and its class says that its memory holds codes."""
    cls = type(parameter)
    found = getattr(parameter, _CLASSES.get((cls.__module__, cls.__qualname__), ""), False)
    return bool(found) and not parameter.requires_grad


def holds_codes(parameter: nn.Parameter) -> bool:
    """Whether a parameter may hold codes, which are sharded as they are: it is frozen, and has no values to update."""
    values = parameter.is_complex() or can_be_trained(parameter.dtype)
    return of_codes(parameter) or not (values or parameter.requires_grad)


def scales_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Scales that the class of codes shows by name: torch's state dicts look for it by the names in their keys."""
    shown = vars(type(parameter)).items() if of_codes(parameter) else ()
    names = [name for name, each in shown if isinstance(each, property) and hasattr(parameter, name)]
    return {name: getattr(parameter, name) for name in names}


def keep_codes(module: nn.Module) -> None:
    """Keep a module of bitsandbytes from packing its codes in a different order on a CPU, in memory of its own."""
    if getattr(module, "support_avx512bf16_for_cpu", False):
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_values(name: str, dtype: torch.dtype, wanted: torch.dtype) -> None:
    """Raise ValueError if codes would be taken for values.

    Args:
        name: What they are called.
        dtype: Their dtype.
        wanted: Dtype of what they are to be copied to.
    """
    if can_be_trained(wanted) and dtype.itemsize == 1:
        raise ValueError(
            f"{name}: expected values of {wanted} or another floating-point dtype of 16 bits or more; got {dtype}, "
            "which may be codes of a quantized weight, without the scales. Load dequantized values."
        )
