"""How weights would be quantized by Megatron's settings, for estimates without Transformer Engine and without a GPU."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.fsdp.quantized.storage import Direction, Plane, register_format, storage_of

_BY_ROWS = frozenset({Direction.FORWARD})
_BY_COLUMNS = frozenset({Direction.BACKWARD})

# Linear layers that Transformer Engine computes: those of attention, MLPs, experts and Mamba, but not routers.
_LINEAR = re.compile(r"(^|\.)(linear_\w+|in_proj|out_proj)\.weight\d*$")


@dataclass(frozen=True)
class Recipe:
    """Transformer Engine's storage of a weight.

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

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of so many elements on each rank."""
        return numel // self.values_per_scale_byte if self.values_per_scale_byte else 0

    def transposed_bytes(self, numel: int) -> int:
        """Bytes, at most, of the transposed copies of so many elements that are made for backward."""
        has_own = any(Direction.FORWARD not in plane.directions for plane in self.planes)
        return 0 if has_own else numel // self.planes[0].values_per_byte + self.scale_bytes(numel)


FP8 = {
    "delayed": Recipe("delayed"),
    "tensorwise": Recipe("tensorwise"),
    "blockwise": Recipe("blockwise", values_per_scale_byte=4096, multiple=128, block_rows=128),
    "mxfp8": Recipe("mxfp8", (Plane(1, _BY_ROWS), Plane(1, _BY_COLUMNS)), values_per_scale_byte=16, multiple=32),
}
NVFP4 = Recipe("nvfp4", (Plane(2),), values_per_scale_byte=16, block_rows=1)


class PlannedWeight(nn.Parameter):
    """A parameter that is counted as if it were quantized. It has its plain value."""

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
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in [layer for layer in module.modules() if isinstance(layer, TransformerLayer | MambaLayer)]:
        if not is_first_last_bf16_layer(config, layer.layer_number - 1):
            for name, parameter in layer.named_parameters():
                if parameter.dim() == 2 and _LINEAR.search(name):
                    plan(parameter, recipe)
