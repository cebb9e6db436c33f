"""Mocks for what our plug-in uses of Transformer Engine, in plain torch: it does not run without a GPU.

They have its module paths, class names, fields and call order, and raise an AssertionError where its kernels would read
freed or stale memory or write that of other ranks. Their arithmetic is real but not meant to equal its kernels' bits.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.te_tensors import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
    QuantizedTensor,  # noqa: F401 - for tests
    Quantizer,
    allocated,
    made,
    made_in_forward,
)

TENSORS = "transformer_engine.pytorch.tensor"


# The functions ----------------------------------------------------------------------------------------------------


def quantize_master_weights(
    model_weights: list[Any],
    master_weights: list[Any],
    start_offsets: list[Any],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantize shards of weights, after an all-reduce of their largest magnitudes."""
    assert isinstance(group, dist.ProcessGroup), "the group is missing"
    assert all(isinstance(argument, list) for argument in (model_weights, master_weights, start_offsets))
    quantizers = [weight._get_quantizer() for weight in model_weights]
    chosen = {(type(each), *(getattr(each, option) for option in each.options)) for each in quantizers}
    assert len(chosen) == 1, f"All model weights must have the same options, got {chosen}"
    parts = list(zip(model_weights, master_weights, start_offsets, fsdp_shard_model_weights, quantizers, strict=True))
    maxima = []
    for weight, master, start, fragment, quantizer in parts:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        if not manual_post_all_gather_processing and not isinstance(weight, MXFP8Tensor):
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        assert (master is None) == (start is None) == (fragment is None)
        found = quantizer.maxima(torch.zeros(0) if master is None else master, weight.shape, start or 0)
        if master is not None:
            _check_fragments(weight, master, start, fragment, quantizer.values_per_byte)
            found = quantizer.maxima(master.to(weight._dtype), weight.shape, start)
        maxima.append(found)
    packed = torch.cat(maxima)
    dist.all_reduce(packed, dist.ReduceOp.MAX, group)
    for part, largest in zip(parts, packed.split([len(each) for each in maxima]), strict=True):
        weight, master, start, fragment, quantizer = part
        quantizer.set_scales(weight, largest)
        if master is not None:
            quantizer.encode(master.to(weight._dtype), weight, largest, start, fragment)


def _check_fragments(weight: Any, master: torch.Tensor, start: int, fragment: Any, values_per_byte: int) -> None:
    assert master.dim() == 1 and 0 <= start and start + master.numel() <= math.prod(weight.shape) and len(master)
    for each in fragment if isinstance(weight, MXFP8Tensor) else [fragment]:
        assert allocated(each).dim() == 1 and each.dtype is torch.uint8 and each.is_contiguous()
        assert each.numel() * values_per_byte == master.numel() and each.device == master.device


def cast_master_weights_to_fp8(
    model_weights: list[Any], master_weights: list[Any], start_offsets: list[Any], group: Any, shards: Any = None
) -> None:
    """As :func:`quantize_master_weights`, in older versions."""
    quantize_master_weights(model_weights, master_weights, start_offsets, group, shards)


def post_all_gather_processing(model_weights: Any) -> None:
    """Make what backward needs of weights that have been gathered."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if not isinstance(weight, MXFP8Tensor):
            weight.create_columnwise()


# Modules ----------------------------------------------------------------------------------------------------------


class _InitMeta(NamedTuple):
    init_fn: Callable[[torch.Tensor], object]
    fp8_meta_index: int | None


class TransformerEngineBaseModule(nn.Module):
    """A module made under ``quantized_model_init``.

    Args:
        quantizers: Of the weights.
        preserve: Keep the values before quantization.
    """

    def __init__(self, quantizers: list[Quantizer], preserve: bool) -> None:
        super().__init__()
        self.param_init_meta: dict[str, _InitMeta] = {}
        self.quantizers = {"scaling_fwd": quantizers}
        self.primary_weights_in_fp8 = True
        self.fp8_meta: dict[str, Any] = {}
        self.preserve_high_precision_init_val = preserve

    def register_parameter(self, name: str, param: Any, *init: Any) -> None:
        """Register a parameter, and how it is initialized when it is registered first."""
        super().register_parameter(name, param)
        if name not in self.param_init_meta:
            self.param_init_meta[name] = _InitMeta(*init)

    def add_weight(self, name: str, index: int, *shape: int, dtype: torch.dtype, device: Any) -> None:
        """Register a weight of the quantizer ``index``, still plain."""

        def init(value: torch.Tensor) -> object:
            return nn.init.normal_(value, std=shape[-1] ** -0.5)

        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), init, index)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize parameters, and replace all of them, those with a quantizer by quantized ones."""
        if defer_init:
            return
        for name, param in list(self.named_parameters(recurse=False)):
            assert not param.is_meta, "the real one would allocate it"
            init_fn, index = self.param_init_meta[name]
            init_fn(param)
            value: Any = param.detach()
            if index is not None:
                quantizer = self.quantizers["scaling_fwd"][index]
                quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
                value = quantizer(value)
            made: Any = nn.Parameter(value)
            if index is not None and self.preserve_high_precision_init_val:
                made._high_precision_init_val = param.detach().cpu().clone()
                made.get_high_precision_init_val = MethodType(_initial, made)
                made.clear_high_precision_init_val = MethodType(_clear, made)
            setattr(self, name, made)


