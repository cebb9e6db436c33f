"""How a quantized compute weight is stored: the interface of the formats, and their registry by tensor class."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

# Replaces a tensor by its maximum over the ranks that share a parameter's main weight, in place. A collective: every
# rank passes a tensor of the same length.
ReduceMax = Callable[[torch.Tensor], None]


class Plane(NamedTuple):
    """One array of bytes per parameter, such as its values by rows."""

    values_per_byte: int = 1


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of one parameter, which may be empty.

    Attributes:
        parameter: The compute weight. What it holds besides planes, such as scales, is whole on every rank.
        main: The shard's main weights, flat.
        start: Its first element, counted in the flattened parameter.
        planes: Where its bytes are to be written, flat, one uint8 tensor per plane.
    """

    parameter: torch.Tensor
    main: torch.Tensor
    start: int
    planes: tuple[torch.Tensor, ...]


class WeightStorage(Protocol):
    """Reads and writes parameters of one tensor class. It has no state: that is in the parameters.

    Attributes:
        key: Parameters with equal keys may share a flat buffer and a call of :meth:`quantize`.
        planes: The arrays of bytes that are sharded and gathered.
        fields: Attributes of a parameter that are part of its storage, and not marks that a framework has set.
    """

    @property
    def key(self) -> Hashable:
        """See the class."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """See the class."""

    @property
    def fields(self) -> frozenset[str]:
        """See the class."""

    def initial(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values before quantization if the parameter still has them, or else the dequantized ones."""

    def bind(self, parameter: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        """Make the parameter's bytes views of ``planes``, in its shape, and drop its initial values.

        The views may have no memory at this moment, or other content.
        """

    def quantize(self, shards: Sequence[WeightShard], reduce_max: ReduceMax) -> None:
        """Write the bytes of this rank's shards, and what every rank holds whole. Runs in the unshard stream.

        Args:
            shards: All parameters of the model that share a key and process groups, in the same order on every rank.
            reduce_max: For statistics such as the largest value. Call it once for all shards, since each call is a
                collective, or never, but equally often on every rank.
        """

    def before_use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Prepare parameters whose bytes are whole for forward or backward. Runs with the compute."""

    def after_use(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop what :meth:`before_use` and the compute have derived from the bytes."""


_FORMATS: dict[type[torch.Tensor], Callable[[torch.Tensor], WeightStorage]] = {}


def register_format(cls: type[torch.Tensor], storage: Callable[[torch.Tensor], WeightStorage]) -> None:
    """Let models with parameters of class ``cls`` be sharded.

    Args:
        cls: A subclass of tensor. Subclasses of it are not included: they may store values in another way.
        storage: Returns the storage of a parameter of this class.
    """
    _FORMATS[cls] = storage


def storage_of(parameter: torch.Tensor) -> WeightStorage | None:
    """How a parameter of a registered class is stored; None for all others."""
    storage = _FORMATS.get(type(parameter))
    return None if storage is None else storage(parameter)
