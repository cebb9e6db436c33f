"""Positions of parameters in Megatron-Core's flat buffers: arithmetic on sizes, without tensors.

Each model-parallel rank has one buffer per model chunk and dtype, split into buckets. A buffer stores the rank's
parameters in reverse order of registration, each aligned to 64 elements of its bucket. The sizes determine the
parameters of each pipeline stage: stages hold successive parts of the model that fill their buffers exactly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.fsdp.convert.groups import is_expert
from megatron.fsdp.convert.torch_dist import order

# Parameters begin at multiples of this number of elements.
ALIGNMENT = 64

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Spot(NamedTuple):
    """The position of a parameter: its bucket, and its first element in it."""

    bucket: int
    start: int


class Atom(NamedTuple):
    """A tensor that is part of a parameter, and the dimension that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    cut: int | None

    def local(self, ranks: int) -> tuple[int, ...]:
        """The shape of one shard."""
        return tuple(n // ranks if d == self.cut else n for d, n in enumerate(self.shape))


class Parameter(NamedTuple):
    """A parameter of the model: its atoms follow each other. The dtype is torch's name."""

    name: str
    dtype: str
    atoms: tuple[Atom, ...]

    def numel(self, ranks: int) -> int:
        """The number of elements of one shard."""
        return sum(math.prod(atom.local(ranks)) for atom in self.atoms)


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of one rank.

    Attributes:
        dtype: Torch's name for the dtype of its parameters.
        keys: For each bucket, the checkpoint's keys of its tensors, by kind of state.
        sizes: The number of elements of each bucket, without the padding at its end.
    """

    dtype: str
    keys: tuple[Mapping[str, str], ...]
    sizes: tuple[int, ...]


class Home(NamedTuple):
    """The buffer that stores a parameter, and the position in it."""

    buffer: Buffer
    spot: Spot


# By name, and rank among those that shard the parameter.
Homes = dict[tuple[str, int], Home]
# For each model-parallel rank of one optimizer, the buffers of each of its model chunks.
Ranks = list[list[list[Buffer]]]


class Parallelism(NamedTuple):
    """Numbers of ranks, from the training arguments."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def lay_out(numels: Iterable[int], buckets: Sequence[int]) -> list[Spot] | None:
    """The positions of parameters in a buffer's buckets; None if they do not fill the buckets exactly.

    Args:
        numels: The number of elements of each parameter, in the buffer's order.
        buckets: The number of elements of each bucket, without the padding at its end.
    """
    spots: list[Spot] = []
    bucket, end = 0, 0
    for numel in numels:
        start = _aligned(end)
        # If the next parameter needs a separate bucket, this one may be padded to the parameter's aligned start.
        if spots and bucket < len(buckets) and buckets[bucket] in (end, start):
            bucket, start = bucket + 1, 0
        if bucket >= len(buckets) or start + numel > buckets[bucket]:
            return None
        spots.append(Spot(bucket, start))
        end = start + numel
    full = bucket == len(buckets) - 1 and buckets[bucket] in (end, _aligned(end))
    return spots if spots and full else None


def find_homes(dense: Ranks, experts: Ranks | None, parameters: Sequence[Parameter], ranks: Parallelism) -> Homes:
    """Find the position of each parameter.

    Args:
        dense: The buffers of the optimizer of all parameters, or of all except the experts.
        experts: The buffers of a separate optimizer of the experts; None if there is none.
        parameters: The parameters of the whole model, in the order of registration.
        ranks: Numbers of ranks.

    Raises:
        ValueError: The parameters do not fill the buffers exactly.
    """
    separate = [p for p in parameters if experts is not None and is_expert(p.name)]
    rest = [p for p in parameters if experts is None or not is_expert(p.name)]
    homes: Homes = {}
    for stage, run in enumerate(_stages(dense, rest, ranks)):
        for rank in range(ranks.tensor):
            homes = _settled(run, _chunk(dense, stage, rank, ranks.pipeline), rank, ranks.tensor) | homes
        units = {order.place(p.name).unit for p in run}
        local = [p for p in separate if order.place(p.name).unit in units]
        for number in range(ranks.expert * ranks.expert_tensor if local else 0):
            group, rank = divmod(number, ranks.expert_tensor)
            chunk = _chunk(experts or [], stage, number, ranks.pipeline)
            homes |= _settled(_experts_of(local, group, ranks.expert), chunk, rank, ranks.expert_tensor)
    return homes


def _aligned(element: int) -> int:
    return -(-element // ALIGNMENT) * ALIGNMENT


def _chunk(buffers: Ranks, stage: int, rank: int, pipeline: int) -> list[Buffer]:
    """The buffers of a stage on one rank. Interleaved stages go round the pipeline; a stage's ranks are consecutive."""
    width = len(buffers) // pipeline
    return buffers[stage % pipeline * width + rank][stage // pipeline]


def _experts_of(experts: list[Parameter], group: int, groups: int) -> list[Parameter]:
    """The experts of one expert-parallel rank: the same range of indices in every layer."""
    total = 1 + max(order.expert_index(p.name) for p in experts)
    return [p for p in experts if order.expert_index(p.name) * groups // total == group]


def _settled(run: list[Parameter], chunk: list[Buffer], rank: int, ranks: int) -> Homes:
    filled = _fill(run, chunk, ranks)
    if filled is None:
        raise ValueError(
            f"expected {run[0].name} to {run[-1].name} to fill the optimizer's buffers of "
            f"{[buffer.sizes for buffer in chunk]} elements in that order, as other ranks' do; they do not."
        )
    return {(name, rank): home for name, home in filled.items()}


def _fill(run: list[Parameter], chunk: list[Buffer], ranks: int) -> dict[str, Home] | None:
    """The positions of a stage's parameters on one rank; None if they do not fill its buffers exactly."""
    homes: dict[str, Home] = {}
    for buffer in chunk:
        # Reverse order of registration: gradients of the last parameters are ready first.
        inside = [p for p in reversed(run) if p.dtype == buffer.dtype]
        spots = lay_out([p.numel(ranks) for p in inside], buffer.sizes)
        if spots is None:
            return None
        homes |= {p.name: Home(buffer, spot) for p, spot in zip(inside, spots, strict=True)}
    return homes if len(homes) == len(run) else None


def _stages(buffers: Ranks, parameters: list[Parameter], ranks: Parallelism) -> list[list[Parameter]]:
    """The parameters of each pipeline stage, in the order of stages.

    Raises:
        ValueError: No division into stages fills the buffers.
    """
    units: dict[tuple[int, ...], list[Parameter]] = {}
    for parameter in parameters:
        units.setdefault(order.place(parameter.name).unit, []).append(parameter)
    chunks = [
        _chunk(buffers, stage, 0, ranks.pipeline) for stage in range(ranks.pipeline * max(map(len, buffers), default=1))
    ]
    found = _part(list(units.values()), chunks, ranks.tensor, parameters)
    if found is None:
        raise ValueError(
            f"expected the model's {len(parameters)} parameters to fill the optimizer's buffers of "
            f"{[[buffer.sizes for buffer in chunk] for chunk in chunks]} elements exactly; they do not. The model has "
            "other parameters than its checkpoint says, or some are not trained."
        )
    return found


def _part(
    units: list[list[Parameter]], chunks: list[list[Buffer]], ranks: int, model: list[Parameter]
) -> list[list[Parameter]] | None:
    """Divide successive units among stages so that each stage fills its buffers."""
    if not chunks:
        return [] if not units else None
    total = sum(sum(buffer.sizes) for buffer in chunks[0])
    run: list[Parameter] = []
    numel = 0
    for count, unit in enumerate(units, start=1):
        run = [*run, *unit]
        numel += sum(p.numel(ranks) for p in unit)
        if numel > total:
            return None
        for copies in _copies(run, model):
            if _fill(copies, chunks[0], ranks) is None:
                continue
            rest = _part(units[count:], chunks[1:], ranks, model)
            if rest is not None:
                return [copies, *rest]
    return None


def _copies(run: list[Parameter], model: list[Parameter]) -> list[list[Parameter]]:
    """Alternatives for a stage's parameters: without and with copies of the embedding, which later stages may hold."""
    embedding = next((p for p in model if p.name == _EMBEDDING), None)
    if embedding is None or any(p.name == _EMBEDDING for p in run):
        return [run]
    ways = [run]
    if run[-1].name == model[-1].name and model[-1].name != _OUTPUT:
        ways.append([*run, embedding._replace(name=_OUTPUT)])
    if any(p.name.startswith("mtp.") for p in run):
        ways += [[embedding, *way] for way in ways]
    return ways
