"""Published step times, MFU and memory, to compare the planner with. Nothing is tuned to them.

Predicted is what is sharded by data parallelism alone, from a few layers of each model. Of most, the sources say
neither the number of GPUs nor the micro-batch: 8 GPUs with 8,192 tokens each are assumed.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import planner
from benchmarks.model import Block, Shape, build_model, loss_of
from benchmarks.options import Options
from benchmarks.results import Case
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.predict import Prediction, Topology, predict
from megatron.fsdp.tools.predict.machine import cluster_of

LLAMA = "KempnerInstitute/KempnerForge, docs/reference/benchmarks.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
KORTHIKANTI = "arXiv 2205.05198, table 5"


# Numbers of layers that are run.
FEW, MORE = 4, 6


class Training(NamedTuple):
    """The model and the machine of a figure.

    Attributes:
        shape: The model.
        gpu: Name of the GPU.
        ranks: Data-parallel ranks.
        sequence: Tokens of a sequence.
        sequences: Of a micro-batch.
        recomputed: Whether layers are recomputed.
        micro_batches: Per step.
    """

    shape: Shape
    gpu: str
    ranks: int = 8
    sequence: int = 2048
    sequences: int = 4
    recomputed: bool = False
    micro_batches: int = 1


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        job: Model, hardware and layout.
        quantity: "mfu" (6 N tokens plus attention, without recomputation, over the dense bf16 peak), "seconds" of a
            step, or "gib" of activations.
        value: The figure.
        source: Where it was published.
        parallel: Tensor and pipeline parallel size.
        training: What is predicted; None: nothing.
    """

    job: str
    quantity: str
    value: float
    source: str
    parallel: tuple[int, int] = (1, 1)
    training: Training | None = None


def _megatron() -> tuple[Published, ...]:
    """Megatron on A100 80 GB, fp16, sequence 2,048, without data parallelism."""
    rows = (
        ("22B", (8, 1), 1.42, 1.10, 59.3, 9.6),
        ("175B", (8, 8), 18.13, 13.75, 66.8, 12.4),
        ("530B", (8, 35), 49.05, 37.83, 114.0, 23.1),
        ("1T", (8, 64), 94.42, 71.49, 131.3, 26.6),
    )
    figures: list[Published] = []
    for size, parallel, full, selective, without, both in rows:
        job = f"Megatron {size}, {parallel[0] * parallel[1]} A100"
        figures += (
            Published(f"{job}, full recomputation", "seconds", full, KORTHIKANTI, parallel),
            Published(f"{job}, sequence parallel, selective", "seconds", selective, KORTHIKANTI, parallel),
            Published(job, "gib", without, f"{KORTHIKANTI}, figure 1", parallel),
            Published(f"{job}, sequence parallel, selective", "gib", both, f"{KORTHIKANTI}, figure 1", parallel),
        )
    return tuple(figures)


LLAMA3 = Shape(4096, 32, 32, 128_256, 14_336)
LLAMA2 = Shape(4096, 32, 32, 32_000, 11_008)
MPT_7B, MPT_13B, MPT_70B = (Shape(*of, 50_432) for of in ((4096, 32, 32), (5120, 40, 40), (8192, 80, 64)))


def _mfu(job: str, value: float, source: str, training: Training) -> Published:
    return Published(job, "mfu", value, source, training=training)


FIGURES = (
    *_megatron(),
    _mfu(
        "Llama 3 8B, 4 H200, FSDP 4, full recomputation",
        *(0.538, LLAMA, Training(LLAMA3, "h200", 4, 4096, 4, True, 2)),
    ),
    Published("Llama 3 8B, 32 H200, TP 4 x FSDP 8", "mfu", 0.269, LLAMA, (4, 1)),
    _mfu(
        "Llama 2 7B, H100, FSDP1",
        0.46,
        "foundation-model-stack/fms-fsdp, issue 89",
        Training(LLAMA2, "h100", 8, 4096, 2),
    ),
    _mfu("MPT 7B, A100, FSDP1", 0.642, FOUNDRY, Training(MPT_7B, "a100-80")),
    _mfu("MPT 13B, A100, FSDP1", 0.596, FOUNDRY, Training(MPT_13B, "a100-80", recomputed=True)),
    _mfu("MPT 70B, 64 A100, FSDP1", 0.533, FOUNDRY, Training(MPT_70B, "a100-80", 64, recomputed=True)),
    _mfu("MPT 7B, H100, FSDP1", 0.464, FOUNDRY, Training(MPT_7B, "h100")),
    _mfu("MPT 70B, H100, FSDP1", 0.426, FOUNDRY, Training(MPT_70B, "h100", 64, recomputed=True)),
)


def _predict(training: Training, layers: int) -> Prediction:
    shape, cluster = replace(training.shape, depth=layers), cluster_of(training.gpu)

    def model() -> nn.Module:
        made = build_model(shape, True).bfloat16()
        for block in made.blocks if training.recomputed else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return made

    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    return predict(
        model,
        lambda: torch.zeros(training.sequences, training.sequence + 1, dtype=torch.int64),
        config=FSDPConfig(3, mixed_precision_policy=policy),
        units=[Block],
        ranks=Topology(training.ranks),
        device=cluster.device,
        link=cluster.link_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        loss=loss_of,
        micro_batches=training.micro_batches,
    )


def predicted_mfu(training: Training) -> float:
    """The MFU of a training, from runs of a few and of some more of its layers."""
    few, more = _predict(training, FEW), _predict(training, MORE)
    layers = (training.shape.depth - FEW) / (MORE - FEW)
    seconds = few.step_seconds + layers * (more.step_seconds - few.step_seconds)
    busy = [found.mfu * found.step_seconds for found in (few, more)]
    return (busy[0] + layers * (busy[1] - busy[0])) / seconds


def run(options: Options) -> list[Case]:
    """Compare all figures with what is predicted, and list those of which nothing is."""
    cases, pairs = [], []
    for figure in FIGURES:
        tensor, pipeline = figure.parallel
        case = Case({"job": figure.job, "TP": tensor, "PP": pipeline}, notes=[figure.source])
        case.put("published", **{figure.quantity: figure.value})
        if figure.training is not None and not options.quick:
            options.report(f"predicting {figure.job}")
            mfu = predicted_mfu(figure.training)
            case.put(planner.NAME, mfu=mfu, error=mfu / figure.value - 1)
            pairs.append((figure.value, mfu))
        cases.append(case)
    if pairs:
        published, predicted = map(list, zip(*pairs, strict=True))
        result = Case({"job": "all"})
        errors = [mine / its - 1 for its, mine in pairs]
        correlation = planner.rank_correlation(published, predicted)
        result.put(planner.NAME, correlation=correlation, **planner.accuracy(errors))
        cases.append(result)
    return cases
