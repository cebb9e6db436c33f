"""Which parameters lie where in Megatron-Core's flat buffers: arithmetic on sizes, no tensors.

Each model-parallel rank has buffers of its own, one per model chunk and dtype, cut into buckets. In them lie the rank's
parameters in reverse order of registration, each from a multiple of 64 elements of its bucket on. Which parameters a
pipeline stage has follows from the sizes: stages hold successive parts of the model that fill their buffers exactly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.fsdp.convert.groups import is_expert
from megatron.fsdp.convert.torch_dist import order

# A parameter begins at a multiple of this many elements.
ALIGNMENT = 64

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Spot(NamedTuple):
    """Where a parameter lies: in which bucket, from which element on."""

    bucket: int
    start: int


class Atom(NamedTuple):
    """A tensor that a parameter is made of, and the dimension that tensor parallelism cuts."""

    name: str
    shape: tuple[int, ...]
    cut: int | None

    def local(self, ranks: int) -> tuple[int, ...]:
        """Its shape on one of the ranks that share it."""
        return tuple(n // ranks if d == self.cut else n for d, n in enumerate(self.shape))


class Parameter(NamedTuple):
    """A parameter of the model; its atoms lie one after the other in it. The dtype is named as torch names it."""

    name: str
    dtype: str
    atoms: tuple[Atom, ...]

    def numel(self, ranks: int) -> int:
        """Elements on one of the ranks that share it."""
        return sum(math.prod(atom.local(ranks)) for atom in self.atoms)


@dataclass(frozen=True)
class Buffer:
    """One flat buffer of one rank.

    Attributes:
        dtype: Of its parameters, as torch names it.
        keys: Of its tensors in the checkpoint: of each bucket, by kind of state.
        sizes: Elements of each bucket, without the padding at its end.
    """

    dtype: str
    keys: tuple[Mapping[str, str], ...]
    sizes: tuple[int, ...]


class Home(NamedTuple):
    """The buffer that a parameter lies in, and where."""

    buffer: Buffer
    spot: Spot


# By name and number of the rank among those that share the parameter.
Homes = dict[tuple[str, int], Home]
# Of one optimizer: for each model-parallel rank the buffers of each of its model chunks.
Ranks = list[list[list[Buffer]]]


class Parallelism(NamedTuple):
    """Numbers of ranks, as training arguments say."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def lay_out(numels: Iterable[int], buckets: Sequence[int]) -> list[Spot] | None:
    """Where parameters lie in a buffer's buckets; None if they do not fill them exactly.

    Args:
        numels: Elements of each parameter, in the buffer's order.
        buckets: Elements of each bucket, without the padding at its end.
    """
    spots: list[Spot] = []
    bucket, end = 0, 0
    for numel in numels:
        start = _aligned(end)
        # A bucket that ends because the next parameter needs one of its own ends where that would have begun.
        if spots and bucket < len(buckets) and buckets[bucket] in (end, start):
            bucket, start = bucket + 1, 0
        if bucket >= len(buckets) or start + numel > buckets[bucket]:
            return None
        spots.append(Spot(bucket, start))
        end = start + numel
    full = bucket == len(buckets) - 1 and buckets[bucket] in (end, _aligned(end))
    return spots if spots and full else None


def find_homes(dense: Ranks, experts: Ranks | None, parameters: Sequence[Parameter], ranks: Parallelism) -> Homes:
    """Where each parameter lies.

    Args:
        dense: Buffers of the optimizer that holds all parameters, or all but the experts.
        experts: Buffers of the experts' own optimizer; None if there is none.
        parameters: Of the whole model, in the order in which it registers them.
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
    """A stage's buffers on one rank. Interleaved stages go round the pipeline; ranks of one stage are neighbors."""
    width = len(buffers) // pipeline
    return buffers[stage % pipeline * width + rank][stage // pipeline]


def _experts_of(experts: list[Parameter], group: int, groups: int) -> list[Parameter]:
    """The experts of one expert-parallel rank: the same run of every layer's."""
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
    """Where the parameters of a stage lie on one rank; None if they do not fill its buffers exactly."""
    homes: dict[str, Home] = {}
    for buffer in chunk:
        # The last that is registered is the first whose gradient is there.
        inside = [p for p in reversed(run) if p.dtype == buffer.dtype]
        spots = lay_out([p.numel(ranks) for p in inside], buffer.sizes)
        if spots is None:
            return None
        homes |= {p.name: Home(buffer, spot) for p, spot in zip(inside, spots, strict=True)}
    return homes if len(homes) == len(run) else None


def _stages(buffers: Ranks, parameters: list[Parameter], ranks: Parallelism) -> list[list[Parameter]]:
    """The parameters of each pipeline stage, in the order of stages.

    Raises:
        ValueError: There is no way to part them that fills the buffers.
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
    """Part successive units among stages so that each fills its buffers."""
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
    """A stage's parameters without and with copies of the embedding that later stages may hold."""
    embedding = next((p for p in model if p.name == _EMBEDDING), None)
    if embedding is None or any(p.name == _EMBEDDING for p in run):
        return [run]
    ways = [run]
    if run[-1].name == model[-1].name and model[-1].name != _OUTPUT:
        ways.append([*run, embedding._replace(name=_OUTPUT)])
    if any(p.name.startswith("mtp.") for p in run):
        ways += [[embedding, *way] for way in ways]
    return ways
