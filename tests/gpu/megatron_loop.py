"""Megatron's training loop with DDP, with the FSDP inside megatron-core and with this engine.

``compare`` runs a small model, this engine with more options too, several runs at once. ``speed`` runs a model with a
billion parameters, one run at a time.
"""

import math
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.verdict import Setup, Skipped, Verdict, judge
from tests.needs import MEGATRON, missing

ITERATIONS = 20
AT_ONCE = 9
# Iterations whose times do not count: memory is allocated, kernels are chosen.
WARM_UP = 4
# Largest relative difference of losses. bf16 has 8 bits, and kernels add in other orders.
TOLERANCE = 0.02
# Of the peak in bf16: what FP8 may take. Copies of all weights would take much more.
MEMORY_OF_FP8 = 1.1
TIME = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")
PEAK = re.compile(r"max allocated: ([\d.]+)")
FLOPS = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")

DDP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
OURS = """--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather
    --data-parallel-sharding-strategy optim_grads_params""".split()
UNFUSED = ["--no-gradient-accumulation-fusion"]
# Needed where neither Transformer Engine nor Apex is installed.
WITHOUT_ENGINE = ["--no-persist-layer-norm", "--no-masked-softmax-fusion"]
SAVED, RESUMED, TWO_RANKS = "this engine, saved", "this engine, resumed", "this engine, two ranks"
PRECISION_AWARE = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
ENGINE = ("transformer_engine",)
FP8 = ("delayed", "tensorwise", "blockwise")
# By name: the flags, and the packages that they need. Losses are compared with those of DDP in the same precision.
RUNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "DDP": ([*DDP, *UNFUSED], ()),
    "NVIDIA's": ([*OURS, *UNFUSED, "--fsdp-implementation", "megatron-core"], ("einops",)),
    "this engine": ([*OURS, *UNFUSED], ()),
    # With half of the batch for each.
    TWO_RANKS: ([*OURS, *UNFUSED], ()),
    "this engine, gradient fusion": (OURS, (*ENGINE, "fused_weight_gradient_mlp_cuda")),
    "this engine, precision-aware optimizer": ([*OURS, *UNFUSED, *PRECISION_AWARE], ENGINE),
    **{
        f"{name}, fp8 {recipe}": ([*flags, *UNFUSED, "--fp8-format", "hybrid", "--fp8-recipe", recipe], ENGINE)
        for recipe in FP8
        for name, flags in (("DDP", DDP), ("this engine", OURS))
    },
    # The second begins in the middle of the first, with its weights and its optimizer's state.
    SAVED: ([*OURS, *UNFUSED], ()),
    RESUMED: ([*OURS, *UNFUSED], ()),
}


def compare(setup: Setup) -> Verdict:
    """Losses and peak memory of every run; its losses have to equal DDP's.

    Raises:
        Skipped: Megatron's training loop is not installed.
    """
    _need_megatron()
    end = time.monotonic() + setup.seconds - 20
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        width, layers, length = (64, 2, 64) if setup.dry_run else (1024, 8, 1024)
        base = _arguments(Path(folder), _iterations(setup), width, layers, length)

        def measure(name: str) -> None:
            flags, needed = RUNS[name]
            if names := missing(needed):
                figures[name] = {"not run": f"{', '.join(names)} is not installed"}
            elif time.monotonic() > end - 30:
                figures[name] = {"not run": "no time was left"}
            else:
                more = _checkpoint(setup, Path(folder), name) if name in (SAVED, RESUMED) else ["--no-save-optim"]
                figures[name] = _run([*base, *flags, *more], end - time.monotonic(), 1 + (name == TWO_RANKS))
            print(name, figures[name], flush=True)

        # What is resumed has been saved before.
        with ThreadPoolExecutor(1 if setup.dry_run else AT_ONCE) as pool:
            list(pool.map(measure, (name for name in RUNS if name != RESUMED)))
        measure(RESUMED)
    return summary({name: figures[name] for name in RUNS})


def speed(setup: Setup) -> Verdict:
    """Time per iteration, TFLOP/s and peak memory of DDP, NVIDIA's and this engine, in turns.

    Raises:
        Skipped: Megatron's training loop is not installed.
    """
    _need_megatron()
    end = time.monotonic() + setup.seconds - 20
    names = [name for name in ("DDP", "NVIDIA's", "this engine") if not missing(RUNS[name][1])]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        width, layers, length = (64, 2, 64) if setup.dry_run else (2048, 16, 4096)
        base = _arguments(Path(folder), WARM_UP + 8, width, layers, length)
        longest = 0.0
        for name in (*names, *reversed(names)):
            start = time.monotonic()
            if start + longest > end:
                break
            turns[name].append(_run([*base, *RUNS[name][0], "--no-save-optim", "--log-throughput"], end - start))
            longest = max(longest, time.monotonic() - start)
            print(name, turns[name][-1], flush=True)
    problems = [f"{name}: {found['error']}" for name, all_of in turns.items() for found in all_of if "error" in found]
    figures = {name: [found for found in all_of if "error" not in found] for name, all_of in turns.items()}
    times = (
        f"{name} {min(found['milliseconds'] for found in all_of):.0f} ms, "
        f"{max(found['tflops'] for found in all_of):.0f} TFLOP/s, {all_of[0]['peak_mb']:.0f} MB"
        for name, all_of in figures.items()
        if all_of
    )
    return judge(problems, "; ".join(times), figures)


