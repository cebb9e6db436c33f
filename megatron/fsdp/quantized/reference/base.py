"""A tensor that is dequantized for every matmul, and its storage: the base of the formats in plain torch.

They show what training with quantized weights computes, on every device. They are not meant for speed: matmuls
run on dequantized weights, in the dtype that the weight appears to have.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map
from typing_extensions import Self

from megatron.fsdp.quantized.storage import Direction, Plane, ReduceMax, WeightShard

E4M3 = torch.float8_e4m3fn


class ReferenceTensor(torch.Tensor):
    """A quantized weight that appears as a plain tensor. The ``quantize`` of a subclass makes one.

    Attributes:
        stored_as: Its storage.
        planes: Its bytes: one flat uint8 tensor per plane of the storage.
        state: float32 tensors that every rank has in full, such as scales of the full weight.
        initial: The values before quantization.
        dequantized: While the weight is in use, its values for each direction. Aliases of the weight share them.
    """

    stored_as: "ReferenceStorage"
    planes: tuple[torch.Tensor, ...]
    state: dict[str, torch.Tensor]
    initial: torch.Tensor | None
    dequantized: dict[Direction, torch.Tensor]

    @staticmethod
    def __new__(cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "ReferenceTensor":
        """Make a tensor without its attributes."""
        made: ReferenceTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    @classmethod
    def of(
        cls, storage: "ReferenceStorage", value: torch.Tensor, dtype: torch.dtype | None, keep_initial: bool
    ) -> Self:
        """Quantize a full weight, which may be on the meta device."""
        value = value.detach()
        problem = storage.shape_problem(value)
        if problem is not None:
            raise ValueError(f"A weight of shape {tuple(value.shape)} cannot be a {cls.__name__}: {problem}")
        made: Any = cls(value.shape, dtype or value.dtype, value.device)
        made.stored_as, made.state, made.dequantized = storage, storage.new_state(value.shape, value.device), {}
        made.planes = tuple(
            torch.empty(value.numel() // plane.values_per_byte, dtype=torch.uint8, device=value.device)
            for plane in storage.planes
        )
        made.initial = value if keep_initial else None
        if not value.is_meta:
            storage.quantize([WeightShard(made, value.reshape(-1), 0, made.planes)], _not_shared)  # type: ignore[arg-type]
        return made

    def dequantize(self, direction: Direction | None = None) -> torch.Tensor:
        """The weight as a plain tensor of its dtype.

        Args:
            direction: The matmuls that read it. None: those of the pass that the weight was last prepared for.
        """
        if direction is None:
            direction = next(reversed(self.dequantized), Direction.FORWARD)
        source = self.stored_as.source(direction)
        found = self.dequantized.get(source)
        if found is None and self.dequantized:
            raise RuntimeError(
                f"The {source.value} bytes of {type(self).__name__} are read while only others are unsharded. "
                "Recompute whole modules, not functions that read weights."
            )
        return self.decoded(source) if found is None else found

    @torch.no_grad()
    def decoded(self, direction: Direction) -> torch.Tensor:
        """Dequantize the bytes that matmuls of this direction read."""
        return self.stored_as.decode(self, direction).view(self.shape).to(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with memory of its own, and the marks that frameworks set on parameters."""
        made = type(self)(self.shape, self.dtype, self.device)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made.requires_grad_(self.requires_grad)  # type: ignore[return-value]

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
            made = cls(it.shape, it.dtype, it.device)
            vars(made).update({name: vars(it)[name] for name in it.stored_as.fields})
            return made
        device = (kwargs or {}).get("device")
        if function is torch.ops.aten._to_copy.default and device not in (None, args[0].device):
            raise NotImplementedError(f"A {cls.__name__} cannot be moved to {device}. Quantize weights there.")
        if function._schema.is_mutable and isinstance(args[0], cls):
            raise NotImplementedError(f"{function} changes a {cls.__name__} in place. Quantize the new values instead.")

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, cls) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def _not_shared(values: torch.Tensor) -> None:
    """The ``ReduceMax`` of a full weight."""


