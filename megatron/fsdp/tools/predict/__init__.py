"""Predicts memory and time of a training step without running it: the engine itself runs, on tensors without memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.predict.machine import Calibration, Device, Link, Topology, calibrate
from megatron.fsdp.tools.trace.spans import RankTrace

__all__ = ["Calibration", "Device", "Link", "Moment", "Prediction", "Topology", "calibrate", "predict"]

CATEGORIES = (
    "shards",
    "unsharded units",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporary",
    "communication buffers",
)


@dataclass(frozen=True)
class Moment:
    """Live bytes of tensors at one moment of the step.

    Attributes:
        seconds: Since the step began.
        module: Name of the module that computes; "optimizer" in the optimizer's step.
        bytes: By category, one of ``CATEGORIES``.
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
    """

    step_seconds: float
    trace: RankTrace
    timeline: list[Moment]
    peak: Moment
    flops: int


def predict(  # noqa: PLR0913 - each is a part of the question
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    config: FSDPConfig,
    units: Sequence[type[nn.Module] | str],
    ranks: Topology,
    device: Device,
    link: Link | tuple[Link, Link],
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
        link: How ranks are connected along both axes, or a pair for the inner and the outer axis. Both axes share one
            link if it is the same object.
        optimizer: Called with the sharded model's parameters.
        loss: Called with model and batch. None: ``program.output_loss``.
        micro_batches: Forwards and backwards per step.

    Raises:
        RuntimeError: ``torch.distributed`` is initialized with a process group that moves data.
        NotImplementedError: The model reads values of activations on the host. The message names the operation.
    """
    raise NotImplementedError
