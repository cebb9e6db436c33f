"""Mixed precision: the dtype of each kind of tensor."""

import functools
import logging
from dataclasses import dataclass, fields

import torch

from megatron.fsdp.helpers.arguments import check_fields

logger = logging.getLogger(__name__)

_WIDTH = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Dtypes:
    """The resolved dtypes of one parameter group.

    Attributes:
        compute: Dtype that compute weights have in forward and backward. Quantized ones appear to have it.
        main_params: Dtype of the main weights.
        main_grads: Dtype of accumulated gradients.
        grad_comm: Dtype of gradients in a reduction.
    """

    compute: torch.dtype
    main_params: torch.dtype
    main_grads: torch.dtype
    grad_comm: torch.dtype


@check_fields
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights, gradients and compute weights. None stands for the dtype of the model's parameters.

    Attributes:
        main_params_dtype: Dtype of the main weights, which the optimizer updates. A dtype narrower than the model's
            rounds the weights and every update; compute weights are copies of the rounded ones.
        main_grads_dtype: Dtype that gradients are accumulated in.
        grad_comm_dtype: Dtype that gradients are reduced in. None: ``main_grads_dtype``.
        compute_dtype: Dtype of forward and backward.

    Raises:
        ValueError: A dtype is not a floating-point dtype of 16 bits or more, or float16 and bfloat16 are mixed.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            if dtype is not None and dtype not in _WIDTH:
                expected = ", ".join(str(d) for d in _WIDTH)
                raise ValueError(
                    f"MixedPrecisionPolicy: {field.name}: expected None or one of {expected}; got {dtype!r}."
                )
        _reject_mixed_halves("main_grads_dtype", self.main_grads_dtype, "grad_comm_dtype", self.grad_comm_dtype)

    def resolve(self, given: torch.dtype, name: str, codes: bool = False) -> Dtypes:
        """The dtypes of a parameter group whose parameters have dtype ``given``.

        Args:
            given: Dtype of the model's parameters.
            name: Name of a parameter of the group, for error messages.
            codes: Whether they hold codes of frozen quantized weights, which keep their dtype.

        Raises:
            ValueError: ``given`` is not supported, or float16 and bfloat16 are mixed.
        """
        if codes:
            return Dtypes(given, given, torch.float32, torch.float32)
        if given not in _WIDTH:
            expected = ", ".join(str(d) for d in _WIDTH)
            remedy = "If it is not trained, freeze it with requires_grad_(False) before the model is sharded."
            if given.is_complex:
                remedy = "Keep a real parameter, and use torch.view_as_complex in the forward."
            raise ValueError(f"Parameter {name}: expected one of the dtypes {expected}; got {given}. {remedy}")
        compute = self.compute_dtype or given
        main_params = self.main_params_dtype or given
        if _WIDTH[main_params] < _WIDTH[given]:
            warn_about_rounding(main_params, given)
        _reject_mixed_halves("main_params_dtype", main_params, f"parameter {name}", compute)
        main_grads = self.main_grads_dtype or given
        _reject_mixed_halves("main_grads_dtype", main_grads, f"parameter {name}", compute)
        return Dtypes(compute, main_params, main_grads, self.grad_comm_dtype or main_grads)


@functools.cache  # warn once per pair of dtypes
def warn_about_rounding(main_params: torch.dtype, given: torch.dtype) -> None:
    """Log a warning that main weights are narrower than the model's weights."""
    logger.warning(
        "MixedPrecisionPolicy.main_params_dtype is %s: the optimizer updates weights that are rounded from %s.",
        main_params,
        given,
    )


def _reject_mixed_halves(name_a: str, a: torch.dtype | None, name_b: str, b: torch.dtype | None) -> None:
    # The formats have different ranges and precisions: a cast from one to the other overflows or loses small gradients.
    if {a, b} == {torch.bfloat16, torch.float16}:
        raise ValueError(
            f"Mismatched dtypes: {name_a} is {a} and {name_b} is {b}. Expected one 16-bit format, not both."
        )
