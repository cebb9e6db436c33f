"""Predicts memory and time of a training step without running it: the engine itself runs, on tensors without memory."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.module import ShardedModel
from megatron.fsdp.optim.hooks import attach_optimizer
from megatron.fsdp.sharding.mesh import MeshIndex
from megatron.fsdp.tools.predict.calibration import calibrate
from megatron.fsdp.tools.predict.ghosts import Cost
from megatron.fsdp.tools.predict.machine import Calibration, Device, Link, Topology
from megatron.fsdp.tools.predict.play import Allocation, LinkOf, Simulation, in_program_order
from megatron.fsdp.tools.predict.record import LabelledMemory, Mark, Recorder, fake_ranks
from megatron.fsdp.tools.program import output_loss
from megatron.fsdp.tools.trace.clock import HostClock
from megatron.fsdp.tools.trace.recorder import StepRecorder
from megatron.fsdp.tools.trace.spans import RankTrace

__all__ = ["Calibration", "Device", "Link", "Moment", "Prediction", "Topology", "calibrate", "predict"]


@dataclass(frozen=True)
class Moment:
    """Live bytes of tensors at one moment of the step.

    Attributes:
        seconds: Since the step began.
        module: Name of the module that computes; "optimizer" in the optimizer's step.
        bytes: By category: shards, unsharded units, gradients, optimizer, activations, logits, temporary,
            communication buffers.
    """

    seconds: float
    module: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Prediction:
    """One training step of one rank, after the first steps have allocated state and recorded the plan.

    Attributes:
        step_seconds: Time of the step, from one forward to the next.
        trace: Spans of computation, waits, all-gathers and reductions, as ``trace`` draws them for real runs.
        timeline: Every change of the live bytes of tensors, in the order of time.
        peak: The moment with the most bytes.
        flops: Floating-point operations of the model in a step, on this rank, with recomputation.
        mfu: Three times those of the forward, as a part of the device's peak.
        tokens: Integers in the largest tensor of the batches; 0 if they have none.
    """

    step_seconds: float
    trace: RankTrace
    timeline: list[Moment]
    peak: Moment
    flops: int
    mfu: float
    tokens: int


def predict(  # noqa: PLR0913 - each is a part of the question
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    config: FSDPConfig,
    units: Sequence[type[nn.Module] | str],
    ranks: Topology,
    device: Device,
    link: Link | LinkOf,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    micro_batches: int = 1,
) -> Prediction:
    """Predict one training step. Takes no memory and starts no process.

    Args:
        model_fn: Returns the model, not sharded, on the CPU, in the dtype that it is sharded with.
        batch_fn: Returns a rank's batch, on the CPU.
        config: Settings of the engine.
        units: Classes whose modules become units, or their names.
        ranks: The data-parallel ranks. Rank 0 is predicted.
        device: What a rank computes on.
        link: How ranks are connected, or a function that returns the link of a message. Links of one name are shared.
        optimizer: Called with the sharded model's parameters.
        loss: Called with model and batch. None: ``program.output_loss``.
        micro_batches: Forwards and backwards per step.

    Raises:
        RuntimeError: ``torch.distributed`` is initialized with a process group that moves data.
        NotImplementedError: The shape of an operator's result depends on values. The message names the operator.
    """
    link_of = (lambda message: link) if isinstance(link, Link) else link
    recorder = Recorder("nccl" if device.runs_ahead else "gloo", device.runs_ahead)
    with fake_ranks(ranks.size):
        mesh = init_device_mesh("cpu", (ranks.outer, ranks.inner), mesh_dim_names=("dp_outer", "dp_shard"))
        with recorder.active():
            index = MeshIndex(mesh, "dp_shard", "dp_outer" if ranks.outer > 1 else None)
            model = ShardedModel(model_fn(), config, index, list(units))
            made = optimizer(model.parameters())
            attach_optimizer(made)
            steps = _Steps(recorder, model, made, batch_fn, loss or output_loss, micro_batches)
            # The first step allocates state and records the plan, and the second one is the first to follow it.
            for number in range(3):
                steps.run(record=number == 2)
    return _played(steps, recorder, link_of, ranks, device)


def _played(steps: "_Steps", recorder: Recorder, link_of: LinkOf, ranks: Topology, device: Device) -> Prediction:
    simulation = Simulation(device, link_of, ranks.per_host or ranks.size)
    simulation.play(recorder.program)
    begin, end = steps.begin.seconds, steps.end.seconds
    found = in_program_order(recorder.program) if device.runs_ahead else simulation.allocations
    timeline = moments(found, begin, end)
    trace = dataclasses.replace(steps.recorder.trace(0), device=device.name)
    peak = max(timeline, key=lambda moment: moment.total)
    busy = device.flops.get(steps.dtype) or max(device.flops.values())
    mfu = 3 * steps.forward_flops / (end - begin) / busy
    return Prediction(end - begin, trace, timeline, peak, steps.flops, mfu, steps.tokens)


def moments(allocations: Iterable[Allocation], begin: float, end: float) -> list[Moment]:
    """The live bytes after every change between two times. Smaller changes at one time and place are one."""
    live: dict[str, int] = {}
    found: list[Moment] = []
    for seconds, memory, change, label in allocations:
        if begin <= seconds <= end and not found:
            found.append(Moment(0.0, label, dict(live)))
        live[memory.category] = live.get(memory.category, 0) + change
        if begin <= seconds <= end:
            found.append(Moment(seconds - begin, label, dict(live)))
    return found


class Clock(HostClock):
    """The time of the simulation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def mark(self) -> Mark:
        return self._recorder.mark()

    def time(self, mark: Mark) -> int:
        return round(mark.seconds * 1e9)


