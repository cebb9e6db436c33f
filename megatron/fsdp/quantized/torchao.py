"""torchao's float8 training: weights of ``Float8Linear`` whose config has ``enable_fsdp_float8_all_gather``."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard, register_format


@dataclass(frozen=True)
class TorchaoStorage:
    """The storage of torchao's float8 weights; see :class:`megatron.fsdp.quantized.storage.WeightStorage`.

    ``convert_to_float8_training`` leaves weights in high precision, in a class that is cast by every forward. Sharding
    replaces it by the class that a cast makes, over gathered bytes and one scale per parameter.
    """

    dtype: torch.dtype

    planes = (Plane(),)
    block_rows = None
    takes_dtype = True
    is_repeatable = True
    fields = frozenset({"_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale", "_data", "_scale"})

    @property
    def key(self) -> Hashable:
        return Float8TrainingTensor, self.dtype

    def problem(self, parameter: Any, device: torch.device) -> str | None:
        if isinstance(parameter, Float8TrainingTensor) and parameter._scale.numel() > 1:
            return f"it has {parameter._scale.numel()} scales, and only weights with one scale are supported"
        return None

    def initial(self, parameter: Any) -> torch.Tensor:
        if isinstance(parameter, Float8TrainingTensor):
            return parameter.detach().to_original_precision()
        return parameter._tensor.detach()

    def bind(self, parameter: Any, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        data = planes[0].view(self.dtype).view(parameter.shape)
        # Each step changes the scale in place: CUDA graphs keep its address.
        scale = torch.ones((), device=data.device)
        made = Float8TrainingTensor(data, scale, dtype, parameter._linear_mm_config, GemmInputRole.WEIGHT)
        if isinstance(parameter, WeightWithDynamicFloat8CastTensor):
            # An optimizer may hold the old parameter.
            parameter._tensor = parameter._tensor.detach().to("meta")
        return made

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        largest = torch.stack([_largest(shard.values()) for shard in shards])
        reduce_max(largest)
        scales = amax_to_scale(largest, self.dtype)
        for shard, scale in zip(shards, scales, strict=True):
            # Brought to the device a second time if it is offloaded, instead of keeping all shards there.
            cast = hp_tensor_and_scale_to_float8(shard.values(), scale, self.dtype)
            shard.planes[0].copy_(cast._data.view(torch.uint8))
            shard.parameter._scale.copy_(scale)  # type: ignore[attr-defined]

    def before_use(self, parameters: Sequence[torch.Tensor], direction: Direction) -> None:
        """Nothing is derived from the bytes."""

    def after_use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Nothing was derived from the bytes."""


def _largest(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, math.inf) if values.numel() else values.new_zeros(())


register_format(WeightWithDynamicFloat8CastTensor, lambda parameter: TorchaoStorage(parameter._dtype))  # type: ignore[attr-defined]
register_format(Float8TrainingTensor, lambda parameter: TorchaoStorage(parameter._data.dtype))  # type: ignore[attr-defined]
