"""Weights in 8-bit floats with scales that follow their present values, in plain torch: the reference of all formats.

It shows what training with such weights computes, on every device. It is not meant for speed: matrix products run on
dequantized weights, in the dtype that the weight appears to have.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard, register_format

FORMAT = torch.float8_e4m3fn

# Rows and columns that share a scale. None: all elements of the parameter.
Block = tuple[int, int] | None


class Float8Tensor(torch.Tensor):
    """A weight in 8-bit floats that appears as ``dtype``. Use :meth:`quantize` to make one.

    Args:
        raw: The bytes, in the weight's shape.
        inverse_scale: float32, flat: for each block, what its 8-bit values are multiplied by.
        dtype: Dtype that the weight appears to have, and that it is dequantized to.
        block: The elements that share a scale.
        initial: The values before quantization.
    """

    raw: torch.Tensor
    inverse_scale: torch.Tensor
    block: Block
    initial: torch.Tensor | None
    dequantized: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type,
        raw: torch.Tensor,
        inverse_scale: torch.Tensor,
        dtype: torch.dtype,
        block: Block = None,
        initial: torch.Tensor | None = None,
    ) -> "Float8Tensor":
        """Make the tensor."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=dtype, device=raw.device)
        made.raw, made.inverse_scale, made.block, made.initial = raw, inverse_scale, block, initial
        made.dequantized = None
        return made

    @classmethod
    def quantize(
        cls, value: torch.Tensor, block: Block = None, dtype: torch.dtype | None = None, keep_initial: bool = False
    ) -> "Float8Tensor":
        """Quantize a whole weight.

        Args:
            value: The values, in any floating-point dtype.
            block: Rows and columns that share a scale, as (128, 128) or (1, 128). None: one scale.
            dtype: Dtype that the result appears to have. None: that of ``value``.
            keep_initial: Keep ``value``, so that sharding the model makes main weights of it.
        """
        value = value.detach()
        flat = value.float().reshape(-1)
        blocks, count = _blocks(value.shape, block, 0, value.numel(), value.device)
        codes, inverse = _encode(flat, blocks, _largest(flat, blocks, count))
        return cls(codes.view(value.shape), inverse, dtype or value.dtype, block, value if keep_initial else None)

    def dequantize(self) -> torch.Tensor:
        """The weight as a plain tensor of its dtype."""
        if self.dequantized is not None:
            return self.dequantized
        with torch.no_grad():
            blocks, _ = _blocks(self.raw.shape, self.block, 0, self.raw.numel(), self.raw.device)
            values = self.raw.view(FORMAT).float() * self.inverse_scale[blocks].view(self.raw.shape)
            return values.to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                return _linear(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            (it,) = args
            return cls(it.raw, it.inverse_scale, it.dtype, it.block, it.initial)
        if function._schema.is_mutable and isinstance(args[0], cls):
            raise NotImplementedError(f"{function} changes a Float8Tensor in place. Quantize the new values instead.")

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, cls) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, Float8Tensor):
        return F.linear(input, weight, bias)
    output: torch.Tensor = _Linear.apply(input, weight)
    return output if bias is None else output + bias


class _Linear(torch.autograd.Function):
    """A linear layer that saves the quantized weight for backward; autograd would save the dequantized one."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Float8Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight.dequantize())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad
        of_input = grad @ weight.dequantize() if needs_input else None
        of_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2) if needs_weight else None
        return of_input, of_weight


@dataclass(frozen=True)
class Float8Storage:
    """The storage of :class:`Float8Tensor`; see :class:`megatron.fsdp.quantized.storage.WeightStorage`."""

    block: Block

    planes = (Plane(),)
    block_rows = None
    fields = frozenset({"raw", "inverse_scale", "block", "initial", "dequantized"})

    @property
    def key(self) -> Hashable:
        """See ``WeightStorage``."""
        return Float8Tensor, self.block

    def initial(self, parameter: Any) -> torch.Tensor:
        """See ``WeightStorage``."""
        return parameter.dequantize() if parameter.initial is None else parameter.initial

    def problem(self, parameter: torch.Tensor, device: torch.device) -> str | None:
        """See ``WeightStorage``."""
        return None

    def bind(self, parameter: Any, planes: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``WeightStorage``."""
        parameter.raw = planes[0].view(parameter.shape)
        # They may be on another device than the parameter was.
        parameter.inverse_scale = parameter.inverse_scale.to(parameter.raw.device, copy=True)
        parameter.initial = parameter.dequantized = None
        return parameter

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        """See ``WeightStorage``."""
        if not shards:
            return
        values = [shard.values() for shard in shards]
        blocks, counts = [], []
        for shard in shards:
            stop = shard.start + shard.main.numel()
            found, count = _blocks(shard.parameter.shape, self.block, shard.start, stop, shard.main.device)
            blocks.append(found)
            counts.append(count)
        largest = torch.cat([_largest(*each) for each in zip(values, blocks, counts, strict=True)])
        # A block may continue on other ranks.
        reduce_max(largest)
        parts: Any = zip(shards, values, blocks, largest.split(counts), strict=True)
        for shard, value, where, of_shard in parts:
            codes, inverse = _encode(value, where, of_shard)
            shard.planes[0].copy_(codes)
            shard.parameter.inverse_scale.copy_(inverse)

    def before_use(self, parameters: Sequence[Any], direction: Direction) -> None:
        """See ``WeightStorage``. Dequantizes once for all uses."""
        for parameter in parameters:
            parameter.dequantized = None
            parameter.dequantized = parameter.dequantize()

    def after_use(self, parameters: Sequence[Any]) -> None:
        """See ``WeightStorage``."""
        for parameter in parameters:
            parameter.dequantized = None


def _blocks(
    shape: Sequence[int], block: Block, start: int, stop: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """The block of each element from ``start`` to ``stop`` of a flattened weight, and the number of all blocks."""
    if block is None:
        return torch.zeros(stop - start, dtype=torch.int64, device=device), 1
    rows, columns = (
        shape[0] if len(shape) > 1 else 1,
        max(torch.Size(shape[1:]).numel() if len(shape) > 1 else shape[0], 1),
    )
    across = -(-columns // block[1])
    elements = torch.arange(start, stop, device=device)
    return elements // columns // block[0] * across + elements % columns // block[1], -(-rows // block[0]) * across


def _largest(values: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The largest magnitude in each block; 0 where there are no elements."""
    return values.new_zeros(count).scatter_reduce_(0, blocks, values.abs(), "amax")


def _encode(values: torch.Tensor, blocks: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of flat values, and the inverse scales, for the largest magnitude in each block."""
    # The largest magnitude becomes the largest 8-bit value. Tiny ones would need an infinite scale.
    scale = (torch.finfo(FORMAT).max / largest).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where(largest > 0, scale, 1.0)
    return (values * scale[blocks]).to(FORMAT).view(torch.uint8), scale.reciprocal()


register_format(Float8Tensor, lambda parameter: Float8Storage(parameter.block))  # type: ignore[attr-defined]
