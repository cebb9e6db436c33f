"""Tells values of weights from codes of quantized ones, which mean nothing without their scales."""

import torch


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
