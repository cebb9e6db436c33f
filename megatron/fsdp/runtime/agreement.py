"""Checks that all ranks that shard a model have the same model and the same settings, and whether its values are equal.

Otherwise they would hang in collectives of different sizes, or mix up each other's weights. The ranks compare a hash
through counters in the store of the process group. This takes a few messages per rank, whatever the number of ranks. A
collective would not do: ranks with different process groups would wait in it forever. Details are sent only if
something differs.
"""

import ctypes
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import time
import weakref
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.buffers.parameter import ShardedParameter
from megatron.fsdp.comm.backends import moves_data
from megatron.fsdp.comm.collectives import broadcast
from megatron.fsdp.comm.hang_report import name_ranks
from megatron.fsdp.comm.journal import Channel, report_on_failure
from megatron.fsdp.comm.process_groups import timeout_of
from megatron.fsdp.comm.rounds import SECONDS_FOR_ANSWERS, Round, holds_store
from megatron.fsdp.comm.streams import Stream, raise_if_ranks_disagree
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.quantized.storage import storage_of
from megatron.fsdp.runtime.partition import UnitPart
from megatron.fsdp.sharding.mesh import DataParallelAxes, MeshIndex

logger = logging.getLogger(__name__)

# Everything that is compared, by name, in the order in which differences are reported.
Fingerprint = dict[str, str]

_ERROR = "the model"
# How long a rank whose own check has failed stays for others that have not read that yet.
SECONDS_FOR_OTHERS = 2.0
# How long ranks wait for those along an axis that no argument names. They may never shard a model, so this must end.
SECONDS_FOR_REPLICAS = 10.0
# These follow from other differences, so they are reported last.
_LAST = ("number of units", "order of parameters")
_MISSING = "does not exist"
# The beginning of names of values, in contrast to those of shapes and settings.
_VALUES = "values of"
LOADED = "entry"
_REMEDIES = (
    ("setting", "Give all ranks the same arguments."),
    ("device mesh", "Create the same mesh with the same axis names on all ranks."),
    (
        _VALUES,
        "As with DDP, the first of these ranks gives its weights and buffers to the others. To save that, set the same "
        "seed on all ranks before the model is built.",
    ),
    (LOADED, "Nothing was loaded. Load the same full tensors on all ranks, or use torch.distributed.checkpoint."),
    ("", "Build the same model from the same configuration on all ranks; only the values of parameters may differ."),
)


