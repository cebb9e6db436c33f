"""Weights that Transformer Engine keeps in 8-bit floats, MXFP8 or NVFP4, quantized by its batched casts.

The casts reduce the largest magnitudes themselves, so scales are no planes: they stay in the tensors, in full on every
rank. The names of tensors' fields are those of version 2.20.
"""

import importlib
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron.fsdp.quantized.storage import (
    KEEP_TRANSPOSE,
    Direction,
    Plane,
    ReduceMax,
    WeightShard,
    register_format,
    register_quantizing_module,
)

_TENSORS = "transformer_engine.pytorch.tensor"
_FIELDS = frozenset(
    """_data _transpose _transpose_invalid _scale_inv _fp8_dtype _fp4_dtype _quantizer _dtype _requires_grad
    _rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv _amax_rowwise _amax_columnwise
    _is_2D_scaled _with_gemm_swizzled_scales _row_scaled_nvfp4 _nvfp4_use_4over6 _nvfp4_e4m3_max
    _high_precision_init_val amax_reduction_group""".split()
)
# A batch holds tensors with equal values of these attributes of their quantizers.
_OPTIONS = ("dtype", "block_len", "force_pow_2_scales", "amax_epsilon", "with_2d_quantization")


@dataclass(frozen=True)
class TransformerEngineStorage:
    """The base of the formats; see :class:`megatron.fsdp.quantized.storage.WeightStorage`.

    Attributes:
        names: The tensor's attributes that are its planes.
        caches: The attributes that hold what backward derives from planes, with their values if there is none.
        capability: The lowest compute capability of CUDA devices that have the format.
        multiple: The size of either dimension is a multiple of this.
    """

    key: Hashable

    planes: ClassVar[tuple[Plane, ...]] = (Plane(),)
    block_rows: ClassVar[int | None] = None
    fields: ClassVar[frozenset[str]] = _FIELDS
    # Delayed scaling has a history of magnitudes, which changes with every quantization.
    is_repeatable: ClassVar[bool] = True
    takes_dtype: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("_rowwise_data",)
    caches: ClassVar[dict[str, Any]] = {"_columnwise_data": None, "_columnwise_scale_inv": None}
    capability: ClassVar[tuple[int, int]]
    multiple: ClassVar[int] = 1

    def problem(self, parameter: Any, device: torch.device) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < self.capability:
            wanted = ".".join(map(str, self.capability))
            return f"it needs a device with compute capability {wanted} or higher, unlike {device}"
        if parameter.device.type not in (device.type, "meta"):
            return f"it is on {parameter.device}; move the model to {device} first"
        missing = [name for name in self.names if getattr(parameter, name) is None]
        if missing:
            return f"it has no {' and no '.join(missing)}"
        if parameter._quantizer is None:
            return "it has no quantizer"
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in vars(parameter._quantizer).values()):
            return "its quantizer is on the meta device, and only weights may be"
        if any(size % self.multiple for size in parameter.shape):
            return f"its shape is {tuple(parameter.shape)}, and both sizes have to be multiples of {self.multiple}"
        return None

    def initial(self, parameter: Any) -> torch.Tensor:
        preserved = getattr(parameter, "get_high_precision_init_val", lambda: None)()
        value: torch.Tensor = parameter.detach().dequantize() if preserved is None else preserved
        return value

    def bind(self, parameter: Any, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        self._drop_caches(parameter)
        if parameter.device.type == "meta":
            parameter = parameter._quantizer.make_empty(parameter.shape, dtype=dtype, device=planes[0].device)
        for name, plane in zip(self.names, planes, strict=True):
            setattr(parameter, name, plane.view(getattr(parameter, name).shape))
        if hasattr(parameter, "_with_gemm_swizzled_scales"):
            # The casts write scales row by row, not in the order in which matmuls read them.
            parameter._with_gemm_swizzled_scales = False
        if hasattr(parameter, "clear_high_precision_init_val"):
            parameter.clear_high_precision_init_val()
        bound: torch.Tensor = parameter
        return bound

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        if not shards:
            return
        utils = importlib.import_module(f"{_TENSORS}.utils")
        cast = getattr(utils, "quantize_master_weights", None) or utils.cast_master_weights_to_fp8
        for shard in shards:
            self._drop_caches(shard.parameter)
        # An empty shard is None. The cast would round to the parameter's dtype too, but with float32 copies of all
        # offloaded main weights on the device.
        full = [shard.main.numel() > 0 for shard in shards]
        cast(
            [shard.parameter for shard in shards],
            [
                shard.values().to(shard.parameter.dtype) if own else None
                for shard, own in zip(shards, full, strict=True)
            ],
            [shard.start if own else None for shard, own in zip(shards, full, strict=True)],
            reduce_max.process_group,
            [self._fragment(shard) if own else None for shard, own in zip(shards, full, strict=True)],
        )

    def _fragment(self, shard: WeightShard) -> Any:
        """Where the cast writes, as it expects it."""
        return shard.planes[0]

    def before_use(self, parameters: Sequence[Any], direction: Direction) -> None:
        """Transposes for backward what is not transposed yet."""
        if direction is Direction.FORWARD:
            return
        lacking = [p for p in parameters if any(getattr(p, name) is none for name, none in self.caches.items())]
        if not lacking:
            return
        process = getattr(importlib.import_module(f"{_TENSORS}.utils"), "post_all_gather_processing", None)
        if process is not None:
            process(lacking)
            return
        for parameter in lacking:
            parameter.update_usage(rowwise_usage=True, columnwise_usage=True)

    def after_use(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            if not getattr(parameter, KEEP_TRANSPOSE, False):
                self._drop_caches(parameter)

    def _drop_caches(self, parameter: Any) -> None:
        if not self.caches:
            return
        for name, none in self.caches.items():
            setattr(parameter, name, none)
        # Modules would transpose in forward, and only backward needs it. They set this again in backward.
        parameter._quantizer.set_usage(columnwise=False)


class Float8(TransformerEngineStorage):
    """One scale per tensor, by the history of magnitudes (delayed scaling) or by the present ones."""

    is_repeatable = False
    names = ("_data",)
    caches: ClassVar[dict[str, Any]] = {"_transpose": None, "_transpose_invalid": True}
    capability = (8, 9)


class Blockwise(TransformerEngineStorage):
    """One scale per 128 x 128 block. The cast writes all of a block's bytes, so that ranks may not share blocks."""

    block_rows = 128
    capability = (9, 0)

    def problem(self, parameter: Any, device: torch.device) -> str | None:
        if not parameter._is_2D_scaled or len(parameter.shape) != 2:
            return "only matrices in blocks of 128 x 128 are supported"
        return super().problem(parameter, device)


class MXFP8(TransformerEngineStorage):
    """One scale per 32 values, of a row for forward and of a column for backward."""

    planes = (Plane(directions=frozenset({Direction.FORWARD})), Plane(directions=frozenset({Direction.BACKWARD})))
    names = ("_rowwise_data", "_columnwise_data")
    caches: ClassVar[dict[str, Any]] = {}
    capability = (10, 0)
    multiple = 32

    def _fragment(self, shard: WeightShard) -> Any:
        return shard.planes


class NVFP4(TransformerEngineStorage):
    """Two values per byte, one scale per 16 x 16 block and one per tensor."""

    planes = (Plane(2),)
    # A row has an even number of values, so that no byte is shared by ranks.
    block_rows = 1
    caches: ClassVar[dict[str, Any]] = TransformerEngineStorage.caches | {"_amax_columnwise": None}
    capability = (10, 0)
    multiple = 16

    def problem(self, parameter: Any, device: torch.device) -> str | None:
        if not hasattr(importlib.import_module(f"{_TENSORS}.utils"), "quantize_master_weights"):
            return "this version of Transformer Engine cannot quantize shards of it"
        if not getattr(parameter._quantizer, "with_2d_quantization", True) or len(parameter.shape) != 2:
            return "only matrices in blocks of 16 x 16 (2D quantization) are supported"
        for option in ("_row_scaled_nvfp4", "_nvfp4_use_4over6"):
            if getattr(parameter, option, False):
                return f"shards cannot be quantized with {option.removeprefix('_')}"
        return super().problem(parameter, device)


def _quantized_on_meta(module: Any, name: str) -> torch.Tensor | None:
    """The weight that ``reset_parameters`` will make of a plain one."""
    index = module.param_init_meta[name].fp8_meta_index if module.primary_weights_in_fp8 else None
    if index is None:
        return None
    parameter, quantizer = module._parameters[name], module.quantizers["scaling_fwd"][index].copy()
    # As if the module were built on a device: ``reset_parameters`` runs under ``no_grad`` and makes no columnwise data.
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    made: torch.Tensor = quantizer.make_empty(parameter.shape, dtype=parameter.dtype, device=torch.device("meta"))
    return made


def _register(module: str, name: str, storage: type[TransformerEngineStorage]) -> None:
    def make(parameter: Any) -> TransformerEngineStorage:
        quantizer = parameter._quantizer
        options = (str(getattr(quantizer, option, None)) for option in _OPTIONS)
        return storage((name, type(quantizer).__name__, str(parameter.dtype), *options))

    # Older versions do not have all of them.
    with suppress(ImportError):
        register_format(getattr(importlib.import_module(f"{_TENSORS}.{module}"), name), make)


_register("float8_tensor", "Float8Tensor", Float8)
_register("float8_blockwise_tensor", "Float8BlockwiseQTensor", Blockwise)
_register("mxfp8_tensor", "MXFP8Tensor", MXFP8)
_register("nvfp4_tensor", "NVFP4Tensor", NVFP4)
with suppress(ImportError):
    _base = importlib.import_module("transformer_engine.pytorch.module.base")
    register_quantizing_module(_base.TransformerEngineBaseModule, _quantized_on_meta)
