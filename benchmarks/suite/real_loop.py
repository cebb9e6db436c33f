"""Tokens per second in Megatron's training loop (pretrain_gpt.py) with this engine, that of megatron-core, and DDP."""

import re
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import agreement
from benchmarks.options import Options, Skipped
from benchmarks.quiet import LIMIT, Quiet
from benchmarks.results import Case
from benchmarks.rounds import Sample, measure
from benchmarks.workers import WorkerFailure

RANKS = 2
SEQUENCE = 256
# The first iterations allocate memory and record the plan.
WARM_UP = 4
ITERATIONS = 16
ROUNDS = 5
DDP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3200000".split()
STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
TIME = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")


def fsdp_flags(zero: int, original: bool) -> list[str]:
    """Megatron's flags for FSDP with a ZeRO stage, by this project or by megatron-core."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather".split()
    flags += ["--data-parallel-sharding-strategy", STRATEGIES[zero]]
    # Over gloo, NVIDIA's engine can sum gradients but not average them.
    return [*flags, "--fsdp-implementation", "megatron-core", "--calculate-per-token-loss"] if original else flags


PEERS = {
    "megatron-ddp": DDP,
    **{f"ours-{zero}": fsdp_flags(zero, original=False) for zero in STRATEGIES},
    **{f"original-{zero}": fsdp_flags(zero, original=True) for zero in STRATEGIES},
}
QUICK = ("megatron-ddp", "ours-1", "ours-3")


@dataclass
class LoopTurns:
    """Turns that each run the whole loop."""

    arguments: list[str]
    iterations: int
    losses: list[float]

    def turn(self) -> Sample:
        """Tokens per second and milliseconds per iteration.

        Raises:
            WorkerFailure: The run failed.
        """
        from scripts.real_loop import RunFailure, run

        try:
            finished = run(self.arguments, RANKS, timeout=240.0)
        except RunFailure as failure:
            raise WorkerFailure(str(failure)) from failure
        self.losses = [iteration.loss for iteration in finished.iterations]
        milliseconds = times(finished.log)
        if not milliseconds:
            raise WorkerFailure("the log of the run does not contain times of iterations")
        median = statistics.median(milliseconds)
        return {"iteration": median, "tokens_per_second": 1e3 * RANKS * SEQUENCE / median}

    def restart(self) -> None:
        """Do nothing, because every turn starts new processes."""


def times(log: str) -> list[float]:
    """Milliseconds of each iteration after the warm-up, from Megatron's log."""
    return [float(ms) for number, ms in TIME.findall(log) if int(number) > WARM_UP]


def run(options: Options) -> list[Case]:
    """Run the loop with each peer, in rounds.

    Raises:
        Skipped: Megatron's training loop is not installed.
        LossesDisagree: The losses of two peers differ.
    """
    try:
        from scripts.parity import write_corpus
    except ImportError as error:
        raise Skipped(f"needs megatron-core[training]: {error}") from error
    iterations = WARM_UP + 4 if options.quick else ITERATIONS
    names = [n for n in (QUICK if options.quick else PEERS) if not options.only_peers or n in options.only_peers]
    with tempfile.TemporaryDirectory() as folder:
        base = _arguments(write_corpus(Path(folder)), iterations, options.quick)
        contestants = {name: LoopTurns([*base, *PEERS[name]], iterations, []) for name in names}
        rounds = measure(
            dict(contestants),
            options.number_of_rounds(ROUNDS),
            Quiet(_cpu_seconds_of_children),
            options.report,
            float("inf") if options.quick else LIMIT,
        )
    case = Case({"ranks": RANKS, "dtype": "fp32", "tokens": SEQUENCE})
    case.put_rounds(rounds)
    losses = {name: contestant.losses for name, contestant in contestants.items() if contestant.losses}
    case.notes.append(f"losses agree within {agreement.check(losses, 'fp32'):.1e}")
    return [case]


def _arguments(corpus: Path, iterations: int, quick: bool) -> list[str]:
    width, layers = (64, 2) if quick else (512, 8)
    return f"""
        --num-layers {layers} --hidden-size {width} --ffn-hidden-size {4 * width} --num-attention-heads 8
        --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --make-vocab-size-divisible-by 1
        --micro-batch-size 1 --global-batch-size {RANKS} --train-iters {iterations} --lr 1e-3
        --lr-decay-style constant --clip-grad 0.0 --weight-decay 0.1 --seed 1234 --log-interval 1 --eval-iters 1
        --eval-interval 1000 --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 256 --data-path {corpus}
        --no-save-optim --attention-dropout 0 --hidden-dropout 0
    """.split()


def _cpu_seconds_of_children() -> float:
    """CPU seconds of all descendants of this process. Ended ones are included in the times of their parents."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            own = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += own.user + own.system + own.children_user + own.children_system
    return total
