"""Whether the ranks that are about to share a model have the same one, with the same settings.

If they had not, they would wait for each other in collectives of different sizes, or mix up each other's weights. They
compare a hash, by counters in the store of the process group: a few messages per rank, whatever the number of ranks,
and no collective, which ranks with different groups would never leave. What differs is sent only if something does.
"""

import dataclasses
import hashlib
import json
import time
import weakref
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.backends import moves_data
from megatron.fsdp.comm.journal import (
    SECONDS_FOR_ANSWERS,
    Channel,
    name_ranks,
    open_store,
    report_on_failure,
    wait_for_key,
)
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.comm.streams import Handle
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.runtime.partition import UnitPart
from megatron.fsdp.sharding.mesh import DataParallelAxes, FSDPDistributedIndex

# What is compared, in the order in which differences are reported: its name and what this rank has.
Fingerprint = dict[str, str]

_REFUSED = "the model"
_LAST = ("number of units", "order of parameters")
_MISSING = "nothing of that name"
_REMEDIES = (
    ("setting", "Give all ranks the same arguments."),
    ("device mesh", "Make the mesh, and name its axes, alike on all ranks."),
    ("", "Build the model alike on all ranks, from the same configuration; only the values of parameters may differ."),
)


def fingerprint(
    part: UnitPart, config: FSDPConfig, index: FSDPDistributedIndex, settings_of: Callable[[UnitPart], str]
) -> tuple[Fingerprint, Fingerprint]:
    """What ranks must have in common.

    Args:
        part: The model's units.
        config: Its settings.
        index: Its axes.
        settings_of: What was said about one unit.

    Returns:
        What all data-parallel ranks must have in common, and what those must that share experts; the second is empty
        where experts have no axes of their own.
    """
    dense = {f"setting {f.name}": str(getattr(config, f.name)) for f in dataclasses.fields(config) if f.repr}
    dense["device mesh"] = _describe_axes(index.dense)
    experts: Fingerprint = {}
    apart = index.experts is not index.dense
    if apart:
        experts["device mesh of experts"] = _describe_axes(index.experts)
    order: list[str] = []
    for number, unit in enumerate(_units(part)):
        order.append(str(len(unit.params)))
        for param in unit.params:
            (experts if apart and param.key.expert else dense)[f"parameter {param.name}"] = _describe(param, unit)
        if settings := settings_of(unit):
            dense[f"setting of unit {number}"] = settings
    dense["number of units"] = str(len(order))
    for found in (dense, experts):
        found["order of parameters"] = hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()
    return dense, experts if apart else {}


def _units(part: UnitPart) -> Iterator[UnitPart]:
    yield part
    for child in part.children:
        yield from _units(child)


def _describe_axes(axes: DataParallelAxes) -> str:
    sizes = [group.size() for group in reversed(axes.groups)]
    ranks = name_ranks(dist.get_process_group_ranks(axes.dp_group))
    return f"{' x '.join(map(str, sizes))} of {ranks}, axes {list(axes.mesh.mesh_dim_names or ())}"


def _describe(param: ShardedParameter, unit: UnitPart) -> str:
    parameter = param.compute
    text = f"shape {tuple(parameter.shape)}, {parameter.dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
    text += "".join(f", {mark}" for mark in ("expert", "repeated") if getattr(param.key, mark))
    if param.tensor_parallel is not None:
        text += f", tensor-parallel {tuple(map(str, param.tensor_parallel[1]))}"
    if len(param.names) > 1:
        text += f", tied to {param.names[1:]}"
    return f"{text}, in unit {unit.name or '<root>'}"


class _Open(Handle):
    """The comparison, as something that has been issued."""

    def __init__(self) -> None:
        self.over = False

    def wait(self) -> None:
        pass

    @property
    def ended(self) -> bool:
        return self.over


