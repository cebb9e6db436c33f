"""Published step times, MFU and memory, to compare the planner with. Nothing is tuned to them.

Models that are sharded by data parallelism alone are predicted from a few of their layers. Of most, the sources say
neither the number of GPUs nor the micro-batch: 8 GPUs with 8,192 tokens each are assumed. Others are command lines of
Megatron, whose parallelism is the source's; weights are sharded by this engine where there are data-parallel ranks.
"""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import planner
from benchmarks.model import Block, Shape, build_model, loss_of
from benchmarks.options import Options
from benchmarks.results import Case
from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.predict import Prediction, Topology, predict
from megatron.fsdp.tools.predict.machine import cluster_of

LLAMA = "KempnerInstitute/KempnerForge, docs/reference/benchmarks.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
KORTHIKANTI = "arXiv 2205.05198, table 5"
SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"
# Of all command lines.
COMMON = """
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor --bf16 --lr 1e-4
--mock-data --tokenizer-type NullTokenizer --train-iters 10
"""
GPT = "--transformer-impl local --attention-backend unfused --no-bias-gelu-fusion --vocab-size 51199 --seq-length 2048 "
GPT += "--max-position-embeddings 2048"

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
class Command:
    """A command line of Megatron.

    Attributes:
        gpu: Name of the GPU.
        ranks: Number of GPUs.
        arguments: What is not ``COMMON``.
    """

    gpu: str
    ranks: int
    arguments: str


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
    training: Training | Command | None = None


def _megatron() -> tuple[Published, ...]:
    """Megatron on A100 80 GB, fp16, sequence 2,048, without data parallelism."""
    rows = (
        ("22B", (48, 6144, 64), (8, 1, 1), (4, 4), (1.42, 1.10), (59.3, 9.6)),
        ("175B", (96, 12288, 96), (8, 8, 3), (64, 1), (18.13, 13.75), (66.8, 12.4)),
        ("530B", (105, 20480, 128), (8, 35, 3), (280, 1), (49.05, 37.83), (114.0, 23.1)),
        ("1T", (128, 25600, 160), (8, 64, 1), (512, 1), (94.42, 71.49), (131.3, 26.6)),
    )
    figures: list[Published] = []
    for size, (layers, hidden, heads), (tensor, pipeline, chunks), (batch, micro), seconds, gib in rows:
        ranks = tensor * pipeline
        job, memory = f"Megatron {size}, {ranks} A100", f"{KORTHIKANTI}, figure 1"
        line = (
            f"{GPT} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {4 * hidden} "
            f"--num-attention-heads {heads} --global-batch-size {batch} --micro-batch-size {micro} "
            f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        )
        if chunks > 1:
            line += f" --num-virtual-stages-per-pipeline-rank {chunks}"
        full, both, without = (
            Command("a100-80", ranks, f"{line} {flags}")
            for flags in (
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                "--recompute-granularity selective --recompute-modules core_attn --sequence-parallel",
                "",
            )
        )
        selective = f"{job}, sequence parallel, selective"
        figures += (
            Published(f"{job}, full recomputation", "seconds", seconds[0], KORTHIKANTI, (tensor, pipeline), full),
            Published(selective, "seconds", seconds[1], KORTHIKANTI, (tensor, pipeline), both),
            Published(job, "gib", gib[0], memory, (tensor, pipeline), without),
            # With few activations and one stage, memory has its peak when they are gone.
            Published(selective, "gib", gib[1], memory, (tensor, pipeline), both if pipeline > 1 else None),
        )
    return tuple(figures)


LLAMA3 = Shape(4096, 32, 32, 128_256, 14_336)
LLAMA2 = Shape(4096, 32, 32, 32_000, 11_008)
MPT_7B, MPT_13B, MPT_70B = (Shape(*of, 50_432) for of in ((4096, 32, 32), (5120, 40, 40), (8192, 80, 64)))

LLAMA3_TP = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 128255 --seq-length 4096
--max-position-embeddings 4096 --tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 4
--global-batch-size 64 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""


def _mfu(job: str, value: float, source: str, training: Training) -> Published:
    return Published(job, "mfu", value, source, training=training)


FIGURES = (
    *_megatron(),
    _mfu(
        "Llama 3 8B, 4 H200, FSDP 4, full recomputation",
        *(0.538, LLAMA, Training(LLAMA3, "h200", 4, 4096, 4, True, 2)),
    ),
    Published("Llama 3 8B, 32 H200, TP 4 x FSDP 8", "mfu", 0.269, LLAMA, (4, 1), Command("h200", 32, LLAMA3_TP)),
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


@functools.cache
def predicted_step(command: Command) -> dict[str, Any]:
    """A step of a command line, as the doctor prints it."""
    doctor = [sys.executable, "-m", "megatron.fsdp.tools.doctor", "--json", "--gpu", command.gpu, "--world-size"]
    words = [*doctor, str(command.ranks), str(SCRIPT), *COMMON.split(), *command.arguments.split()]
    printed = subprocess.run(words, capture_output=True, text=True, cwd=SCRIPT.parent).stdout
    report: dict[str, Any] = json.loads(printed)
    step = report.get("step")
    if not isinstance(step, dict):
        raise NotImplementedError(step or report["refusal"] or report["limits"])
    return step


def predicted(figure: Published) -> dict[str, float]:
    """The figure as predicted, and both as MFU, if it is about time."""
    if isinstance(figure.training, Training):
        mfu = predicted_mfu(figure.training)
        return {"mfu": mfu, "published_mfu": figure.value}
    assert figure.training is not None, "the figure has a training"
    step = predicted_step(figure.training)
    mfu, seconds = step["mfu"], step["seconds"]
    if figure.quantity == "gib":
        return {"gib": (step["peak"]["activations"] + step["peak"].get("logits", 0)) / GIB}
    if figure.quantity == "mfu":
        return {"mfu": mfu, "published_mfu": figure.value}
    return {"seconds": seconds, "mfu": mfu, "published_mfu": mfu * seconds / figure.value}


def run(options: Options) -> list[Case]:
    """Compare all figures with what is predicted, and list those of which nothing is."""
    cases = []
    found: dict[str, list[tuple[float, float]]] = {"mfu": [], "gib": []}
    for figure in FIGURES:
        tensor, pipeline = figure.parallel
        case = Case({"job": figure.job, "TP": tensor, "PP": pipeline}, notes=[figure.source])
        case.put("published", **{figure.quantity: figure.value})
        if figure.training is not None and not options.quick:
            options.report(f"predicting {figure.job}")
            answer = planner.ask(functools.partial(predicted, figure))
            if isinstance(answer, str):
                case.notes.append(answer)
            else:
                published = answer.pop("published_mfu", figure.value)
                kind = "gib" if figure.quantity == "gib" else "mfu"
                found[kind].append((published, answer[kind]))
                case.put(planner.NAME, error=answer[figure.quantity] / figure.value - 1, **answer)
        cases.append(case)
    for kind, pairs in found.items():
        if pairs:
            result = Case({"job": f"all of {kind}"})
            errors = [one / its - 1 for its, one in pairs]
            correlation = planner.rank_correlation(*map(list, zip(*pairs, strict=True)))
            result.put(planner.NAME, correlation=correlation, **planner.accuracy(errors))
            cases.append(result)
    return cases
