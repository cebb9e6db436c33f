"""How a quantized compute weight is stored: the interface of the formats, and their registry by tensor class."""

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

# Attribute of a quantized parameter, set before its model is sharded. If true, ``after_use`` keeps transposed copies.
# They take as many bytes as full parameters on every rank, and save work in each backward but the first of a step.
KEEP_TRANSPOSE = "_fsdp_keep_transpose"


class Direction(Enum):
    """The use of a parameter."""

    FORWARD = "forward"
    BACKWARD = "backward"


class ReduceMax(Protocol):
    """Reduces over the ranks that share a parameter's main weights."""

    def __call__(self, values: torch.Tensor) -> None:
        """Replace a tensor by its maximum over the ranks, in place.

        A collective: every rank passes a tensor of the same shape and dtype.
        """

    @property
    def process_group(self) -> dist.ProcessGroup:
        """A group of these ranks, for libraries that reduce themselves. It may have further ranks with equal values."""


class Plane(NamedTuple):
    """One array of bytes per parameter, such as its values by rows, or their scales.

    Attributes:
        values_per_byte: Elements of the parameter for each byte.
        directions: The passes that read it. Others do not gather it.
    """

    values_per_byte: int = 1
    directions: frozenset[Direction] = frozenset(Direction)


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of one parameter, which may be empty.

    Attributes:
        parameter: The compute weight. What it holds besides planes, such as scales, is not sharded.
        main: The shard's main weights, flat. With ``offload_optimizer`` they are in host memory.
        start: Its first element, counted in the flattened parameter.
        planes: Where its bytes are to be written, flat, one uint8 tensor per plane.
    """

    parameter: torch.Tensor
    main: torch.Tensor
    start: int
    planes: tuple[torch.Tensor, ...]

    def values(self) -> torch.Tensor:
        """The main weights in float32, flat, on the device of the compute weights."""
        return self.main.to(self.planes[0].device, torch.float32, non_blocking=True)


class WeightStorage(Protocol):
    """Reads and writes parameters of one tensor class. It has no state: that is in the parameters."""

    @property
    def key(self) -> Hashable:
        """Parameters with equal keys may share a flat buffer and a call of :meth:`quantize`."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays of bytes that are sharded and gathered."""

    @property
    def block_rows(self) -> int | None:
        """Ranks split a parameter only between blocks of this many rows.

        None: between any two values, and every plane has a byte for each value.
        """

    @property
    def fields(self) -> frozenset[str]:
        """Attributes of a parameter that are part of its storage, and not marks that a framework has set."""

    @property
    def takes_dtype(self) -> bool:
        """Whether :meth:`bind` can give parameters a different dtype. If not, ``compute_dtype`` must be theirs."""

    @property
    def is_repeatable(self) -> bool:
        """Whether quantizing unchanged main weights again gives the same bytes. False if scales have a history."""

    def problem(self, parameter: torch.Tensor, device: torch.device) -> str | None:
        """Why a parameter cannot be trained on this device, such as an odd shape or old hardware; None if it can."""

    def initial(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values before quantization if the parameter still has them, or else the dequantized ones."""

    def bind(self, parameter: torch.Tensor, planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Store the parameter's bytes in ``planes`` from now on, and drop its initial values.

        Args:
            parameter: The parameter. It may be on another device than the planes, or on the meta device.
            planes: Flat uint8 tensors. They may have no memory at this moment, or other content.
            dtype: What the result appears to have; the parameter's unless :attr:`takes_dtype`.

        Returns:
            The tensor to use as the parameter: the same, or one that takes its place.
        """

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        """Write the bytes of this rank's shards, and what is not sharded. Runs in the unshard stream.

        Args:
            shards: All parameters of the model that share a key and process groups, in the same order on every rank.
            reduce_max: For statistics such as the largest value. Call it once for all shards, since each call is a
                collective, or never, but equally often on every rank.
        """

    def before_use(self, parameters: Sequence[torch.Tensor], direction: Direction) -> None:
        """Prepare parameters whose planes of this direction are unsharded. Runs with the compute."""

    def after_use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop what :meth:`before_use` and the compute have derived from the bytes."""


_FORMATS: dict[type[torch.Tensor], Callable[[torch.Tensor], WeightStorage]] = {}
_QUANTIZING_MODULES: dict[type[nn.Module], Callable[[nn.Module, str], torch.Tensor | None]] = {}

# Packages whose classes a module of ours registers. It is imported when a model has a tensor or module of the package.
_PLUGINS = {
    "torchao": "megatron.fsdp.quantized.torchao",
    "transformer_engine": "megatron.fsdp.quantized.transformer_engine",
}


def register_format(cls: type[torch.Tensor], storage: Callable[[torch.Tensor], WeightStorage]) -> None:
    """Let models with parameters of class ``cls`` be sharded.

    Args:
        cls: A subclass of tensor. Subclasses of it are not included: they may store values in another way.
        storage: Returns the storage of a parameter of this class.
    """
    _FORMATS[cls] = storage


def register_quantizing_module(cls: type[nn.Module], make: Callable[[nn.Module, str], torch.Tensor | None]) -> None:
    """Let models on the meta device be sharded whose modules quantize plain parameters after they initialize them.

    Args:
        cls: A class of modules. Its subclasses are included.
        make: Is given a module and the name of a plain parameter of it. Returns the quantized tensor that will replace
            it, on the meta device, or None if the parameter stays plain.
    """
    _QUANTIZING_MODULES[cls] = make


def storage_of(parameter: torch.Tensor) -> WeightStorage | None:
    """How a parameter of a registered class is stored; None for all others."""
    cls = type(parameter)
    _import_plugin(cls)
    storage = _FORMATS.get(cls)
    return None if storage is None else storage(parameter)


def drop_copies_after_forward(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Let layers of Transformer Engine quantize plain weights in backward again, which is then gathered again.

    Otherwise autograd keeps what they have quantized in forward: up to 2 bytes per element of all weights. They ask
    whether FSDP2 shards them, and keep the answer in an attribute (``is_fsdp2`` in transformer_engine/pytorch/module/
    base.py, from version 2.15 on).

    Args:
        modules: Layers whose weights are freed between forward and backward; others are ignored.

    Returns:
        The layers that keep their copies: Transformer Engine's that do not ask.
    """
    kept = []
    for module in modules:
        quantized = any(storage_of(parameter) is not None for parameter in module.parameters(recurse=False))
        if quantized or not hasattr(module, "fp8_meta"):
            continue
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = True  # type: ignore[assignment]
        else:
            kept.append(module)
    return kept


def quantized_on_meta(module: nn.Module, name: str) -> torch.Tensor | None:
    """The quantized tensor that will replace a module's plain parameter on the meta device; None if none will."""
    for cls in type(module).__mro__:
        _import_plugin(cls)
        make = _QUANTIZING_MODULES.get(cls)
        if make is not None:
            return make(module, name)
    return None


def _import_plugin(cls: type) -> None:
    plugin = _PLUGINS.pop(cls.__module__.partition(".")[0], None)
    if plugin is not None:
        importlib.import_module(plugin)