def fingerprint(
    part: UnitPart, config: FSDPConfig, index: MeshIndex, settings_of: Callable[[UnitPart], str]
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
            text = _describe(param, unit)
            if param.is_meta and not config.sync_module_states:
                text += ", on the meta device (sync_module_states=True lets the first rank give it values)"
            (experts if apart and param.key.expert else dense)[f"parameter {param.name}"] = text
        if apart and (count := sum(param.key.expert for param in unit.params)):
            dense[f"experts of unit {number}"] = f"{count} parameters"
        if settings := settings_of(unit):
            dense[f"setting of unit {number}"] = settings
    for expert, name, buffer in buffers_of(part.module, index) if config.sync_module_states is not False else ():
        (experts if expert else dense)[f"buffer {name}"] = f"shape {tuple(buffer.shape)}, {buffer.dtype}"
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
    text += ", replicated" if param.replicated else ""
    if param.key.storage is not None:
        text += f", stored as {param.key.storage}"
    if param.tensor_parallel is not None:
        text += f", tensor-parallel {tuple(map(str, param.tensor_parallel[1]))}"
    if len(param.names) > 1:
        text += f", tied to {param.names[1:]}"
    return f"{text}, in unit {unit.name or '<root>'}"


def buffers_of(module: nn.Module, index: MeshIndex) -> Iterator[tuple[bool, str, torch.Tensor]]:
    """Yield the buffers with their names, and whether only the ranks with the same experts have equal ones.

    That is assumed of all buffers of modules that contain experts, which may say which experts a rank has.
    """
    apart = index.experts is not index.dense
    for path, owner in module.named_modules():
        expert = apart and not all(getattr(parameter, "allreduce", True) for parameter in owner.parameters())
        for name, buffer in owner.named_buffers(path, recurse=False):
            yield expert, name, local_shard(buffer) if isinstance(buffer, DTensor) else buffer


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd: multiplication by an odd number modulo 2^64 is invertible, so no bit of an element is lost.
_FACTOR = 0x9E3779B97F4A7C1 | 1


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """Hash the bits and the order of a tensor's elements, on the tensor's device. Returns an int64 scalar."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()]).long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device) * _FACTOR
    mixed = (bits ^ places) * _FACTOR
    return (mixed ^ (mixed >> 29)).sum()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Hash about 1024 elements at equal distances, and add the sum of all bits.

    Returns:
        An int64 scalar on the tensor's device. The sum reads the tensor once, and takes half of the time of a copy.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    result = hash_of(flat[:: max(flat.numel() // 1024, 1)])
    bits, wide = flat.view(_INTEGERS[flat.element_size()]), 8 // flat.element_size()
    # Sums of short integers are ten times as slow.
    end = 0 if bits.storage_offset() % wide else bits.numel() // wide * wide
    return result + bits[:end].view(torch.int64).sum() + bits[end:].sum()


def as_text(checksums: dict[str, torch.Tensor], device: torch.device) -> Fingerprint:
    """Read checksums, with one host-device sync."""
    numbers = torch.stack([value.to(device) for value in checksums.values()]).tolist() if checksums else []
    return {name: f"checksum {number % (1 << 64):x}" for name, number in zip(checksums, numbers, strict=True)}


@torch.no_grad()
def samples(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Checksums of up to 32 elements of each tensor, with a host-device sync per run of tensors of one dtype.

    They lie at equal, odd distances: at even ones, all might be in one column of a matrix. Each costs a cache miss.
    """
    found = {}
    for _, names in itertools.groupby(tensors, lambda name: (tensors[name].dtype, tensors[name].device)):
        pieces = {name: tensors[name].reshape(-1)[:: tensors[name].numel() // 32 | 1] for name in names}
        joined = torch.cat(list(pieces.values())).view(torch.uint8).cpu()
        contents = io.BytesIO(ctypes.string_at(joined.data_ptr(), joined.numel()))
        for name, piece in pieces.items():
            found[name] = f"checksum {zlib.crc32(contents.read(piece.nbytes)):x}"
    return found


def compare_values(
    part: UnitPart, config: FSDPConfig, index: MeshIndex, device: torch.device, channel: Channel
) -> tuple[bool, bool]:
    """Compare initial weights and buffers with those of other ranks, after :meth:`Agreement.wait`.

    Tensors on the meta device are left out: their initialization gives all ranks equal values.

    Returns:
        Whether the first rank of each data-parallel group has to give its weights and buffers to the others: those of
        dense modules, and those of experts.

    Raises:
        ValueError: Ranks along an axis of the mesh that no argument names have the same model.
    """
    given = config.sync_module_states
    spare = {} if given is False else index.spare_axes()
    if given is not None and not spare:
        return given, given
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    params = [param for unit in part.walk() for param in unit.params]
    for param in (param for param in params if not param.is_meta):
        storage = storage_of(param.compute)
        value = param.local_value if storage is None else storage.initial(param.compute)
        expert = param.key.expert and index.experts is not index.dense
        found[expert][f"{_VALUES} {param.name}"] = checksum(value)
    for expert, name, buffer in buffers_of(part.module, index):
        if not buffer.is_meta:
            found[expert][f"{_VALUES} {name}"] = checksum(buffer)
    dense, experts = (as_text(each, device) for each in found)
    with propagate_errors(index):
        for name, group in spare.items() if not any(param.is_meta for param in params) else ():
            _reject_replicas(name, Comparison(group, dense))
    if given is not None:
        return given, given
    differs = []
    for axes, values in ((index.dense, dense), (index.experts, experts)):
        if (text := difference(axes.dp_group, values, channel)) and axes.dp_group.rank() == 0:
            logger.warning("FSDP: %s To keep each rank's shards of its own model, give sync_module_states=False.", text)
        differs.append(bool(text))
    return differs[0], differs[1]


def _reject_replicas(axis: str, comparison: "Comparison") -> None:
    with suppress(TimeoutError):
        if comparison.is_equal(SECONDS_FOR_REPLICAS):
            raise ValueError(
                f"device_mesh: the ranks along its axis {axis!r} have the same model, and no argument names the axis: "
                "these replicas would never be synchronized. Give it as dp_outer_dim (replicas) or tp_dim. If these "
                "ranks are to train different models, give the mesh without it: device_mesh[dp_shard_dim]."
            )


def difference(group: dist.ProcessGroup, values: Fingerprint, channel: Channel | None) -> str:
    """Describe the first value that differs between the ranks of a group; empty if all are equal.

    Raises:
        ValueError: The ranks do not have the same values at all, or one of them has failed.
    """
    try:
        Comparison(group, values).wait(channel)
    except ValueError as error:
        if f": {_VALUES}" in str(error):
            return str(error)
        raise
    return ""


def give_from_first(module: nn.Module, index: MeshIndex, stream: Stream, wanted: tuple[bool, bool]) -> None:
    """Overwrite buffers with those of the first rank of each data-parallel group. A collective.

    Args:
        module: The model.
        index: Process groups.
        stream: Runs the collectives.
        wanted: Whether to do this with buffers of dense modules, and with those of modules that contain experts.
    """
    for expert, _, buffer in buffers_of(module, index):
        if wanted[expert]:
            receive(buffer, stream, (index.experts if expert else index.dense).dp_group)


def receive(tensor: torch.Tensor, stream: Stream, group: dist.ProcessGroup) -> None:
    """Overwrite a tensor with that of the first rank of a group. A collective."""
    sent = tensor.detach().contiguous()
    stream.run(functools.partial(broadcast, sent, 0, stream.group(group))).wait()
    tensor.detach().copy_(sent)


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
        self._text = json.dumps(list(found.items())).encode()
        self._hash = hashlib.blake2b(self._text, digest_size=8).hexdigest()
        # First, as it raises a clear error if the group was destroyed.
        self._alone = not moves_data(group) or not found or group.size() == 1
        ranks = self._ranks = tuple(dist.get_process_group_ranks(group))
        if self._alone:
            return
        world = dist.group.WORLD
        assert world is not None
        counts = _counts.setdefault(world, Counter())
        name = hashlib.blake2b(str(ranks).encode(), digest_size=8).hexdigest()
        self._round = Round(f"compare/{name}/{counts[ranks]}")
        counts[ranks] += 1
        # The hash is counted before the rank. If more ranks than equal hashes are counted, some rank differs.
        self._first = self._round.count(self._hash, 1) == 1
        self._round.count("arrived", 1)

    def wait(self, channel: Channel | None) -> None:
        """Wait for the other ranks.

        Args:
            channel: Journal channel in which the wait is recorded, if there is one.

        Raises:
            ValueError: Ranks differ. All of them raise the same error.
            RuntimeError: Some ranks did not arrive in time.
        """
        if self._alone:
            return
        timeout, ranks = timeout_of(self._group) or timedelta(minutes=30), name_ranks(self._ranks)
        failed = f"Not all of {ranks} shard or load this model."
        # All ranks of the channel record the same, while each has its own replicas to compare with.
        everyone = channel is not None and sorted(channel.log.peers) == sorted(self._ranks)
        what = f"compare models with {ranks}" if everyone else "compare models with replicas"
        waiting = report_on_failure(failed) if channel is None else channel.log.waiting(channel.model + what, failed)
        with waiting:
            equal = self.is_equal(timeout.total_seconds())
        if not equal:
            raise ValueError(self._verdict())

    def is_equal(self, seconds: float) -> bool:
        """Whether all ranks have equal fingerprints. Raises TimeoutError if those that have arrived in time do."""
        end, pause = time.monotonic() + seconds, 0.0001
        while True:
            arrived = 0 if self._alone else self._round.count("arrived")
            if self._alone or self._round.count(self._hash) < arrived:
                return False
            if arrived == len(self._ranks):
                return True
            if time.monotonic() > end:
                raise TimeoutError(f"only {arrived} of {len(self._ranks)} ranks arrived within {seconds:.0f} s")
            raise_if_ranks_disagree()
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def publish_error(self) -> None:
        """Store this rank's error for ranks that wait for it, and let them read it before this process may end."""
        if not self._alone:
            self._publish()
            self._let_others_read(SECONDS_FOR_OTHERS)

    def _publish(self) -> None:
        """Store this rank's hash and, if no other rank has done so, the fingerprint behind it."""
        if self._first:
            self._round.publish(f"details/{self._hash}", b64encode(zlib.compress(self._text)).decode())
        self._round.publish(f"rank/{dist.get_rank()}", self._hash)

    def _verdict(self) -> str:
        """The message about the first difference. One rank computes it, so that all ranks have the same."""
        self._publish()
        verdict = self._round.verdict(self._judge)
        if verdict is None:
            return "The ranks that shard this model differ, and the rank that was to report the difference has ended."
        self._let_others_read(SECONDS_FOR_ANSWERS)
        return verdict

    def _judge(self, end: float) -> str:
        """Describe the first difference between the fingerprints that have arrived at time ``end``."""
        hashes = self._round.collect((f"rank/{rank}" for rank in self._ranks), end)
        ranks_of: dict[str, list[int]] = {}
        for rank in self._ranks:
            if key := hashes.get(f"rank/{rank}"):
                ranks_of.setdefault(f"details/{key}", []).append(rank)
        details = self._round.collect(ranks_of, end)
        found = [
            (ranks, dict(json.loads(zlib.decompress(b64decode(details[key])))))
            for key, ranks in ranks_of.items()
            if key in details
        ]
        return _first_difference(found, self._ranks)

    def _let_others_read(self, seconds: float) -> None:
        """If this process holds the store, wait until all ranks have read why the model cannot be sharded."""
        end = time.monotonic() + seconds
        self._round.count("read", 1)
        while holds_store() and self._round.count("read") < len(self._ranks) and time.monotonic() < end:
            time.sleep(0.01)


def _first_difference(found: list[tuple[list[int], Fingerprint]], ranks: tuple[int, ...]) -> str:
    for having, values in found:
        if _ERROR in values:
            return f"This rank cannot continue, because {name_ranks(having)} failed: {values[_ERROR]}"
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

    def __init__(self, index: MeshIndex, dense: Fingerprint, experts: Fingerprint) -> None:
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
def propagate_errors(index: MeshIndex) -> Iterator[None]:
    """Run checks of this rank. If they raise an error, the other ranks raise one as well, instead of waiting for it."""
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # the rank that holds the store may have ended already
            Comparison(index.dense.dp_group, {_ERROR: f"{type(error).__name__}: {error}"}).publish_error()
        raise
