"""Runs training steps of the engine itself on ghosts, and records what each stream would do."""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from megatron.fsdp.buffers.gradients import GradientBuffer
from megatron.fsdp.comm import gloo
from megatron.fsdp.comm.backends import Simulated, simulate
from megatron.fsdp.comm.collectives import SENDS
from megatron.fsdp.comm.streams import Handle, Stream, Task
from megatron.fsdp.dtensor.ragged_dtensor import local_shard
from megatron.fsdp.runtime import builder
from megatron.fsdp.runtime.engine import Engine
from megatron.fsdp.tools.predict.ghosts import NOWHERE, ON_HOST, Cost, Ghosts, Memory
from megatron.fsdp.tools.trace.recorder import Replacements

# Label of what computes when a backward begins.
LOSS = "loss, backward"


class Change(NamedTuple):
    """Bytes that are allocated, or freed if negative."""

    memory: Memory
    bytes: int


class Message(NamedTuple):
    """A collective.

    Attributes:
        name: Name of the operator.
        ranks: Number of ranks.
        step: Distance of neighbouring ranks, which says which axis it is.
        bytes: Size of the full buffer.
        number: Number of messages, if it is made of sends; else 0.
        meanwhile: Operators that run in its course, such as sums of what arrives.
    """

    name: str
    ranks: int
    step: int
    bytes: int
    number: int = 0
    meanwhile: tuple[Cost, ...] = ()


class Busy(NamedTuple):
    """Operators that were summed up: seconds of the device."""

    seconds: float


@dataclass(eq=False)
class Mark:
    """A place of which the time is asked for.

    Attributes:
        label: What computes from here on; None if that does not change.
        seconds: The time, after the simulation.
    """

    label: str | None = None
    seconds: float = 0.0


@dataclass(eq=False)
class Work:
    """A task that a stream was given at one place of the computation.

    Attributes:
        stream: Name of the stream.
        entries: What it does.
    """

    stream: str
    entries: list[Any] = field(default_factory=list)


class Wait(NamedTuple):
    """Waits for work."""

    work: Work


class _RecordedHandle(Handle):
    def __init__(self, recorder: "Recorder", work: Work) -> None:
        self._recorder, self._work = recorder, work

    def wait(self) -> None:
        self._recorder.entries.append(Wait(self._work))

    @property
    def ended(self) -> bool:
        return True


class _RecordedStream(Stream):
    """Runs tasks at once, and records them as work of their own."""

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self._recorder, self._name = recorder, name

    def run(self, task: Task) -> Handle:
        work = Work(self._name)
        self._recorder.entries.append(work)
        with self._recorder.within(work.entries, "communication buffers"), torch.no_grad():
            task()
        return _RecordedHandle(self._recorder, work)


def _norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
    """RMS norm in one operator that keeps its input only, as on a GPU. On a CPU it is several."""
    return functional.layer_norm(x, shape, weight, None, eps or 1e-6)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout in one operator that keeps a mask of bytes, as on a GPU. On a CPU it is several."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