# Traced by torch.compile, a subclass without __tensor_flatten__ would silently get no gradient.
@torch.compiler.disable
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, ReferenceTensor):
        return F.linear(input, weight, bias)
    output: torch.Tensor = _Linear.apply(input, weight)
    return output if bias is None else output + bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    """A linear layer that saves the quantized weight for backward; autograd would save the dequantized one."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: ReferenceTensor) -> torch.Tensor:
        output = F.linear(input, weight.dequantize(Direction.FORWARD))
        # Under autocast, the matmul is in a different dtype than its factors.
        ctx.save_for_backward(input.to(output.dtype), weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad
        of_input = grad @ weight.dequantize(Direction.BACKWARD).to(grad.dtype) if needs_input else None
        of_weight = grad.reshape(-1, grad.shape[-1]).t() @ input.reshape(-1, input.shape[-1]) if needs_weight else None
        return of_input, of_weight


@dataclass(frozen=True)
class ReferenceStorage:
    """The storage of a :class:`ReferenceTensor`; see :class:`megatron.fsdp.quantized.storage.WeightStorage`.

    A format subclasses it. Parameters with equal storages may share a flat buffer.
    """

    takes_dtype = True
    is_repeatable = True
    fields = frozenset({"stored_as", "planes", "state", "initial", "dequantized"})

    @property
    def key(self) -> "ReferenceStorage":
        return self

    @property
    def planes(self) -> tuple[Plane, ...]:
        raise NotImplementedError

    @property
    def block_rows(self) -> int | None:
        raise NotImplementedError

    def shape_problem(self, weight: torch.Tensor) -> str | None:
        """Why the format cannot hold a weight of this shape, if it cannot."""
        return None

    def new_state(self, shape: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a weight that are not sharded, before it is quantized for the first time."""
        return {}

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        raise NotImplementedError

    def decode(self, parameter: ReferenceTensor, direction: Direction) -> torch.Tensor:
        """The float32 values that matmuls of this direction read; of the parameter's number of elements."""
        raise NotImplementedError

    def source(self, direction: Direction) -> Direction:
        """The direction whose planes are read. Where all directions read the same planes, it is FORWARD."""
        differ = any(plane.directions != frozenset(Direction) for plane in self.planes)
        return direction if differ else Direction.FORWARD

    def problem(self, parameter: torch.Tensor, device: torch.device) -> str | None:
        return self.shape_problem(parameter)

    def initial(self, parameter: Any) -> torch.Tensor:
        return parameter.dequantize() if parameter.initial is None else parameter.initial

    def bind(self, parameter: Any, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The state is reset: the first quantization of main weights sets it."""
        device = planes[0].device
        if (parameter.device, parameter.dtype) != (device, dtype):
            # What such a tensor reports cannot be changed.
            made: Any = type(parameter)(parameter.shape, dtype, device)
            vars(made).update({name: vars(parameter)[name] for name in self.fields})
            parameter = nn.Parameter(made, requires_grad=parameter.requires_grad)
        parameter.planes, parameter.state = tuple(planes), self.new_state(parameter.shape, device)
        parameter.initial, parameter.dequantized = None, {}
        return parameter

    def before_use(self, parameters: Sequence[Any], direction: Direction) -> None:
        """Dequantizes once for all uses."""
        source = self.source(direction)
        for parameter in parameters:
            parameter.dequantized.pop(source, None)
            parameter.dequantized[source] = parameter.decoded(source)

    def after_use(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            parameter.dequantized.clear()


def matrices(shards: Sequence[WeightShard]) -> Iterator[tuple[WeightShard, torch.Tensor]]:
    """Shards that are not empty, one after the other, each with its float32 values as whole rows of its parameter.

    Values are brought to the device of the compute weights when it is a shard's turn, so that those of one shard are
    there at a time.
    """
    for shard in shards:
        if shard.main.numel() > 0:
            yield shard, shard.values().view(-1, shard.parameter.shape[-1])


def divide(number: float, values: torch.Tensor) -> torch.Tensor:
    """``number / values``, or the largest finite number where that is infinite, as for tiny values."""
    # A Python number divided by a tensor would be multiplied by the reciprocal, which rounds twice.
    return (torch.full_like(values, number) / values).clamp(max=torch.finfo(values.dtype).max)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The bytes of values in 8-bit floats. Those beyond the range become the largest one."""
    # Not all versions of torch saturate.
    largest = torch.finfo(E4M3).max
    return values.clamp(-largest, largest).to(E4M3).view(torch.uint8)
