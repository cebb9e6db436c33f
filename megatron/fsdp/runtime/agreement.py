"""Checks that all ranks that shard a model have the same model and the same settings.

Otherwise they would hang in collectives of different sizes, or mix up each other's weights. The ranks compare a hash
through counters in the store of the process group. This takes a few messages per rank, whatever the number of ranks. A
collective would not do: ranks with different process groups would wait in it forever. Details are sent only if
something differs.
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
    InProgress,
    holds_store,
    name_ranks,
    open_store,
    report_on_failure,
    wait_for_key,
)
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.runtime.partition import UnitPart
from megatron.fsdp.sharding.mesh import DataParallelAxes, FSDPDistributedIndex

# Everything that is compared, by name, in the order in which differences are reported.
Fingerprint = dict[str, str]

_ERROR = "the model"
# How long a rank whose own check has failed stays for others that have not read that yet.
SECONDS_FOR_OTHERS = 2.0
# These follow from other differences, so they are reported last.
_LAST = ("number of units", "order of parameters")
_MISSING = "does not exist"
_REMEDIES = (
    ("setting", "Give all ranks the same arguments."),
    ("device mesh", "Create the same mesh with the same axis names on all ranks."),
    ("", "Build the same model from the same configuration on all ranks; only the values of parameters may differ."),
)


def fingerprint(
    part: UnitPart, config: FSDPConfig, index: FSDPDistributedIndex, settings_of: Callable[[UnitPart], str]
) -> tuple[Fingerprint, Fingerprint]:
    """Describe everything that must be equal on all ranks.

    Args:
        part: The model's units.
        config: Settings of the engine.
        index: The data-parallel axes.
        settings_of: Returns a description of the settings of one unit.

    Returns:
        The fingerprint for all data-parallel ranks, and the fingerprint for ranks that shard the same experts. The
        second is empty if experts do not have separate axes.
    """
    dense = {f"setting {f.name}": str(getattr(config, f.name)) for f in dataclasses.fields(config) if f.repr}
    dense["device mesh"] = _describe_axes(index.dense)
    experts: Fingerprint = {}
    apart = index.experts is not index.dense
    if apart:
        experts["device mesh of experts"] = _describe_axes(index.experts)
    order: list[str] = []
    for number, unit in enumerate(part.walk()):
        order.append(str(len(unit.params)))
        for param in unit.params:
            (experts if apart and param.key.expert else dense)[f"parameter {param.name}"] = _describe(param, unit)
        if settings := settings_of(unit):
            dense[f"setting of unit {number}"] = settings
    dense["number of units"] = str(len(order))
    for found in (dense, experts):
        found["order of parameters"] = hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest()
    return dense, experts if apart else {}


def _describe_axes(axes: DataParallelAxes) -> str:
    sizes = [group.size() for group in reversed(axes.groups)]
    ranks = name_ranks(dist.get_process_group_ranks(axes.dp_group))
    return f"{' x '.join(map(str, sizes))} of {ranks}, axes {list(axes.mesh.mesh_dim_names or ())}"


def _describe(param: ShardedParameter, unit: UnitPart) -> str:
    parameter = param.compute
    text = f"shape {tuple(parameter.shape)}, {parameter.dtype}, {'trained' if parameter.requires_grad else 'frozen'}"
    text += "".join(f", {mark}" for mark in ("expert", "repeated") if getattr(param.key, mark))
    if param.key.storage is not None:
        text += f", stored as {param.key.storage}"
    if param.tensor_parallel is not None:
        text += f", tensor-parallel {tuple(map(str, param.tensor_parallel[1]))}"
    if len(param.names) > 1:
        text += f", tied to {param.names[1:]}"
    return f"{text}, in unit {unit.name or '<root>'}"


# Number of comparisons with the same ranks, by world process group. It makes the keys of every comparison unique.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class Comparison:
    """One comparison of a fingerprint between the ranks of a group.

    Args:
        group: The ranks.
        found: This rank's fingerprint; empty if there is nothing to compare.
    """

    def __init__(self, group: dist.ProcessGroup, found: Fingerprint) -> None:
        self._group = group
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
        # The hash is counted before the rank. So if more ranks than equal hashes are counted, some rank differs.
        self._first = self._store.add(self._hash, 1) == 1
        self._store.add("arrived", 1)

    def wait(self, channel: Channel) -> None:
        """Wait for the other ranks.

        Args:
            channel: Journal channel in which the wait is recorded.

        Raises:
            ValueError: Ranks differ. All of them raise the same error.
            RuntimeError: Some ranks did not arrive in time.
        """
        if self._alone:
            return
        handle, timeout = InProgress(), timeout_of(self._group) or timedelta(minutes=30)
        channel.note(f"compare models with {name_ranks(self._ranks)}", [handle])
        try:
            with report_on_failure(f"Not all of {name_ranks(self._ranks)} have started to shard this model."):
                self._wait(timeout.total_seconds())
        finally:
            handle.over = True

    def _wait(self, seconds: float) -> None:
        end, pause = time.monotonic() + seconds, 0.001
        while True:
            arrived = self._store.add("arrived", 0)
            if self._store.add(self._hash, 0) < arrived:
                raise ValueError(self._verdict())
            if arrived == len(self._ranks):
                return
            if time.monotonic() > end:
                raise TimeoutError(f"only {arrived} of {len(self._ranks)} ranks arrived within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def publish_error(self) -> None:
        """Store this rank's error for ranks that wait for it, and let them read it before this process may end."""
        if not self._alone:
            self.publish()
            self._let_others_read(time.monotonic() + SECONDS_FOR_OTHERS)

    def publish(self) -> None:
        """Store this rank's hash and, if no other rank has done so, the fingerprint behind it. Does not wait."""
        if self._alone:
            return
        if self._first:
            self._store.set(f"details/{self._hash}", self._details)
        self._store.set(f"rank/{dist.get_rank()}", self._hash)

    def _verdict(self) -> str:
        """The message about the first difference. One rank computes it, so that all ranks have the same."""
        self.publish()
        end = time.monotonic() + SECONDS_FOR_ANSWERS
        if self._store.add("judges", 1) == 1:
            self._store.set("verdict", _first_difference(self._fingerprints(end), self._ranks))
        elif not wait_for_key(self._store, "verdict", end + 2.0):
            return "The ranks that shard this model differ, and the rank that was to report the difference has ended."
        verdict = self._store.get("verdict").decode()
        self._let_others_read(end)
        return verdict

    def _let_others_read(self, end: float) -> None:
        """If this process holds the store, wait until all ranks have read why the model cannot be sharded."""
        self._store.add("read", 1)
        while holds_store() and self._store.add("read", 0) < len(self._ranks) and time.monotonic() < end:
            time.sleep(0.01)

    def _fingerprints(self, end: float) -> list[tuple[list[int], Fingerprint]]:
        """The different fingerprints, each with the ranks that have it."""
        ranks_of: dict[str, list[int]] = {}
        for rank in self._ranks:
            if wait_for_key(self._store, f"rank/{rank}", end):
                ranks_of.setdefault(self._store.get(f"rank/{rank}").decode(), []).append(rank)
        return [
            (ranks, dict(json.loads(zlib.decompress(b64decode(self._store.get(f"details/{key}"))))))
            for key, ranks in ranks_of.items()
            if wait_for_key(self._store, f"details/{key}", end)
        ]


