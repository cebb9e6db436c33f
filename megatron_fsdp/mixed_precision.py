"""The mixed-precision policy. Of the original's functions for FP8 tensors only the test for one exists."""

from typing import NoReturn

import torch

from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy", "is_float8tensor"]

_FP8 = {
    "fp8_create_transpose_cache",
    "fp8_dequantize",
    "fp8_discard_transpose_cache",
    "fp8_get_raw_data",
    "fp8_need_transpose_data",
    "fp8_need_transpose_data_for_meta_device_init",
    "fp8_quantize",
    "fp8_set_raw_data",
    "get_quantized_model_init_context_cls",
    "is_blockwise_float8tensor",
}


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of Transformer Engine's quantized tensors, which cannot be sharded yet."""
    return any(
        kind.__module__.startswith("transformer_engine") and kind.__name__ in ("QuantizedTensor", "Float8Tensor")
        for kind in type(tensor).__mro__
    )


def __getattr__(name: str) -> NoReturn:
    if name in _FP8:
        # An ImportError, so that "from megatron_fsdp.mixed_precision import ..." shows the reason.
        raise ImportError(f"megatron_fsdp.mixed_precision.{name}: weights in FP8 are not supported yet.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
