"""Tells values of weights from codes of quantized ones, which mean nothing without their scales."""

from typing import Any

import torch
from torch import nn

# Classes whose parameters hold codes, in memory of any dtype, and the attribute that says that they do by now.
_CLASSES = {("bitsandbytes.nn.modules", "Params4bit"): "bnb_quantized"}


def of_codes(parameter: nn.Parameter) -> bool:
    """Whether the class of a parameter says that its memory holds codes."""
    cls = type(parameter)
    return bool(getattr(parameter, _CLASSES.get((cls.__module__, cls.__qualname__), ""), False))


def holds_codes(parameter: nn.Parameter) -> bool:
    """Whether a parameter may hold codes, which are sharded as they are: it is frozen, and has no values to update."""
    dtype = parameter.dtype
    values = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return not parameter.requires_grad and (not values or of_codes(parameter))


def scales_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Scales that the class of codes shows by name: torch's state dicts look for it by the names in their keys."""
    names = [name for name, each in vars(type(parameter)).items() if isinstance(each, property)]
    return {name: getattr(parameter, name) for name in names if of_codes(parameter) and hasattr(parameter, name)}


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
    if wanted.is_floating_point and wanted.itemsize > 1 and dtype.itemsize == 1:
        raise ValueError(
            f"{name}: expected values of {wanted} or another floating-point dtype of 16 bits or more; got {dtype}, "
            "which may be codes of a quantized weight, without the scales. Load dequantized values."
        )
