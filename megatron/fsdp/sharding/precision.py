"""Mixed precision: which dtype each kind of tensor has."""

import functools
import logging
from dataclasses import dataclass, fields

import torch

logger = logging.getLogger(__name__)

_WIDTH = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter group, all of them resolved."""

    compute: torch.dtype
    main_params: torch.dtype
    main_grads: torch.dtype
    grad_comm: torch.dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of main weights, gradients and compute weights. None: the dtype that the model's parameters have.

    Attributes:
        main_params_dtype: What the optimizer updates. None: the model's dtype; its values are kept as they are. A
            narrower one rounds them, and every update; the compute weights are the rounded ones.
        main_grads_dtype: What gradients are accumulated in. None: the model's dtype.
        grad_comm_dtype: What gradients are reduced in. None: ``main_grads_dtype``.
        compute_dtype: What forward and backward compute with. None: the model's dtype.

    Raises:
        ValueError: A dtype is not a floating-point dtype of 16 bits or more, or two dtypes do not fit together.
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
                raise ValueError(f"MixedPrecisionPolicy.{field.name}: expected None or one of {expected}; got {dtype}.")
        _reject_mixed_halves("main_grads_dtype", self.main_grads_dtype, "grad_comm_dtype", self.grad_comm_dtype)

    def resolve(self, given: torch.dtype, name: str) -> Dtypes:
        """The dtypes of a group of parameters that have dtype ``given``.

        Args:
            given: Dtype of the model's parameters.
            name: Name of a parameter of the group, for error messages.

        Raises:
            ValueError: ``given`` is not supported, or two dtypes are different formats of 16 bits.
        """
        if given not in _WIDTH:
            expected = ", ".join(str(d) for d in _WIDTH)
            raise ValueError(f"Parameter {name}: expected a dtype out of {expected}; got {given}.")
        compute = self.compute_dtype or given
        main_params = self.main_params_dtype or given
        if _WIDTH[main_params] < _WIDTH[given]:
            _say_that_main_weights_round(main_params, given)
        _reject_mixed_halves("main_params_dtype", main_params, f"parameter {name}", compute)
        main_grads = self.main_grads_dtype or given
        _reject_mixed_halves("main_grads_dtype", main_grads, f"parameter {name}", compute)
        return Dtypes(compute, main_params, main_grads, self.grad_comm_dtype or main_grads)


@functools.cache
def _say_that_main_weights_round(main_params: torch.dtype, given: torch.dtype) -> None:
    """Log it once."""
    logger.warning(
        "MixedPrecisionPolicy.main_params_dtype is %s: the optimizer updates weights that are rounded from %s.",
        main_params,
        given,
    )


def _reject_mixed_halves(name_a: str, a: torch.dtype | None, name_b: str, b: torch.dtype | None) -> None:
    """bfloat16 and float16 have different ranges: a cast from one to the other overflows or loses the gradient."""
    if {a, b} == {torch.bfloat16, torch.float16}:
        raise ValueError(
            f"Mismatched dtypes: {name_a} is {a} and {name_b} is {b}. Expected one 16-bit format, not both."
        )
