"""Asks the planner what the suite measures, and says how well its answers agree with the measurements."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from benchmarks.figures import Summary
from benchmarks.job import Job
from benchmarks.model import Block, batch, build_model, loss_of
from benchmarks.peers import PEERS, adamw
from benchmarks.peers.ours import settings_of
from benchmarks.zoo import MODELS
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.tools.predict import Calibration, Device, Link, Prediction, Topology, predict

# The name of the planner in tables, where peers have theirs.
NAME = "planner"
# Ethernet, IP and TCP with timestamps take this part of a packet of 32,000 bytes.
PAYLOAD = 1 - 66 / 32014
# Strategies whose measured times differ by more than this have to be ranked correctly.
DIFFERENT = 0.10


Answer = TypeVar("Answer")


def ask(question: Callable[[], Answer]) -> Answer | str:
    """The answer, or the reason why the planner has none."""
    try:
        return question()
    except NotImplementedError as reason:
        return f"not predicted: {reason or 'the planner is not implemented'}"


def step_milliseconds(job: Job, tokens: int, rate: float, latency: float, device: Device) -> float:
    """The predicted step time of a peer of ours.

    Args:
        job: The peer and its model.
        tokens: Tokens per rank.
        rate: Mbit/s of a rank's link, in each direction.
        latency: One-way milliseconds.
        device: The calibrated CPU.
    """
    settings = dict(PEERS[job.peer].options)
    outer = settings.pop("outer", 1)

    def model() -> nn.Module:
        made = build_model(job.shape, job.low_precision)
        return made.bfloat16() if job.low_precision else made

    link = Link("network", rate * 1e6 / 8 * PAYLOAD, latency / 1e3)
    predicted = predict(
        model,
        lambda: batch(job.shape.vocabulary, tokens, 0, 0),
        config=FSDPConfig(**settings_of(**settings)),
        units=[Block],
        ranks=Topology(job.ranks // outer, outer),
        device=device,
        link=link,
        optimizer=adamw,
        loss=loss_of,
    )
    return 1e3 * predicted.step_seconds


def memory(model: str, zero: int, outer: int, ranks: int, device: Device) -> Prediction:
    """The prediction for a model of ``benchmarks.zoo``."""
    kind = MODELS[model]
    return predict(
        kind.build,
        kind.batch,
        config=FSDPConfig(zero_dp_strategy=zero, **kind.settings),
        units=list(kind.units),
        ranks=Topology(ranks // outer, outer),
        device=device,
        link=Link("network", 1e9, 50e-6),
        optimizer=adamw,
        loss=kind.loss,
    )


def calibration(path: Path) -> Device:
    """The device that was measured here.

    Raises:
        FileNotFoundError: Nothing was measured.
    """
    return Calibration.load(path).device


def accuracy(errors: list[float]) -> dict[str, float]:
    """Median and worst of the absolute relative errors; nothing without any."""
    if not errors:
        return {}
    absolute = [abs(error) for error in errors]
    return {"median_error": Summary.of(absolute).median, "worst_error": max(absolute)}


def ranking(measured: Mapping[str, float], predicted: Mapping[str, float]) -> tuple[int, int]:
    """How many pairs of strategies differ in measured time, and how many of those are in the wrong order.

    Args:
        measured: Time by strategy.
        predicted: Time by strategy, of the same strategies.
    """
    pairs = wrong = 0
    for one, other in itertools.combinations(measured, 2):
        fast, slow = sorted((one, other), key=measured.__getitem__)
        if measured[slow] > (1 + DIFFERENT) * measured[fast]:
            pairs += 1
            wrong += predicted[slow] <= predicted[fast]
    return pairs, wrong


def lost_by_choice(measured: Mapping[str, float], predicted: Mapping[str, float]) -> float:
    """How much longer the configuration that the planner chooses takes than the fastest one, relative to that."""
    return measured[min(predicted, key=predicted.__getitem__)] / min(measured.values()) - 1


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation of two lists without ties."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def largest_by_category(prediction: Prediction) -> dict[str, int]:
    """The largest bytes of every category over the step, at any moment."""
    names = prediction.peak.bytes
    return {name: max(moment.bytes.get(name, 0) for moment in prediction.timeline) for name in names}
