"""Dtypes of weights and gradients, and combinations that raise an error."""

import logging

import pytest
import torch

from megatron.fsdp.sharding import precision
from megatron.fsdp.sharding.precision import Dtypes, MixedPrecisionPolicy


def test_default_keeps_main_weights_in_fp32_and_gradients_in_the_compute_dtype() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert MixedPrecisionPolicy().resolve(bf16, "w") == Dtypes(bf16, fp32, bf16, bf16)


def test_none_means_the_compute_dtype_and_grad_comm_follows_main_grads() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert policy.resolve(bf16, "w") == Dtypes(bf16, bf16, fp32, fp32)


def test_main_weights_narrower_than_the_model_warn(caplog: pytest.LogCaptureFixture) -> None:
    precision.warn_about_rounding.cache_clear()
    bf16, fp32 = torch.bfloat16, torch.float32
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert MixedPrecisionPolicy(main_params_dtype=bf16).resolve(fp32, "w") == Dtypes(fp32, bf16, fp32, fp32)
        MixedPrecisionPolicy(main_params_dtype=None, compute_dtype=fp32).resolve(bf16, "w")  # rounds nothing
    assert [record.message for record in caplog.records] == [
        "MixedPrecisionPolicy.main_params_dtype is torch.bfloat16: the optimizer updates weights that are rounded from "
        "torch.float32."
    ]


@pytest.mark.parametrize("field", ["main_params_dtype", "main_grads_dtype"])
def test_16_bit_format_that_differs_from_the_models_raises(field: str) -> None:
    with pytest.raises(ValueError, match="Mismatched dtypes"):
        MixedPrecisionPolicy(**{field: torch.float16}).resolve(torch.bfloat16, "w")
