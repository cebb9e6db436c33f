"""How Megatron's settings would quantize, for estimates and predictions without Transformer Engine or a GPU."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from megatron.fsdp.quantized.storage import (
    KEEP_TRANSPOSE,
    Direction,
    Plane,
    ReduceMax,
    WeightShard,
    register_format,
    storage_of,
)

_BY_ROWS = frozenset({Direction.FORWARD})
_BY_COLUMNS = frozenset({Direction.BACKWARD})

# Linear layers that Transformer Engine computes: those of attention, MLPs, experts and Mamba, but not routers.
_LINEAR = re.compile(r"(^|\.)(linear_\w+|in_proj|out_proj)\.weight\d*$")


@dataclass(frozen=True)
class Recipe:
    """Transformer Engine's storage of a weight, in bytes without contents.

    It is a :class:`megatron.fsdp.quantized.storage.WeightStorage`: predicted steps shard weights with it.

    Attributes:
        key: Name of the recipe.
        planes: Its arrays of bytes that are sharded.
        values_per_scale_byte: Elements for each byte of scales, which every rank holds in full; 0 if they are few.
        multiple: Weights whose rows or columns are not a multiple of this are not quantized.
        block_rows: Ranks split a weight only between blocks of this many rows. None: anywhere.
    """

    key: str
    planes: tuple[Plane, ...] = (Plane(),)
    values_per_scale_byte: int = 0
    multiple: int = 16
    block_rows: int | None = None

    fields: ClassVar[frozenset[str]] = frozenset({"recipe", "stored", "scales", "transposed"})
    takes_dtype: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = True

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of so many elements on each rank."""
        return numel // self.values_per_scale_byte if self.values_per_scale_byte else 0

    def transposed_bytes(self, numel: int) -> int:
        """Bytes, at most, of the transposed copies of so many elements that are made for backward."""
        has_own = any(Direction.FORWARD not in plane.directions for plane in self.planes)
        return 0 if has_own else numel // self.planes[0].values_per_byte + self.scale_bytes(numel)

    def problem(self, parameter: torch.Tensor, device: torch.device) -> str | None:
        """Nothing: :func:`plan` has looked at the shape."""
        return None

    def initial(self, parameter: torch.Tensor) -> torch.Tensor:
        """The plain value."""
        return parameter.detach()

    def bind(self, parameter: Any, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Take the plain value's memory away, but for one element."""
        parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
        parameter.stored, parameter.transposed = [*planes], None
        parameter.scales = planes[0].new_empty(self.scale_bytes(parameter.numel()))
        bound: torch.Tensor = parameter
        return bound

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        """Read every shard and write its bytes. One reduction is for the largest values."""
        for shard in shards:
            for plane in shard.planes:
                _as_numbers(plane).copy_(shard.values()[: plane.numel()])
        reduce_max(torch.empty(len(shards), device=shards[0].planes[0].device))

    def before_use(self, parameters: Sequence[Any], direction: Direction) -> None:
        """Make the transposed copies for backward."""
        for parameter in parameters if direction is Direction.BACKWARD else ():
            if parameter.transposed is None and self.transposed_bytes(parameter.numel()):
                parameter.transposed = [_as_numbers(plane).clone() for plane in (*parameter.stored, parameter.scales)]

    def after_use(self, parameters: Sequence[Any]) -> None:
        """Drop them, unless they are kept."""
        for parameter in parameters:
            if not getattr(parameter, KEEP_TRANSPOSE, False):
                parameter.transposed = None


FP8 = {
    "delayed": Recipe("delayed"),
    "tensorwise": Recipe("tensorwise"),
    "blockwise": Recipe("blockwise", values_per_scale_byte=4096, multiple=128, block_rows=128),
    "mxfp8": Recipe("mxfp8", (Plane(1, _BY_ROWS), Plane(1, _BY_COLUMNS)), values_per_scale_byte=16, multiple=32),
}
NVFP4 = Recipe("nvfp4", (Plane(2),), values_per_scale_byte=16, block_rows=1)


# Prefix of an argument's name: dtype in which its linear layers compute.
DTYPES = {"fp8": "float8", "fp4": "float4"}


def _as_numbers(plane: torch.Tensor) -> torch.Tensor:
    """Bytes as values, whose operators take time but are not computed in a prediction."""
    return plane.view(torch.float8_e4m3fn)


class PlannedWeight(nn.Parameter):
    """A parameter that is counted as if it were quantized. It has its plain value until a model is sharded."""

    recipe: Recipe


register_format(PlannedWeight, lambda parameter: parameter.recipe)  # type: ignore[attr-defined]


def plan(parameter: nn.Parameter, recipe: Recipe) -> None:
    """Count a parameter as quantized from now on, unless it is, or its shape does not allow it."""
    if storage_of(parameter) is None and not any(size % recipe.multiple for size in parameter.shape):
        parameter.__class__ = PlannedWeight
        parameter.recipe = recipe  # type: ignore[attr-defined]


def recipe_of(args: Any) -> Recipe | None:
    """The recipe of a Megatron command line with ``--fp8-param-gather`` or ``--fp4-param-gather``; else None."""
    if args.fp4 and args.fp4_param_gather:
        return NVFP4 if args.fp4_recipe == "nvfp4" else None
    return FP8.get(args.fp8_recipe) if args.fp8 and args.fp8_param_gather else None


def plan_model(module: nn.Module, recipe: Recipe, config: Any) -> None:
    """Count the weights of a Megatron model as quantized that Transformer Engine would quantize.

    Args:
        module: The model, which may be on the meta device.
        recipe: How they are quantized.
        config: Its ``TransformerConfig``.
    """
    for parameter in quantized_weights(module, config):
        plan(parameter, recipe)


def quantized_weights(module: nn.Module, config: Any) -> Iterator[nn.Parameter]:
    """The weights of a Megatron model with which Transformer Engine would compute in 8 or 4 bits."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in [layer for layer in module.modules() if isinstance(layer, TransformerLayer | MambaLayer)]:
        if not is_first_last_bf16_layer(config, layer.layer_number - 1):
            for name, parameter in layer.named_parameters():
                if parameter.dim() == 2 and _LINEAR.search(name):
                    yield parameter