class Linear(TransformerEngineBaseModule):
    """A linear layer.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        quantizer: Of the weight.
        dtype: Dtype that the weight appears to have.
        preserve: Keep the values before quantization.
        device: The weight's device.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        quantizer: Quantizer,
        dtype: torch.dtype = torch.float32,
        preserve: bool = True,
        device: Any = "cpu",
    ) -> None:
        super().__init__([quantizer], preserve)
        self.add_weight("weight", 0, outputs, inputs, dtype=dtype, device=device)
        self.reset_parameters(defer_init=device == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the mark of tensor parallelism, too."""
        super().reset_parameters(defer_init)
        if not defer_init:
            self.weight.tensor_model_parallel = True  # type: ignore[union-attr, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        result: torch.Tensor = _Linear.apply(x, self.weight)
        return result


class LayerNormLinear(TransformerEngineBaseModule):
    """A norm without bias, which is not quantized, and a linear layer."""

    def __init__(
        self, inputs: int, outputs: int, quantizer: Quantizer, dtype: torch.dtype, device: Any = "cpu"
    ) -> None:
        super().__init__([quantizer], True)
        norm = nn.Parameter(torch.empty(inputs, dtype=dtype, device=device))
        self.register_parameter("layer_norm_weight", norm, nn.init.ones_, None)
        self.add_weight("weight", 0, outputs, inputs, dtype=dtype, device=device)
        self.reset_parameters(defer_init=device == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Set the mark of sequence parallelism, too."""
        super().reset_parameters(defer_init)
        if not defer_init:
            self.layer_norm_weight.sequence_parallel = True  # type: ignore[union-attr, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize and multiply."""
        norm: Any = self.layer_norm_weight
        result: torch.Tensor = _Linear.apply(nn.functional.layer_norm(x, norm.shape, norm), self.weight)
        return result


class GroupedLinear(TransformerEngineBaseModule):
    """Several linear layers, of which each has its part of the rows of the input."""

    def __init__(
        self, inputs: int, outputs: int, quantizers: list[Quantizer], dtype: torch.dtype, device: Any = "cpu"
    ) -> None:
        super().__init__(quantizers, True)
        for i in range(len(quantizers)):
            self.add_weight(f"weight{i}", i, outputs, inputs, dtype=dtype, device=device)
        self.reset_parameters(defer_init=device == "meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply parts by the weights."""
        parts = x.chunk(len(self.quantizers["scaling_fwd"]))
        return torch.cat([_Linear.apply(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


def _initial(parameter: Any) -> Any:
    return getattr(parameter, "_high_precision_init_val", None)


def _clear(parameter: Any) -> None:
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val


class OlderCastingLinear(nn.Module):
    """A linear layer with a plain weight under ``autocast``, of versions before 2.15; other layers today."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the quantized weight."""
        result: torch.Tensor = _CastingLinear.apply(x, self.weight, getattr(self, "is_fsdp2", False))
        return result


class CastingLinear(OlderCastingLinear):
    """As module/linear.py has it since version 2.15."""

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the layer, as module/base.py finds out once."""
        if not hasattr(self, "_is_fsdp2"):
            self._is_fsdp2 = False
        return self._is_fsdp2


# The copies of weights that autograd keeps.
workspaces: "weakref.WeakSet[torch.Tensor]" = weakref.WeakSet()


def _workspace(weight: torch.Tensor) -> torch.Tensor:
    made = weight.detach().to(torch.float8_e4m3fn)
    workspaces.add(made)
    return made


class _CastingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, is_fsdp2: bool) -> torch.Tensor:
        cast = _workspace(weight)
        ctx.save_for_backward(x, weight, None if is_fsdp2 else cast)
        return x @ cast.to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, cast = ctx.saved_tensors
        cast = _workspace(weight) if cast is None else cast
        return grad @ cast.to(grad.dtype), grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        before = len(made)
        weight.update_usage(rowwise_usage=True, columnwise_usage=True if weight._quantizer.columnwise_usage else None)
        made_in_forward.extend(made[before:])
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        # As modules do, so that the next forward would transpose.
        weight._quantizer.set_usage(rowwise=True, columnwise=True)
        return grad @ weight.columnwise(), grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _package() -> dict[str, ModuleType]:
    places: dict[str, tuple[Any, ...]] = {
        "transformer_engine": (),
        "transformer_engine.pytorch": (Linear, LayerNormLinear, GroupedLinear),
        "transformer_engine.pytorch.module": (),
        "transformer_engine.pytorch.module.base": (TransformerEngineBaseModule,),
        TENSORS: (),
        f"{TENSORS}.float8_tensor": (Float8Tensor, Float8Quantizer, Float8CurrentScalingQuantizer),
        f"{TENSORS}.float8_blockwise_tensor": (Float8BlockwiseQTensor, Float8BlockQuantizer),
        f"{TENSORS}.mxfp8_tensor": (MXFP8Tensor, MXFP8Quantizer),
        f"{TENSORS}.nvfp4_tensor": (NVFP4Tensor, NVFP4Quantizer),
        f"{TENSORS}.utils": (quantize_master_weights, cast_master_weights_to_fp8, post_all_gather_processing),
    }
    modules = {}
    for path, things in places.items():
        modules[path] = ModuleType(path)
        modules[path].__path__ = []
        for thing in things:
            if isinstance(thing, type):
                thing.__module__ = path
            setattr(modules[path], thing.__name__, thing)
    return modules


@contextmanager
def installed() -> Iterator[None]:
    """Context in which ``import transformer_engine`` finds the mocks."""
    made_in_forward.clear()
    package = _package()
    assert not package.keys() & sys.modules.keys(), "the real Transformer Engine is imported"
    sys.modules.update(package)
    try:
        yield
    finally:
        for path in package:
            del sys.modules[path]
