"""Trains random command lines of Megatron with its DDP and with our FSDP, and resumes FSDP in another topology.

    python scripts/random_lines.py --lines 100 --seed 1 --markdown out/lines.md

A line combines a model, a topology, an optimizer, options of the loop and of FSDP. It trains four iterations with DDP
and with FSDP. Then FSDP goes on from the checkpoint of the second iteration, its own or DDP's, with a different
strategy and often other tensor, pipeline, context and expert parallelism. Losses and gradient norms of all iterations
must agree. A line is

right; invalid, because DDP ends in an error as well; refused, by a row of docs/limits.md;
DIFFERS, in training or after the checkpoint;
ERROR, if FSDP alone ends in an error that no row says.

A line in one of the last two states is reduced to the fewest choices that show it. Exits with 1 if there is one.
"""

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.tools.compare_runs import relative  # noqa: E402
from scripts.parity import DDP, DDP_ENVIRONMENT, write_corpus  # noqa: E402
from scripts.parity_cases import MLA, STRATEGIES  # noqa: E402
from scripts.real_loop import Iteration, RunFailure, limits_in, reason, run  # noqa: E402

ALWAYS = (
    "--seq-length 48 --max-position-embeddings 48 --micro-batch-size 1 --train-iters 4 --lr 2e-3 --lr-warmup-iters 1 "
    "--lr-decay-style constant --seed 1234 --log-interval 1 --eval-iters 1 --split 90,10,0 --save-interval 2 "
    "--tokenizer-type NullTokenizer --attention-softmax-in-fp32 --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion"
)
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
GQA = "--group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type"
NO_AUX = "--moe-router-load-balancing-type none"
LATENT = re.sub(r" --(normalization \S+|swiglu|disable-bias-linear|position-embedding-type \S+)", "", MLA)

