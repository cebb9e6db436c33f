"""Full weights of a sharded model in buckets of bounded size, for inference while training.

The next bucket is gathered while the caller uses the last one. Two buckets of memory take turns.
"""

import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from megatron.fsdp.buffers.flat_buffer import part_view
from megatron.fsdp.buffers.parameter_group import ParameterGroup
from megatron.fsdp.comm.collectives import SENDS, collectives_of, send_ranges
from megatron.fsdp.comm.streams import Handle
from megatron.fsdp.dtensor.gathering import gather_chunks
from megatron.fsdp.dtensor.placements import SectionedShard
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.sharding.ownership import sharing_ranks
from megatron.fsdp.state.loading import unsharded_state

Convert = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
Weights = dict[str, torch.Tensor]
_Given = tuple[str, weakref.ref]

BUCKET = 512 << 20
# Views of other dtypes begin at multiples of this many bytes.
_ALIGNMENT = 512


@dataclass(frozen=True)
class Options:
    """The weights to yield; see :meth:`megatron.fsdp.module.ShardedModel.full_weights`."""

    bucket_bytes: int = BUCKET
    dtype: torch.dtype | None = None
    to_rank: int | None = None
    convert: Convert | None = None
    names: Callable[[str], str] = str
    expert_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[str, bool]] = {
            "bucket_bytes": ("a number of bytes", isinstance(self.bucket_bytes, int)),
            "dtype": ("a floating-point torch.dtype or None", self.dtype is None or _is_floating(self.dtype)),
            "to_rank": ("a rank or None", self.to_rank is None or isinstance(self.to_rank, int)),
            "convert": ("a function or None", self.convert is None or callable(self.convert)),
        }
        for name, (expected, fits) in kinds.items():
            if not fits:
                raise TypeError(f"full_weights: expected {name} to be {expected}; got {getattr(self, name)!r}.")
        if self.bucket_bytes < 1:
            raise ValueError(f"full_weights: expected bucket_bytes of at least 1; got {self.bucket_bytes}.")