def _need_megatron() -> None:
    if names := missing((*MEGATRON, "rich")):
        raise Skipped(f"{', '.join(names)} is not installed")


def summary(figures: dict[str, Any]) -> Verdict:
    """The verdict on what the runs measured."""
    problems = [f"{name}: {found['error']}" for name, found in figures.items() if "error" in found]
    if not figures["DDP"].get("losses"):
        problems.append("there are no losses of DDP to compare with")
    for name, found in figures.items():
        reference = f"DDP, {name.partition(', ')[2]}" if "fp8" in name else "DDP"
        expected = figures[reference].get("losses", [])
        losses = found.get("losses", expected)
        if name == RESUMED and losses:
            losses = [*expected[: len(expected) - len(losses)], *losses]
        if len(losses) != len(expected):
            problems.append(f"{name}: {len(losses)} iterations; DDP has {len(expected)}")
        for number, (loss, other) in enumerate(zip(losses, expected, strict=False)):
            if not math.isclose(loss, other, rel_tol=TOLERANCE):
                problems.append(f"{name}: the loss of iteration {number + 1} is {loss}; DDP's is {other}")
                break
        peak, of_bf16 = found.get("peak_mb", math.nan), figures.get("this engine", {}).get("peak_mb", math.nan)
        if name.startswith("this engine, fp8") and peak > MEMORY_OF_FP8 * of_bf16:
            problems.append(f"{name}: the peak is {peak:.1f} MB; in bf16 it is {of_bf16:.1f} MB")
    ran = [name for name, found in figures.items() if "losses" in found]
    peaks = ", ".join(f"{name} {figures[name]['peak_mb']:.0f} MB" for name in ran)
    return judge(problems, f"{len(ran)} of {len(figures)} runs have DDP's losses ({peaks})", figures)


def _iterations(setup: Setup) -> int:
    return WARM_UP + 2 if setup.dry_run else ITERATIONS


def _checkpoint(setup: Setup, folder: Path, name: str) -> list[str]:
    half, where = _iterations(setup) // 2, folder / "checkpoint"
    if name == RESUMED:
        where.mkdir(exist_ok=True)
        (where / "latest_checkpointed_iteration.txt").write_text(str(half))
        return ["--load", str(where)]
    return ["--save", str(where), "--save-interval", str(half)]


def _run(arguments: list[str], seconds: float, ranks: int = 1) -> dict[str, Any]:
    from scripts.real_loop import RunFailure, run

    try:
        finished = run(arguments, ranks, timeout=seconds)
    except RunFailure as failure:
        return {"error": str(failure)[-2000:]}
    times = [float(value) for number, value in TIME.findall(finished.log) if int(number) > WARM_UP]
    return {
        "losses": [iteration.loss for iteration in finished.iterations],
        "milliseconds": statistics.median(times) if times else math.nan,
        "tflops": statistics.median([float(value) for value in FLOPS.findall(finished.log)[WARM_UP:]] or [math.nan]),
        "peak_mb": max((float(value) for value in PEAK.findall(finished.log)), default=math.nan),
    }


def _arguments(folder: Path, iterations: int, width: int, layers: int, length: int) -> list[str]:
    from scripts.parity import write_corpus

    has_engine = not missing(ENGINE)
    return f"""
        --num-layers {layers} --hidden-size {width} --ffn-hidden-size {4 * width} --bf16
        --num-attention-heads {max(8, width // 128)}
        --seq-length {length} --max-position-embeddings {length} --make-vocab-size-divisible-by 16
        --micro-batch-size 1 --global-batch-size 2 --train-iters {iterations} --lr 1e-4 --lr-decay-style constant
        --clip-grad 1.0 --weight-decay 0.1 --seed 1234 --log-interval 1 --eval-iters 1 --eval-interval 1000
        --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 255 --data-path {write_corpus(folder)}
        --attention-dropout 0 --hidden-dropout 0 --log-memory-interval 1
        --transformer-impl {"transformer_engine" if has_engine else "local"}
        {" ".join(WITHOUT_ENGINE) if missing(("apex",)) and not has_engine else ""}
    """.split()