class _Steps:
    """Training steps on ghosts, and what their memory is for.

    Attributes:
        begin: The start of the recorded step.
        end: Its end.
        recorder: Its spans.
        flops: Its floating-point operations.
        forward_flops: Those of its forwards.
        dtype: Name of the dtype in which forwards compute most.
        tokens: See ``Prediction``.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        batch_fn: Callable[[], Any],
        loss: Callable[[nn.Module, Any], torch.Tensor],
        micro_batches: int,
    ) -> None:
        self._recorder, self._model, self._optimizer = recorder, model, optimizer
        self._batch_fn, self._loss, self._micro_batches = batch_fn, loss, micro_batches
        self.flops = self.forward_flops = self.tokens = 0
        self.dtype = ""
        self._labels = LabelledMemory(recorder, model.module, model.engine)

    def run(self, record: bool) -> None:
        """Run a step."""
        recorder, labels = self._recorder, self._labels
        first = len(recorder.program)
        self.begin = recorder.mark("forward")
        if record:
            self.recorder = StepRecorder(self._model.engine, Clock(recorder))
            self.recorder.start()
        by_dtype: Counter[str] = Counter()
        self.tokens = 0
        for _ in range(self._micro_batches):
            start = len(recorder.program)
            with labels.forward():
                batch = self._batch_fn()
                loss = self._loss(self._model, batch)
            for cost in (entry for entry in recorder.program[start:] if isinstance(entry, Cost)):
                by_dtype[cost.dtype] += cost.flops
            leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            self.tokens += max((leaf.numel() for leaf in leaves if leaf.dtype == torch.int64), default=0)
            del batch, leaves
            labels.begin_backward()
            loss.backward()
            del loss
        recorder.mark("optimizer")
        labels.label(self._optimizer)
        self._optimizer.step()
        labels.label(self._optimizer)
        self._optimizer.zero_grad()
        self.end = recorder.mark("")
        if record:
            self.recorder.stop()
        self.forward_flops = by_dtype.total()
        self.dtype = max(by_dtype, key=by_dtype.__getitem__, default="")
        self.flops = sum(entry.flops for entry in recorder.program[first:] if isinstance(entry, Cost))