@dataclass(frozen=True)
class _Part:
    """Parameters of one group in a bucket: all of the group's flat buffer, or a single parameter of a larger group.

    Attributes:
        group: The group.
        indices: Its parameters in this part.
        span: Their range of the flat buffer.
        dtype: Dtype to gather in.
        names: The name of each parameter, for each expert-parallel rank, or once.
        experts: The expert-parallel ranks, whose parameters have other names; None for dense parameters.
    """

    group: ParameterGroup
    indices: Sequence[int]
    span: slice
    dtype: torch.dtype
    names: list[list[str]]
    experts: dist.ProcessGroup | None

    @property
    def is_direct(self) -> bool:
        """Whether parameters are complete on a rank that has the shards of its own data-parallel ranks."""
        return self.experts is None and not any(self.axes_of(i) for i in self.indices)

    def axes_of(self, i: int) -> list[tuple[Shard | SectionedShard, dist.ProcessGroup]]:
        """The tensor-parallel axes that parameter ``i`` is sharded over."""
        main = self.group.params[i].main
        return [
            (placement, main.device_mesh.get_group(axis))  # type: ignore[attr-defined]  # a DTensor
            for axis, placement in enumerate(main._spec.placements)  # type: ignore[attr-defined]
            if isinstance(placement, (Shard, SectionedShard))
        ]

    @property
    def slots(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """For each full tensor: the expert-parallel rank, the parameter, the byte where it begins, its shape.

        The local tensors of the tensor-parallel rank come first. Full ones that are more than these follow.
        """
        found, size = [], self.span.stop - self.span.start
        end = _aligned(len(self.names) * size * self.dtype.itemsize)
        for rank, i in itertools.product(range(len(self.names)), self.indices):
            shape = tuple(self.group.params[i].shape)
            first = (rank * size + self.group.layout.slots[i].offset - self.span.start) * self.dtype.itemsize
            if self.axes_of(i):
                first, end = end, end + _aligned(torch.Size(shape).numel() * self.dtype.itemsize)
            found.append((rank, i, first, shape))
        return found

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes in the bucket."""
        local = _aligned(len(self.names) * (self.span.stop - self.span.start) * self.dtype.itemsize)
        full = (torch.Size(shape).numel() for _, i, _, shape in self.slots if self.axes_of(i))
        return local + sum(_aligned(numel * self.dtype.itemsize) for numel in full)


def full_weights(engine: Engine, module: nn.Module, options: Options) -> Iterator[Weights]:
    """Yield all weights; see :meth:`megatron.fsdp.module.ShardedModel.full_weights`. A collective.

    Args:
        engine: That of the model.
        module: The model without its wrapper, whose buffers follow the parameters.
        options: What to yield.
    """
    ranks = engine.index.device_mesh.mesh.flatten().tolist()
    if options.to_rank is not None and options.to_rank not in ranks:
        raise ValueError(
            f"full_weights: expected to_rank among the ranks of this model, {ranks}; got {options.to_rank}."
        )
    engine.agree()
    engine.reshard()
    buckets = _divide(engine, options)
    # Otherwise ranks with other arguments would wait for each other without end.
    facts = [options.bucket_bytes, -1 if options.to_rank is None else options.to_rank, len(buckets)]
    facts.append(zlib.crc32(str([(part.dtype, part.span) for bucket in buckets for part in bucket]).encode()))
    if any(other != facts for other in engine.context.exchange(facts)):
        raise ValueError(
            "full_weights: expected the same bucket_bytes, dtype and to_rank on all ranks; this rank has "
            f"{options.bucket_bytes}, {options.dtype} and {options.to_rank}."
        )
    return _Gathering(engine, buckets, options).run(module)


def _divide(engine: Engine, options: Options) -> list[list[_Part]]:
    """Divide the parameters into buckets, in the order of the model."""
    buckets: list[list[_Part]] = []
    left = 0
    for part in itertools.chain.from_iterable(_parts(group, engine, options) for group in engine.groups):
        if part.nbytes > left:
            buckets.append([])
            left = options.bucket_bytes
        buckets[-1].append(part)
        left -= part.nbytes
    return buckets


def _parts(group: ParameterGroup, engine: Engine, options: Options) -> list[_Part]:
    """The group as one part; parameter by parameter if that is larger than a bucket."""
    names, experts = [[options.names(param.name) for param in group.params]], None
    if group.params[0].key.expert and (engine.index.divides_experts or options.expert_group is not None):
        experts = options.expert_group
        names = _names_of_experts(names[0], group, experts)
    compute = group.params[0].compute.dtype
    dtype = compute if options.dtype is None or group.params[0].key.codes else options.dtype
    layout = group.layout
    whole = _Part(group, range(len(group.params)), slice(0, layout.numel), dtype, names, experts)
    if whole.nbytes <= options.bucket_bytes:
        return [whole]
    # Parameters of different ranks alternate, so that all ranks send at the same time.
    order = sorted(whole.indices, key=lambda i: layout.slots[i].offset % layout.shard_numel)
    spans = {i: slice(layout.slots[i].offset, layout.slots[i].end) for i in order}
    return [_Part(group, [i], spans[i], dtype, names, experts) for i in order]


def _names_of_experts(own: list[str], group: ParameterGroup, ranks: dist.ProcessGroup | None) -> list[list[str]]:
    """The names that the parameters of experts have on every expert-parallel rank. A collective."""
    what = f"full_weights: {own[0]}: every expert-parallel rank has other experts"
    if ranks is None:
        raise NotImplementedError(
            f"{what}. Give expert_group, their process group, and names, which returns a parameter's name in the full "
            "model."
        )
    found: list[tuple[list[str], int]] = [(own, 0)] * ranks.size()
    dist.all_gather_object(found, (own, group.layout.numel), group=ranks)
    names = [names for names, _ in found]
    if len(set(itertools.chain(*names))) < sum(map(len, names)) or len({numel for _, numel in found}) > 1:
        raise ValueError(f"{what}: expected other names of the same sizes on each of them; got {names}.")
    return names


class _Gathering:
    """Gathers buckets, one ahead of the caller.

    Args:
        engine: That of the model.
        buckets: What to gather.
        options: What to yield.
    """

    def __init__(self, engine: Engine, buckets: list[list[_Part]], options: Options) -> None:
        self._engine, self._buckets, self._options = engine, buckets, options
        collectives = collectives_of(engine.context.dp_group, engine.device)
        self._gather, self._sends = collectives.all_gather, collectives is SENDS
        self._receives = options.to_rank in (None, dist.get_rank())
        self._names: set[str] = set()
        for part in itertools.chain(*buckets):  # makes the stream's process groups, in the same order on all ranks
            self._groups(part)

    def run(self, module: nn.Module) -> Iterator[Weights]:
        """Yield the buckets, then the buffers."""
        sizes = [sum(part.nbytes for part in bucket) for bucket in self._buckets]
        memory = [
            torch.empty(max(sizes[first::2], default=0), dtype=torch.uint8, device=self._engine.device)
            for first in (0, 1)
        ]
        versions = self._versions()
        given: list[list[_Given]] = [[]]
        handle = self._start(0, memory) if sizes else None
        try:
            for number in range(len(sizes)):
                if self._versions() != versions:
                    raise RuntimeError("full_weights: weights have changed since the first bucket. Start again.")
                if names := [name for name, reference in given[number - 1] if reference() is not None]:
                    raise RuntimeError(
                        f"full_weights: tensors of an earlier bucket are still in use, and their memory now holds "
                        f"others: {', '.join(names[:4])}. Keep copies: tensor.clone()."
                    )
                # The caller has done with the bucket before, whose memory the next one takes.
                before, handle = handle, self._start(number + 1, memory) if number + 1 < len(sizes) else None
                if before is not None:
                    before.wait()
                given.append([])
                yield self._shown(self._tensors(number, memory), given[-1])
            if buffers := {k: v.detach() for k, v in unsharded_state(module).items() if isinstance(v, torch.Tensor)}:
                yield self._shown(((self._options.names(name), value) for name, value in buffers.items()), [])
        finally:
            if handle is not None:
                handle.wait()  # other ranks need this rank's shards

    def _versions(self) -> list[int]:
        return [group.weights.main._version for group in self._engine.groups]

    def _start(self, number: int, memory: list[torch.Tensor]) -> Handle:
        stream = self._engine.context.unshard_stream
        handle = stream.run(functools.partial(self._fill, self._buckets[number], memory[number % 2]))
        self._engine.context.channel.note(f"gather bucket {number} of the full weights", [handle])
        return handle

    def _shown(self, tensors: Iterable[tuple[str, torch.Tensor]], given: list[_Given]) -> Weights:
        """A bucket for the caller, of which this object keeps weak references only."""
        convert = self._options.convert or (lambda name, tensor: [(name, tensor)])
        shown: Weights = {}
        for name, tensor in itertools.chain(*(convert(*each) for each in tensors)) if self._receives else ():
            if name in self._names:
                raise ValueError(f"full_weights: expected another name for each tensor; got {name} twice.")
            self._names.add(name)
            shown[name] = tensor
        given.extend((name, weakref.ref(tensor)) for name, tensor in shown.items())
        return shown

    def _tensors(self, number: int, memory: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for part in self._buckets[number]:
            for rank, i, first, shape in part.slots:
                yield part.names[rank][i], _view(memory[number % 2], start + first, part.dtype, shape)
            start += part.nbytes

    # Tasks of the stream ---------------------------------------------------------------------------------------

    def _groups(self, part: _Part) -> list[dist.ProcessGroup]:
        """The stream's process groups of the axes that main weights are sharded over, the outer one first."""
        group, stream = part.group, self._engine.context.unshard_stream
        groups = [group.axes.gather]
        if group.sharding.outer.shards_optimizer and group.axes.outer is not None:
            groups = [group.axes.outer, *groups, sharing_ranks(group.sharding, group.axes)[0]]
        others = [axis for i in part.indices for _, axis in part.axes_of(i)] + ([part.experts] if part.experts else [])
        for other in others:
            stream.group(other)
        return [stream.group(each) for each in groups]

    def _fill(self, bucket: list[_Part], memory: torch.Tensor) -> None:
        starts = itertools.accumulate((part.nbytes for part in bucket), initial=0)
        parts = [(part, memory[start : start + part.nbytes]) for part, start in zip(bucket, starts, strict=False)]
        works: list[dist.Work] = []
        for tag, (part, of_part) in enumerate(parts):
            works += self._gather_shards(part, self._own(part, of_part), tag)
        for work in works:
            work.wait()
        for part, of_part in parts:
            self._gather_slices(part, of_part)

    @staticmethod
    def _own(part: _Part, memory: torch.Tensor) -> torch.Tensor:
        """The flat parameters of this rank's experts, or of a dense part."""
        rows = _view(memory, 0, part.dtype, (len(part.names), part.span.stop - part.span.start))
        return rows[0 if part.experts is None else part.experts.rank()]

    def _gather_shards(self, part: _Part, flat: torch.Tensor, tag: int) -> list[dist.Work]:
        """Gather over the data-parallel ranks; return what to wait for.

        A full flat buffer is gathered in place, as an unshard does. Otherwise ranks have ranges of different lengths.
        Over gloo both are sends, so that one part is cast while another is on its way.
        """
        group, span = part.group, part.span
        owned, main = group.weights.owned, group.weights.main
        begin, end = (min(max(owned.main.start, at), owned.main.stop) for at in (span.start, span.stop))
        own = main[begin - owned.main.start : end - owned.main.start]
        flat[begin - span.start :][: end - begin].copy_(own, non_blocking=True)
        if owned.index is None:
            return []
        to = self._options.to_rank if part.is_direct else None
        if to is None and not self._sends and span == slice(0, group.layout.numel):
            groups = self._groups(part)
            if len(groups) > 1:
                self._gather(flat[owned.inner], flat[owned.main], groups[0])
            self._gather(flat, flat[owned.inner], groups[min(1, len(groups) - 1)])
            return []
        sharing, shards = sharing_ranks(group.sharding, group.axes)
        bounds = [group.layout.shard(shard) for shard in shards]
        ranges = [
            flat[max(bound.start, span.start) - span.start : max(min(bound.stop, span.stop) - span.start, 0)]
            for bound in bounds
        ]
        ranks = dist.get_process_group_ranks(sharing)
        if to is not None and to not in ranks:
            return []
        return send_ranges(ranges, self._groups(part)[-1], None if to is None else ranks.index(to), tag)

    def _gather_slices(self, part: _Part, memory: torch.Tensor) -> None:
        """Gather over the expert- and the tensor-parallel ranks."""
        stream, size = self._engine.context.unshard_stream, part.span.stop - part.span.start
        rows = _view(memory, 0, part.dtype, (len(part.names), size))
        if part.experts is not None:
            self._gather(rows.view(-1), self._own(part, memory), stream.group(part.experts))
        for rank, i, first, shape in part.slots:
            if axes := part.axes_of(i):
                slot = part.group.layout.slots[i]
                full = part_view(rows[rank], slot.offset - part.span.start, slot.shape)
                for placement, ranks in axes:
                    full = gather_chunks(full, placement, torch.Size(shape), stream.group(ranks))
                _view(memory, first, part.dtype, shape).copy_(full)


def _view(memory: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + nbytes].view(dtype).view(shape)


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
