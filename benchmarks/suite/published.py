"""Published step times, MFU and memory, to compare the planner with. Nothing is tuned to them."""

from dataclasses import dataclass

from benchmarks.options import Options
from benchmarks.results import Case

LLAMA = "KempnerInstitute/KempnerForge, docs/reference/benchmarks.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
KORTHIKANTI = "arXiv 2205.05198, table 5"


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
    """

    job: str
    quantity: str
    value: float
    source: str
    parallel: tuple[int, int] = (1, 1)


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


FIGURES = (
    *_megatron(),
    Published("Llama 3 8B, 4 H200, FSDP 4, full recomputation", "mfu", 0.538, LLAMA),
    Published("Llama 3 8B, 32 H200, TP 4 x FSDP 8", "mfu", 0.269, LLAMA, (4, 1)),
    Published("Llama 2 7B, H100, FSDP1", "mfu", 0.46, "foundation-model-stack/fms-fsdp, issue 89"),
    Published("MPT 7B, A100, FSDP1", "mfu", 0.642, FOUNDRY),
    Published("MPT 13B, A100, FSDP1", "mfu", 0.596, FOUNDRY),
    Published("MPT 70B, 64 A100, FSDP1", "mfu", 0.533, FOUNDRY),
    Published("MPT 7B, H100, FSDP1", "mfu", 0.464, FOUNDRY),
    Published("MPT 70B, H100, FSDP1", "mfu", 0.426, FOUNDRY),
)


def run(options: Options) -> list[Case]:
    """List all figures."""
    cases = []
    for figure in FIGURES:
        tensor, pipeline = figure.parallel
        case = Case({"job": figure.job, "TP": tensor, "PP": pipeline}, notes=[figure.source])
        case.put("published", **{figure.quantity: figure.value})
        cases.append(case)
    return cases