# How often a rank has compared with the same ranks, in each process group.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class Comparison:
    """One comparison with the ranks of a group.

    Args:
        group: The ranks.
        found: What this rank has; empty for nothing to compare.
    """

    def __init__(self, group: dist.ProcessGroup, found: Fingerprint) -> None:
        self._group = group
        self._found = found
        text = json.dumps(list(found.items()))
        self._hash = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._details = b64encode(zlib.compress(text.encode())).decode()
        ranks = tuple(dist.get_process_group_ranks(group))
        self._ranks = ranks
        self._alone = not found or len(ranks) == 1 or not moves_data(group)
        if self._alone:
            return
        world = dist.group.WORLD
        assert world is not None
        counts = _counts.setdefault(world, Counter())
        name = hashlib.blake2b(str(ranks).encode(), digest_size=8).hexdigest()
        self._store = dist.PrefixStore(f"compare/{name}/{counts[ranks]}", open_store())
        counts[ranks] += 1
        # In this order: who sees that more ranks have come than have the same knows that there is another.
        self._first = self._store.add(self._hash, 1) == 1
        self._store.add("come", 1)

    def wait(self, channel: Channel) -> None:
        """Wait for the other ranks.

        Args:
            channel: Where it is noted that this rank waits.

        Raises:
            ValueError: Ranks differ. All of them raise the same.
            RuntimeError: Some did not come in time.
        """
        if self._alone:
            return
        handle, timeout = _Open(), timeout_of(self._group) or timedelta(minutes=30)
        channel.note(f"compare models with {name_ranks(self._ranks)}", [handle])
        try:
            with report_on_failure(f"Not all of {name_ranks(self._ranks)} have come to shard this model."):
                self._wait(timeout.total_seconds())
        finally:
            handle.over = True

    def _wait(self, seconds: float) -> None:
        end, pause = time.monotonic() + seconds, 0.001
        while True:
            come = self._store.add("come", 0)
            if self._store.add(self._hash, 0) < come:
                raise ValueError(self._verdict())
            if come == len(self._ranks):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"only {come} of {len(self._ranks)} came within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def refuse(self) -> None:
        """This rank raises an error of its own: leave it for the others, and wait for nobody."""
        if not self._alone:
            self._tell()

    def _tell(self) -> None:
        if self._first:
            self._store.set(f"details/{self._hash}", self._details)
        self._store.set(f"rank/{dist.get_rank()}", self._hash)

    def _verdict(self) -> str:
        """The first difference, which one of the ranks finds out for all."""
        self._store.add("wait", 1)
        self._tell()
        end = time.monotonic() + SECONDS_FOR_ANSWERS
        if self._store.add("asked", 1) == 1:
            self._store.set("verdict", _first_difference(self._hashes(end), self._ranks))
        elif not wait_for_key(self._store, "verdict", end + 2.0):
            return "The ranks that share this model differ, and the rank that was to find out how has ended."
        verdict = self._store.get("verdict").decode()
        self._store.add("read", 1)
        # The process that holds the store must not end before the others have read it.
        while self._store.add("read", 0) < self._store.add("wait", 0) and time.monotonic() < end:
            time.sleep(0.01)
        return verdict

    def _hashes(self, end: float) -> list[tuple[list[int], Fingerprint]]:
        """Ranks that have the same, and what they have."""
        of: dict[str, list[int]] = {}
        for rank in self._ranks:
            if wait_for_key(self._store, f"rank/{rank}", end):
                of.setdefault(self._store.get(f"rank/{rank}").decode(), []).append(rank)
        return [
            (ranks, dict(json.loads(zlib.decompress(b64decode(self._store.get(f"details/{key}"))))))
            for key, ranks in of.items()
            if wait_for_key(self._store, f"details/{key}", end)
        ]


def _first_difference(found: list[tuple[list[int], Fingerprint]], ranks: tuple[int, ...]) -> str:
    for have, fingerprint_ in found:
        if _REFUSED in fingerprint_:
            return f"This model cannot be sharded, because {name_ranks(have)} cannot: {fingerprint_[_REFUSED]}"
    silent = sorted(set(ranks) - {rank for have, _ in found for rank in have})
    more = f" ({name_ranks(silent)} had not come yet.)" if silent else ""
    names = list(dict.fromkeys(name for _, fingerprint_ in found for name in fingerprint_))
    names.sort(key=lambda name: name in _LAST)
    for name in names:
        values: dict[str, list[int]] = {}
        for have, fingerprint_ in found:
            values.setdefault(fingerprint_.get(name, _MISSING), []).extend(have)
        if len(values) > 1:
            each = "; ".join(f"{name_ranks(have)}: {value}" for value, have in values.items())
            remedy = next(text for start, text in _REMEDIES if name.startswith(start))
            return f"The ranks that share this model differ. First difference: {name}: {each}. {remedy}{more}"
    return f"The ranks that share this model differ.{more}"


class Agreement:
    """That the ranks which share a model have the same one.

    Args:
        index: Axes that the model is sharded over.
        dense: What all data-parallel ranks have in common.
        experts: What those have in common that share experts; empty where experts have no axes of their own.
    """

    def __init__(self, index: FSDPDistributedIndex, dense: Fingerprint, experts: Fingerprint) -> None:
        self._index = index
        self._dense = dense
        self._experts = experts

    def wait(self, channel: Channel) -> None:
        """See :meth:`Comparison.wait`. Does nothing once all have agreed."""
        everyone = self._index.dense.dp_group
        if self._dense:
            Comparison(everyone, self._dense).wait(channel)
            self._dense = {}
        if self._experts:
            with telling_others(self._index):
                Comparison(self._index.experts.dp_group, self._experts).wait(channel)
            # Others share other experts, and must not go on alone.
            Comparison(everyone, {"experts": "agree"}).wait(channel)
            self._experts = {}


@contextmanager
def telling_others(index: FSDPDistributedIndex) -> Iterator[None]:
    """Context for this rank's own checks: if it raises, ranks that wait for it raise too, and say why."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        with suppress(RuntimeError):  # the store has gone with a rank that was faster
            Comparison(index.dense.dp_group, {_REFUSED: f"{type(error).__name__}: {error}"}).refuse()
        raise
