"""Megatron's training loop with DDP, with the FSDP inside megatron-core and with ours; then ours with more options."""

import math
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.verdict import Setup, Skipped, Verdict, judge
from tests.needs import MEGATRON, missing

ITERATIONS = 20
# Iterations whose times do not count: memory is allocated, kernels are chosen.
WARM_UP = 4
# Largest relative difference of losses. bf16 has 8 bits, and kernels add in other orders.
TOLERANCE = 0.02
TOLERANCE_OF_FP8 = 0.05
# Of the peak in bf16: what FP8 may take. Copies of all weights would take much more.
MEMORY_OF_FP8 = 1.1
TIME = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")
PEAK = re.compile(r"max allocated: ([\d.]+)")

DDP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
OURS = """--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather
    --data-parallel-sharding-strategy optim_grads_params""".split()
UNFUSED = ["--no-gradient-accumulation-fusion"]
# Needed where neither Transformer Engine nor Apex is installed.
WITHOUT_ENGINE = ["--no-persist-layer-norm", "--no-masked-softmax-fusion"]
SAVED, RESUMED = "ours, saved", "ours, resumed"
PRECISION_AWARE = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
# By name: the flags, and whether they need Transformer Engine. Losses are compared with those of the first.
RUNS: dict[str, tuple[list[str], bool]] = {
    "DDP": ([*DDP, *UNFUSED], False),
    "the original": ([*OURS, *UNFUSED, "--fsdp-implementation", "megatron-core"], False),
    "ours": ([*OURS, *UNFUSED], False),
    "ours, gradient fusion": (OURS, True),
    "ours, precision-aware optimizer": ([*OURS, *UNFUSED, *PRECISION_AWARE], True),
    **{
        f"ours, fp8 {recipe}": ([*OURS, *UNFUSED, "--fp8-format", "hybrid", "--fp8-recipe", recipe], True)
        for recipe in ("delayed", "tensorwise", "blockwise")
    },
    # The second begins in the middle of the first, with its weights and its optimizer's state.
    SAVED: ([*OURS, *UNFUSED], False),
    RESUMED: ([*OURS, *UNFUSED], False),
}


def compare(setup: Setup) -> Verdict:
    """Losses, peak memory and time per iteration of every run; its losses have to equal DDP's.

    Raises:
        Skipped: Megatron's training loop is not installed.
    """
    if names := missing((*MEGATRON, "rich")):
        raise Skipped(f"{', '.join(names)} is not installed")
    has_engine = not missing(("transformer_engine",))
    end = time.monotonic() + setup.seconds - 20
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = _arguments(setup, Path(folder), has_engine)
        for name, (flags, needs_engine) in RUNS.items():
            if needs_engine and not has_engine:
                figures[name] = {"not run": "Transformer Engine is not installed"}
            elif time.monotonic() > end - 30:
                figures[name] = {"not run": "no time was left"}
            else:
                more = _checkpoint(setup, Path(folder), name) if name in (SAVED, RESUMED) else ["--no-save-optim"]
                figures[name] = _run([*base, *flags, *more], end - time.monotonic())
                print(name, figures[name], flush=True)
    return summary(figures)


def summary(figures: dict[str, Any]) -> Verdict:
    """The verdict on what the runs measured."""
    problems = [f"{name}: {found['error']}" for name, found in figures.items() if "error" in found]
    expected = figures["DDP"].get("losses", [])
    if not expected:
        problems.append("there are no losses of DDP to compare with")
    for name, found in figures.items():
        tolerance = TOLERANCE_OF_FP8 if "fp8" in name else TOLERANCE
        losses = found.get("losses", expected)
        if name == RESUMED and losses:
            losses = [*expected[: len(expected) - len(losses)], *losses]
        if len(losses) != len(expected):
            problems.append(f"{name}: {len(losses)} iterations; DDP has {len(expected)}")
        for number, (loss, other) in enumerate(zip(losses, expected, strict=False)):
            if not math.isclose(loss, other, rel_tol=tolerance):
                problems.append(f"{name}: the loss of iteration {number + 1} is {loss}; DDP's is {other}")
                break
        peak, of_bf16 = found.get("peak_mb", math.nan), figures.get("ours", {}).get("peak_mb", math.nan)
        if "fp8" in name and peak > MEMORY_OF_FP8 * of_bf16:
            problems.append(f"{name}: the peak is {peak:.1f} MB; in bf16 it is {of_bf16:.1f} MB")
    ran = [name for name, found in figures.items() if "losses" in found]
    times = ", ".join(f"{name} {figures[name]['milliseconds']:.0f} ms" for name in ran)
    return judge(problems, f"{len(ran)} of {len(figures)} runs have DDP's losses ({times})", figures)


def _iterations(setup: Setup) -> int:
    return WARM_UP + 2 if setup.dry_run else ITERATIONS


def _checkpoint(setup: Setup, folder: Path, name: str) -> list[str]:
    half, where = _iterations(setup) // 2, folder / "checkpoint"
    if name == RESUMED:
        where.mkdir(exist_ok=True)
        (where / "latest_checkpointed_iteration.txt").write_text(str(half))
        return ["--load", str(where)]
    return ["--save", str(where), "--save-interval", str(half)]


def _run(arguments: list[str], seconds: float) -> dict[str, Any]:
    from scripts.real_loop import RunFailure, run

    try:
        finished = run(arguments, 1, timeout=seconds)
    except RunFailure as failure:
        return {"error": str(failure)[-2000:]}
    times = [float(value) for number, value in TIME.findall(finished.log) if int(number) > WARM_UP]
    return {
        "losses": [iteration.loss for iteration in finished.iterations],
        "milliseconds": statistics.median(times) if times else math.nan,
        "peak_mb": max((float(value) for value in PEAK.findall(finished.log)), default=math.nan),
    }


def _arguments(setup: Setup, folder: Path, has_engine: bool) -> list[str]:
    from scripts.parity import write_corpus

    width, layers, length = (64, 2, 64) if setup.dry_run else (1024, 8, 1024)
    iterations = _iterations(setup)
    return f"""
        --num-layers {layers} --hidden-size {width} --ffn-hidden-size {4 * width} --num-attention-heads 8 --bf16
        --seq-length {length} --max-position-embeddings {length} --make-vocab-size-divisible-by 16
        --micro-batch-size 1 --global-batch-size 2 --train-iters {iterations} --lr 1e-4 --lr-decay-style constant
        --clip-grad 1.0 --weight-decay 0.1 --seed 1234 --log-interval 1 --eval-iters 1 --eval-interval 1000
        --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 255 --data-path {write_corpus(folder)}
        --attention-dropout 0 --hidden-dropout 0 --log-memory-interval 1
        --transformer-impl {"transformer_engine" if has_engine else "local"}
        {" ".join(WITHOUT_ENGINE) if missing(("apex",)) and not has_engine else ""}
    """.split()