def _first_difference(found: list[tuple[list[int], Fingerprint]], ranks: tuple[int, ...]) -> str:
    for having, values in found:
        if _ERROR in values:
            return f"This model cannot be sharded, because sharding failed on {name_ranks(having)}: {values[_ERROR]}"
    absent = sorted(set(ranks) - {rank for having, _ in found for rank in having})
    more = f" ({name_ranks(absent)} had not arrived yet.)" if absent else ""
    names = list(dict.fromkeys(name for _, values in found for name in values))
    names.sort(key=lambda name: name in _LAST)
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for having, values in found:
            ranks_of.setdefault(values.get(name, _MISSING), []).extend(having)
        if len(ranks_of) > 1:
            each = "; ".join(f"{name_ranks(having)}: {value}" for value, having in ranks_of.items())
            remedy = next(text for start, text in _REMEDIES if name.startswith(start))
            return f"The ranks that shard this model differ. First difference: {name}: {each}. {remedy}{more}"
    return f"The ranks that shard this model differ.{more}"


class Agreement:
    """The check that all ranks that shard a model have the same one.

    Args:
        index: Axes that the model is sharded over.
        dense: Fingerprint that all data-parallel ranks must have.
        experts: Fingerprint that ranks with the same experts must have; empty if experts have no separate axes.
    """

    def __init__(self, index: FSDPDistributedIndex, dense: Fingerprint, experts: Fingerprint) -> None:
        self._index = index
        self._dense = dense
        self._experts = experts

    def wait(self, channel: Channel) -> None:
        """Compare with the other ranks; see :meth:`Comparison.wait`. Does nothing once all ranks have agreed."""
        dp_group = self._index.dense.dp_group
        if self._dense:
            Comparison(dp_group, self._dense).wait(channel)
            self._dense = {}
        if self._experts:
            with propagate_errors(self._index):
                Comparison(self._index.experts.dp_group, self._experts).wait(channel)
            # Ranks with other experts must raise an error as well if these ranks have found a difference.
            Comparison(dp_group, {"experts": "agree"}).wait(channel)
            self._experts = {}


@contextmanager
def propagate_errors(index: FSDPDistributedIndex) -> Iterator[None]:
    """Run checks of this rank. If they raise an error, the other ranks raise one as well, instead of waiting for it."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        with suppress(RuntimeError):  # the rank that holds the store may have ended already
            Comparison(index.dense.dp_group, {_ERROR: f"{type(error).__name__}: {error}"}).publish_error()
        raise
