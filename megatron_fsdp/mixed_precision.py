"""The mixed-precision policy, and NVIDIA's functions for FP8 tensors that scripts need."""

from typing import Any, NoReturn

import torch

from megatron.fsdp.sharding.precision import MixedPrecisionPolicy

__all__ = [
    "MixedPrecisionPolicy",
    "get_quantized_model_init_context_cls",
    "is_blockwise_float8tensor",
    "is_float8tensor",
]

_FP8 = {
    "fp8_create_transpose_cache",
    "fp8_dequantize",
    "fp8_discard_transpose_cache",
    "fp8_get_raw_data",
    "fp8_need_transpose_data",
    "fp8_need_transpose_data_for_meta_device_init",
    "fp8_quantize",
    "fp8_set_raw_data",
}


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of Transformer Engine's quantized tensors."""
    return _has_class(tensor, "QuantizedTensor", "Float8Tensor")


def is_blockwise_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of Transformer Engine's FP8 tensors with a scale per block."""
    return _has_class(tensor, "Float8BlockwiseQTensor")


def _has_class(tensor: torch.Tensor, *names: str) -> bool:
    kinds = type(tensor).__mro__
    return any(kind.__module__.startswith("transformer_engine") and kind.__name__ in names for kind in kinds)


def get_quantized_model_init_context_cls() -> Any:
    """Return Transformer Engine's context that builds layers with quantized weights.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    import transformer_engine.pytorch as te

    return getattr(te, "quantized_model_init", None) or te.fp8_model_init


def __getattr__(name: str) -> NoReturn:
    if name in _FP8:
        # An ImportError, so that "from megatron_fsdp.mixed_precision import ..." shows the reason.
        raise ImportError(
            f"megatron_fsdp.mixed_precision.{name}: the memory of quantized weights is managed by their format in "
            "megatron.fsdp.quantized, and not by functions for one library's tensors."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