class Recorder:
    """Records a computation and its streams.

    Args:
        backend: Name of the backend that is simulated.
        runs_ahead: Whether the device is one with streams.

    Attributes:
        entries: The list that is recorded into now.
        program: What the computation does.
        matmuls: Dtype in which matmuls compute now; empty if in that of their tensors.
    """

    def __init__(self, backend: str, runs_ahead: bool) -> None:
        self.program: list[Any] = []
        self.entries = self.program
        self.matmuls = ""
        self.ghosts = Ghosts(self.add, self._collective, self._change)
        self._simulated = Simulated(backend, runs_ahead, self._stream)
        # What is one operator on a GPU.
        self._on_gpu: dict[str, Any] = {} if backend == "gloo" else {"rms_norm": _norm, "dropout": _dropout}
        self._streams: dict[str, Stream] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within the context."""
        sends = {name: self._as_one(name, getattr(gloo, name)) for name in ("all_gather", "reduce_scatter")}
        with (
            mock.patch.multiple(SENDS, **sends),
            mock.patch.dict(vars(functional), self._on_gpu),
            mock.patch.object(builder, "compare_values", lambda *unused: (False, False)),  # there are no values
            simulate(self._simulated),
            self.ghosts,
            self.ghosts.follow_storages(),
        ):
            yield

    @contextmanager
    def within(self, entries: list[Any], category: str | None = None) -> Iterator[None]:
        """Record into another list, and count new memory as ``category``."""
        before, self.entries = self.entries, entries
        kept, self.ghosts.category = self.ghosts.category, category or self.ghosts.category
        try:
            yield
        finally:
            self.entries, self.ghosts.category = before, kept

    def mark(self, label: str | None = None) -> Mark:
        """Record a mark."""
        mark = Mark(label)
        self.entries.append(mark)
        return mark

    def _stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, _RecordedStream(self, name))

    def add(self, cost: Cost) -> None:
        """Record an operator."""
        quantized = self.matmuls and cost.kind == "matmul"
        self.entries.append(cost._replace(dtype=self.matmuls) if quantized else cost)

    def as_one(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that is one kernel: it reads its arguments and writes its results."""
        entries: list[Any] = []
        with self.within(entries):
            result = function(*args, **kwargs)
        changes = Counter[Memory]()
        for memory, size in (entry for entry in entries if isinstance(entry, Change)):
            changes[memory] += size
        self.entries += [Change(memory, size) for memory, size in changes.items() if size]
        if costs := [entry for entry in entries if isinstance(entry, Cost)]:
            tensors = tree_leaves((args, kwargs, result))
            moved = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            self.add(Cost("fused", "memory", costs[0].dtype, 0, moved))
        return result

    @contextmanager
    def quantized(self, dtype: str, weight: torch.Tensor, *inputs: torch.Tensor) -> Iterator[None]:
        """Let matmuls with a weight compute in a dtype of 8 or 4 bits within the context, once inputs are cast to it.

        A cast writes values by rows and by columns. What autograd keeps of an activation are those by columns.
        """
        bits = int(dtype.removeprefix("float"))
        for tensor in inputs:
            self.add(Cost("cast", "memory", dtype, 0, tensor.nbytes + 2 * tensor.numel() * bits // 8))

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.data_ptr() == weight.data_ptr():
                return weight
            return tensor.shape, tensor.dtype, torch.empty(tensor.numel() * bits // 8, dtype=torch.uint8)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            with self.within(self.entries, NOWHERE):  # matmuls read the cast one
                return torch.empty(packed[0], dtype=packed[1])

        before, self.matmuls = self.matmuls, dtype
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self.matmuls = before

    def _change(self, memory: Memory, change: int) -> None:
        self.entries.append(Change(memory, change))

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((g for g in map(_group, args) if g is not None), None)
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        size = max((t.nbytes for t in tensors), default=0)
        if group is not None and name not in ("allgather_", "allgather_coalesced_"):
            self.entries.append(message_of(name, group, size))
        elif group is not None:
            self.entries.append(message_of(name, group, sum(t.nbytes for t in tensors[:-1])))

    def _as_one(self, name: str, function: Callable[..., None]) -> Any:
        """A collective that is made of sends, as one message."""

        def call(*args: Any) -> None:
            entries: list[Any] = []
            with self.within(entries):
                function(*args)
            group, number = args[-1], sum(isinstance(entry, Message) for entry in entries)
            meanwhile = tuple(entry for entry in entries if isinstance(entry, Cost))
            changes = [entry for entry in entries if isinstance(entry, Change)]
            full = args[0] if name == "all_gather" else args[1]
            self.entries += [each for each in changes if each.bytes > 0]
            self.entries.append(message_of(name, group, full.nbytes)._replace(number=number, meanwhile=meanwhile))
            self.entries += [each for each in changes if each.bytes < 0]

        return call


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, AttributeError):
        return None


def message_of(name: str, group: dist.ProcessGroup, size: int) -> Message:
    """A collective of a group. The full buffer has ``size`` bytes."""
    ranks = dist.get_process_group_ranks(group)
    return Message(name, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, size)


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Process groups of ``size`` ranks that move no data, of which this process is the first.

    Raises:
        RuntimeError: There are process groups of another kind.
    """
    if dist.is_initialized():
        if dist.get_backend() != "fake" or dist.get_world_size() != size:
            raise RuntimeError("A prediction makes process groups of its own: call it before init_process_group().")
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


class LabelledMemory:
    """Says what memory is for, and which module computes, by hooks of the modules and the engine.

    Memory that the forward allocates is activations if it lives until the backward, else temporary. What is allocated
    after the last unit is logits.

    Args:
        recorder: Records the labels.
        module: The model, which is sharded.
        engine: Its engine.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, engine: Engine) -> None:
        self._recorder, self._ghosts, self._engine = recorder, recorder.ghosts, engine
        self._buffers = [*module.buffers()]
        self._stack: list[str] = []
        units = {unit.name for unit in engine.units[1:]}
        for name, each in module.named_modules():
            each.register_forward_pre_hook(functools.partial(self._enter, name, name in units))
            each.register_forward_hook(functools.partial(self._leave, name in units), always_call=True)
        replacements = Replacements()
        for group in engine.groups:
            for name in ("collect_gradients", "take_gradients"):
                replacements.replace(group, name, self._collect)
            replacements.replace(group.gradients, "accumulate", functools.partial(self._accumulate, group.gradients))
        replacements.replace(engine.schedule, "before_backward", self._before_backward)
        replacements.replace(engine, "finish_gradients", self._finish_gradients)

    def _enter(self, name: str, is_unit: bool, *_: Any) -> None:
        self._stack.append(name)
        self._recorder.mark(name or "<root>")
        if is_unit:
            self._ghosts.category = "activations"

    def _leave(self, is_unit: bool, *_: Any) -> None:
        self._stack.pop()
        self._recorder.mark((self._stack[-1] if self._stack else "") or "<root>")
        if is_unit:
            self._ghosts.category = "logits"

    def _before_backward(self, method: Callable[[Any], None], unit: Any) -> None:
        self._recorder.mark(f"{unit.label}, backward")
        method(unit)

    def _collect(self, method: Callable[[], Any]) -> Any:
        found = method()
        for gradient in tree_leaves(found):
            self._set(gradient, "gradients")
        return found

    def _accumulate(self, buffer: GradientBuffer, method: Callable[..., Any], *args: Any) -> Any:
        found = method(*args)
        self._set(buffer.unreduced, "gradients")
        return found

    def _finish_gradients(self, method: Callable[[], None]) -> None:
        self._recorder.mark("gradients")
        method()

    def _set(self, tensor: Any, category: str) -> None:
        if isinstance(tensor, torch.Tensor):
            local = local_shard(tensor) if isinstance(tensor, DTensor) else tensor
            memory = self._ghosts.memory_of(local.untyped_storage())
            memory.category = memory.category if memory.category == ON_HOST else category

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward with its loss."""
        self._ghosts.category = "activations"
        self._stack.clear()
        self._born = self._ghosts.operators
        yield

    def begin_backward(self) -> None:
        """Call memory temporary that the forward has freed."""
        for memory in self._ghosts.freed_since(self._born):
            if memory.category in ("activations", "logits"):
                memory.category = "temporary"
        self._ghosts.category = "temporary"
        self._recorder.mark(LOSS)

    def label(self, optimizer: torch.optim.Optimizer) -> None:
        """Say what the memory is for that stays: weights, gradients, and the optimizer's state."""
        for buffer in self._buffers:
            self._set(buffer, "shards")
        for state in optimizer.state.values():
            for value in state.values():
                self._set(value, "optimizer")
        for group in self._engine.groups:
            for plane in group.weights.planes:
                # Without a shard that stays, ``shard`` is a part of the buffer.
                self._set(plane.shard, "shards")
                self._set(plane.buffer.flat, "unsharded units" if group.weights.temporary else "shards")
            self._set(group.weights.main, "shards")
            for param in group.params:
                self._set(param.main.grad, "gradients")
                self._set(getattr(param.compute, "scales", None), "shards")
