"""Counts copies, collectives and torch operations of one step at torch's dispatcher.

Called through ``benchmarks.worker``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import training

WARM_UP = 2
# The target of copying operations: position or name of the argument; None for the result.
WRITTEN: dict[str, int | str | None] = {
    "aten.copy_": 0,
    "aten._foreach_copy_": 0,
    "aten.clone": None,
    "aten.cat": None,
    "aten.stack": None,
    "aten._to_copy": None,
    "aten.split_with_sizes_copy": "out",
    "aten._chunk_cat": "out",
    "fsdp.all_gather_copy_in": 1,
    "fsdp.split_with_sizes_copy": "out",
    "fsdp.chunk_cat": "out",
    # Adding a gradient to a buffer writes it as well.
    "aten.add_": 0,
    "aten._foreach_add_": 0,
}
# They write zeros to the argument at position 0.
ZEROS = ("aten.zero_", "aten._foreach_zero_", "aten.fill_")
GATHERS = ("allgather", "all_gather")
REDUCTIONS = ("reduce_scatter", "allreduce", "all_reduce")
# Smaller collectives exchange flags, not weights or gradients, and fewer elements that are zeroed are padding.
SMALL = 4096


@dataclass
class _Write:
    """One copying operation, with the storages that it wrote and read."""

    written: int
    targets: set[int]
    sources: set[int]
    casts: bool
    adds: bool
    zeros: bool = False


@dataclass
class _Collective:
    """One collective: its kind, the bytes of the full buffer, and the storages that it uses."""

    kind: str
    bytes: int
    storages: set[int]
    outputs: set[int] = field(default_factory=set)


class Traffic(TorchDispatchMode):
    """Records the copies and collectives of a step.

    Storages are identified by address, and kept alive so that no other storage gets the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Write | _Collective] = []
        self.operations: Counter[str] = Counter()
        self._kept_for_backward: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = str(func.overloadpacket)
        result = func(*args, **kwargs)
        self.operations[packet] += 1
        if packet.startswith("c10d"):
            self._note_collective(packet, args)
        elif packet in WRITTEN or (packet in ZEROS and _elements(args[0]) > SMALL):
            self._note_write(packet, args, kwargs, result)
        return result

    def _ids(self, values: Any) -> Iterator[int]:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            self._kept_for_backward[storage._cdata] = storage
            yield storage._cdata

    def _note_collective(self, packet: str, args: Any) -> None:
        kind = next((k for k, names in KINDS.items() if any(name in packet for name in names)), "other")
        sizes = [sum(t.nbytes for t in _tensors(arg)) for arg in args[:2]]
        # The full buffer is the output of an all-gather or the input of a reduction: the larger of the two.
        self.events.append(_Collective(kind, max(sizes), set(self._ids(args[:2])), set(self._ids(args[:1]))))

    def _note_write(self, packet: str, args: Any, kwargs: Any, result: Any) -> None:
        where = WRITTEN.get(packet, 0)
        targets = result if where is None else kwargs.get(where) if isinstance(where, str) else args[where]
        written = _tensors(targets)
        read = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
        if packet == "fsdp.all_gather_copy_in":  # writes this rank's shard only
            bytes_written = sum(t.nbytes for t in _tensors(args[0]))
        else:
            bytes_written = sum(t.nbytes for t in written)
        casts = bool(read and written) and read[0].dtype != written[0].dtype
        adds = "add" in packet
        zeros = packet in ZEROS
        self.events.append(_Write(bytes_written, set(self._ids(written)), set(self._ids(read)), casts, adds, zeros))


KINDS = {"gather": GATHERS, "reduce": REDUCTIONS}


def _tensors(values: Any) -> list[torch.Tensor]:
    found = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [t._local_tensor if hasattr(t, "_local_tensor") else t for t in found]


def _elements(values: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(values))


def classify(events: list[_Write | _Collective]) -> dict[str, float]:
    """Sum up the bytes of copies and zeros around all-gathers, before reductions, and elsewhere, and of collectives."""
    found = Counter[str]()
    for kind in ("gather", "reduce"):
        big = [e for e in events if isinstance(e, _Collective) and e.kind == kind and e.bytes >= SMALL]
        found[f"{kind}s"] += len(big)
        found[f"{kind}d_bytes" if kind == "reduce" else "gathered_bytes"] += sum(e.bytes for e in big)
    found["small_collectives"] = sum(isinstance(e, _Collective) and e.bytes < SMALL for e in events)
    for index, event in enumerate(events):
        if not isinstance(event, _Write):
            continue
        place = _place(event, events[:index], events[index + 1 :])
        if event.zeros:
            found[f"{place}_zeroed_bytes"] += event.written
            continue
        if place == "gather" and event.casts:
            found["gather_cast_bytes"] += event.written
        elif place in ("gather", "reduce"):
            found[f"{place}_copied_bytes"] += event.written
        elif not event.adds:
            found["other_cast_bytes" if event.casts else "other_copied_bytes"] += event.written
    return {name: float(value) for name, value in found.items()}


def _place(write: _Write, before: list[_Write | _Collective], after: list[_Write | _Collective]) -> str:
    """The kind of collective that a copy belongs to: a later one of its target, or an earlier one of its source."""
    following = next((e for e in after if isinstance(e, _Collective) and e.storages & write.targets), None)
    if following is not None and following.kind in ("gather", "reduce") and following.bytes >= SMALL:
        # An in-place addition to a buffer that is gathered later is an update and not a copy.
        return "else" if write.adds and following.kind == "gather" else following.kind
    preceding = next((e for e in reversed(before) if isinstance(e, _Collective) and e.storages & write.sources), None)
    if preceding is not None and preceding.outputs & write.sources and not write.adds:
        return "gather" if preceding.kind == "gather" else "else"
    return "else"


def measure(tokens: int) -> dict[str, float]:
    """Copies, collectives and operations of one step."""
    for _ in range(WARM_UP):
        training.train_step(tokens)
    with Traffic() as traffic:
        training.train_step(tokens)
    return {**classify(traffic.events), "operations": float(sum(traffic.operations.values()))}


def operations(tokens: int) -> dict[str, int]:
    """Number of calls of each operation, most frequent first. For debugging."""
    with Traffic() as traffic:
        training.train_step(tokens)
    return dict(traffic.operations.most_common())