# What a line chooses from; the first one is the plainest, and frequent ones stand more than once.
MODEL: dict[str, Sequence[Any]] = {
    "layers": ["--num-layers 2", "--num-layers 2", "--num-layers 4"],
    "width": ["--hidden-size 64 --ffn-hidden-size 96", "--hidden-size 60 --ffn-hidden-size 172"],
    "vocabulary": [
        "--vocab-size 255 --make-vocab-size-divisible-by 1",
        "--vocab-size 249 --make-vocab-size-divisible-by 1",
        "--vocab-size 200 --make-vocab-size-divisible-by 64",
    ],
    "norm": ["", "--normalization RMSNorm"],
    "mlp": ["", "--swiglu", "--squared-relu", "--quick-geglu --glu-linear-offset 1.0", "--swiglu"],
    "bias": ["", "", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"],
    "attention": [
        "",
        GQA,
        "--qk-layernorm",
        f"{GQA} --qk-layernorm",
        LATENT,
        f"{LATENT} --qk-layernorm",
        f"{GQA} --attention-output-gate",
        "--softmax-type learnable",
        "--group-query-attention --num-query-groups 1",
    ],
    "position": ["", "--position-embedding-type rope", "--position-embedding-type none"],
    "embeddings": ["", "--untie-embeddings-and-output-weights"],
    "experts": [
        "",
        "",
        "",
        f"{EXPERTS} alltoall {NO_AUX}",
        f"{EXPERTS} allgather {NO_AUX}",
        f"{EXPERTS} alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
        f"{EXPERTS} alltoall {NO_AUX} --moe-shared-expert-intermediate-size 32",
        f"{EXPERTS} alltoall {NO_AUX} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
        f"{EXPERTS} alltoall {NO_AUX} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        f"{EXPERTS} alltoall {NO_AUX} --moe-layer-freq 2",
        f"{EXPERTS} alltoall {NO_AUX} --moe-ffn-hidden-size 40",
        f"{EXPERTS} alltoall {NO_AUX} --moe-grouped-gemm",
    ],
    "further tokens": ["", "", "", "", "--mtp-num-layers 1"],
    "residual": ["", "", "", "--fp32-residual-connection"],
}
LOOP: dict[str, Sequence[Any]] = {
    "optimizer": [
        "",
        "",
        "--adam-beta1 0.8 --adam-eps 1e-6 --min-lr 1e-4",
        "--decoupled-lr 1e-3",
    ],
    "decay": [
        "--weight-decay 0.1",
        "--weight-decay 0.0",
        "--start-weight-decay 0.02 --end-weight-decay 0.2 --weight-decay-incr-style linear",
    ],
    "clip": ["--clip-grad 1.0", "--clip-grad 1.0", "--clip-grad 0.1", "--clip-grad 0"],
    "dropout": ["--attention-dropout 0 --hidden-dropout 0"] * 3 + ["--attention-dropout 0.1 --hidden-dropout 0.1"],
    "batch": ["1", "2", "4"],
    "loss": ["", "", "--calculate-per-token-loss"],
    "recomputation": [
        "",
        "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity selective",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity selective --recompute-modules layernorm",
    ],
    "log": ["", "", "--log-params-norm --log-num-zeros-in-grad", "--log-params-norm"],
    "evaluation": ["--eval-interval 1000", "--eval-interval 1"],
    "precision": ["", "", "", "--bf16"],
}
TP, PP, CP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
SP, EP = "--sequence-parallel", "--expert-model-parallel-size 2"
PLACE: dict[str, Sequence[Any]] = {
    "ranks": [2, 2, 4, 4, 4],
    "parallel": [
        "",
        "",
        TP,
        f"{TP} {SP}",
        PP,
        f"{PP} --num-layers-per-virtual-pipeline-stage 1",
        CP,
        f"{TP} {PP}",
        f"{TP} {PP} {SP}",
        f"{TP} {CP} {SP}",
    ],
    "expert parallel": ["", EP],
}
SHARDED: dict[str, Sequence[Any]] = {
    "strategy": [*STRATEGIES, "optim_grads_params", "optim_grads_params"],
    "overlap": ["", "--overlap-grad-reduce --overlap-param-gather"],
    "instances": [
        "",
        "",
        "--num-distributed-optimizer-instances 2",
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    ],
    "double buffer": ["", "", "", "--fsdp-double-buffer"],
    "start": ["", "", "--init-model-with-meta-device"],
    "offload": ["", "", "", "--optimizer-cpu-offload --use-precision-aware-optimizer"],
    "dtypes": ["", "", "", "--megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype fp32"],
}
CHECKPOINT: dict[str, Sequence[Any]] = {"source": ["fsdp", "fsdp", "ddp"], "moved": [True, True, False]}
CHOICES: dict[str, Sequence[Any]] = {
    **MODEL,
    **LOOP,
    **PLACE,
    **SHARDED,
    **CHECKPOINT,
    **{f"then {name}": c for name, c in (PLACE | SHARDED).items()},
}
# Relative differences of losses and norms. Rounding to bf16 depends on the order of sums.
TOLERANCES = {"": (2e-5, 2e-4), "--bf16": (4e-3, 1e-1)}

# Megatron-Core saves wrong optimizer state if gradient buffers have padding between buckets, and resumes wrongly.
SAVED_WRONGLY = "the optimizer's main weights do not round to the model's weights"

Choice = dict[str, str | int | bool]


class Verdict(NamedTuple):
    """The state of a line, and the difference or the error."""

    state: str
    detail: str = ""


def made(number: int, seed: int) -> Choice:
    """A random line, always the same one for the same arguments."""
    random = Random(f"{seed} {number}")
    line: Choice = {name: random.choice(choices) for name, choices in CHOICES.items()}
    # What Megatron requires.
    if line["experts"]:
        line["bias"] = "--disable-bias-linear"
    if line["further tokens"] and PP in str(line["parallel"]):
        line["embeddings"] = "--untie-embeddings-and-output-weights"  # DDP cannot save tied ones
    if not line["precision"]:
        line["residual"] = ""
    if "rope" in str(line["position"]) and line["width"] == MODEL["width"][1]:
        line["position"] = ""  # heads of 15 elements
    if line["further tokens"] and not line["position"]:
        line["position"] = "--position-embedding-type none"
    for then in ("", "then "):
        parallel = str(line[f"{then}parallel"])
        if line["experts"] and PP in parallel and line[f"{then}expert parallel"]:
            line[f"{then}ranks"] = 4
        divisors = [parallel.count("parallel-size 2"), (PP in parallel) + (line[f"{then}expert parallel"] == EP)]
        instances = [(4 if divisors[0] == 2 else int(line[f"{then}ranks"])) // 2**n for n in divisors]
        if any(number % 2 for number in instances[: 2 if line["experts"] else 1]):
            line[f"{then}instances"] = ""
        if line[f"{then}strategy"] == "no_shard":
            line[f"{then}start"] = line[f"{then}instances"] = ""
    return line


def arguments(line: Choice, then: str = "") -> tuple[list[str], int]:
    """The arguments of a line that DDP and FSDP share, and the number of ranks.

    Args:
        line: The line.
        then: "then " for the topology after the checkpoint.
    """
    experts = bool(line["experts"])
    ranks, parallel, split = line[f"{then}ranks"], str(line[f"{then}parallel"]), line[f"{then}expert parallel"]
    if experts and TP in parallel:
        # Over gloo, the alltoall dispatcher needs experts that are not tensor-parallel.
        parallel = f"{parallel.replace(SP, '')} {SP} --expert-tensor-parallel-size 1"
    if parallel.count("parallel-size 2") == 2:
        ranks = 4
    words = [
        *(str(line[name]) for name in (*MODEL, *LOOP) if name != "batch"),
        parallel,
        str(split) if experts else "",
        f"--num-attention-heads 4 --global-batch-size {4 * int(line['batch'])}",
    ]
    return f"{ALWAYS} {' '.join(words)}".split(), int(ranks)


def of_fsdp(line: Choice, then: str = "") -> list[str]:
    """The arguments of FSDP alone."""
    names = [name for name in SHARDED if name != "strategy"]
    return f"{FSDP} {line[f'{then}strategy']} {' '.join(str(line[then + name]) for name in names)}".split()


def train(line: Choice, corpus: Path, folder: Path) -> Verdict:
    """Train a line with DDP and with FSDP, and go on with FSDP."""
    shared, ranks = arguments(line)
    shared += ["--data-path", str(corpus)]
    ddp = [*DDP, "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    try:
        want = run([*shared, *ddp, "--save", f"{folder}/ddp"], ranks, 120, DDP_ENVIRONMENT).iterations
    except RunFailure as failure:
        return Verdict("invalid", reason(str(failure)))
    try:
        got = run([*shared, *of_fsdp(line), "--save", f"{folder}/fsdp"], ranks, 120).iterations
    except RunFailure as failure:
        return _failed("training", failure)
    if text := _difference(want, got, line):
        return Verdict("DIFFERS", f"training: {text}")
    # Dropout and the auxiliary loss depend on the topology.
    moved = line["moved"] and "0.1" not in str(line["dropout"]) and "aux_loss" not in str(line["experts"])
    shared, ranks = arguments(line, "then " if moved else "")
    shared += ["--data-path", str(corpus), "--ckpt-step", "2", "--load"]
    try:
        then = of_fsdp(line, "then " if moved else "")
        got = run([*shared, f"{folder}/{line['source']}", *then], ranks, 120).iterations
    except RunFailure as failure:
        return _failed("resuming", failure)
    text = _difference(want[2:], got, line)
    if text and moved:
        # A padded row of the vocabulary counts in the loss: DDP says what the same weights give in this topology.
        with contextlib.suppress(RunFailure):
            want = run([*shared, f"{folder}/ddp", *ddp, "--no-load-optim"], ranks, 120, DDP_ENVIRONMENT).iterations
            if relative(want[0].loss, got[0].loss) <= TOLERANCES[str(line["precision"])][0]:
                return Verdict("right", "after the checkpoint, the loss is that of DDP's own checkpoint")
    return Verdict("DIFFERS", f"resuming: {text}") if text else Verdict("right")


def _failed(where: str, failure: RunFailure) -> Verdict:
    text = str(failure)
    return Verdict("refused" if SAVED_WRONGLY in text or limits_in(text) else "ERROR", f"{where}: {reason(text)}")


def _difference(want: list[Iteration], got: list[Iteration], line: Choice) -> str:
    """The first number that differs by more than rounding; empty if none does."""
    if len(want) != len(got):
        return f"{len(got)} iterations instead of {len(want)}"
    of_losses, of_norms = TOLERANCES[str(line["precision"])]
    has_norm = line["clip"] != "--clip-grad 0"
    for number, (a, b) in enumerate(zip(want, got, strict=True), 5 - len(want)):
        pairs = {"loss": (a.loss, b.loss), "params_norm": (a.params_norm, b.params_norm)}
        pairs |= {"grad_norm": (a.grad_norm, b.grad_norm)} if has_norm else {}
        for name, (x, y) in pairs.items():
            if not relative(x, y) <= (of_norms if name == "grad_norm" else of_losses):
                return f"iteration {number}: {name} {y:.8g} instead of {x:.8g}"
    return ""


def reduced(line: Choice, verdict: Verdict, corpus: Path, seconds: float) -> Choice:
    """The line with as many plain choices as still show the same state at the same place."""
    end = time.monotonic() + seconds
    place = verdict.detail.split(":")[0]
    for name, choices in CHOICES.items():
        if line[name] == choices[0] or time.monotonic() > end:
            continue
        plainer = line | {name: choices[0]}
        with tempfile.TemporaryDirectory() as folder:
            found = train(plainer, corpus, Path(folder))
        if found.state == verdict.state and found.detail.split(":")[0] == place:
            line = plainer
    return line


def described(line: Choice) -> str:
    """The choices that are not the plainest."""
    return "; ".join(f"{name}: {line[name]}" for name, choices in CHOICES.items() if line[name] != choices[0])


def main() -> int:
    """Try lines, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first line")
    parser.add_argument("--seconds", type=float, default=3600, help="start no more lines after this time")
    parser.add_argument("--reduce", type=float, default=300, help="seconds to reduce a defect; 0: do not")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    found: list[tuple[int, Choice, Verdict]] = []
    with tempfile.TemporaryDirectory() as place:
        corpus = write_corpus(Path(place))
        for number in range(options.first, options.first + options.lines):
            if time.monotonic() > end:
                break
            line = made(number, options.seed)
            with tempfile.TemporaryDirectory() as folder:
                verdict = train(line, corpus, Path(folder))
            print(f"{number} {verdict.state} {verdict.detail}", flush=True)
            if verdict.state in ("DIFFERS", "ERROR") and options.reduce:
                line = reduced(line, verdict, corpus, options.reduce)
                print(f"    {described(line)}", flush=True)
            found.append((number, line, verdict))
    counts = Counter(verdict.state for _, _, verdict in found)
    text = f"{len(found)} lines of seed {options.seed}: " + ", ".join(f"{n} {s}" for s, n in counts.most_common())
    print(text)
    if options.markdown:
        rows = [f"| {n} | {v.state} | {v.detail} | {described(line)} |".replace("\n", " ") for n, line, v in found]
        options.markdown.parent.mkdir(exist_ok=True)
        options.markdown.write_text("\n".join([text, "", "| | state | | choices |", "|--:|---|---|---|", *rows, ""]))
    return int(any(verdict.state in ("DIFFERS", "ERROR") for _, _, verdict in found))


if __name__ == "__main__":
    sys.exit(main())
