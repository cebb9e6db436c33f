"""Trains the same GPT with Megatron's DDP and with our FSDP in Megatron's training loop, and compares every iteration.

    python tools/parity.py [--ranks 2 3 4] [--micro-batches 1 4] [--iterations 20] [--original]

* fp32: loss and gradient norm of every iteration must agree to six significant digits.
* bf16 (compute; main weights are fp32): DDP is run with several orders of addition. On average, our losses must be as
  close to one of these runs as the runs are to each other.
* bf16-unclipped: like bf16, but without clipping. The gradient norm, whose terms we add in a different order, then has
  no effect. If DDP's runs are bit-identical, ours must be, too.

Exits with 1 if a run does not agree.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.tools.compare_runs import relative  # noqa: E402
from tools.real_loop import Run, RunFailure, run  # noqa: E402

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DIGITS = 6
SAME_DIGITS = 0.5 * 10.0**-DIGITS

DDP = ["--use-distributed-optimizer"]
# The same sums in a different order: with smaller buckets, dividing after the sum instead of before it, and reducing
# whole gradients instead of shards.
DDP_ORDERS: tuple[list[str], ...] = (
    [*DDP, "--ddp-bucket-size", "20000", "--overlap-grad-reduce"],
    [*DDP, "--ddp-average-in-collective"],
    [],
)
# The norm at which gradients are clipped: in every step, or in none.
CLIP = {"fp32": "1.0", "bf16": "1.0", "bf16-unclipped": "1000.0"}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        ranks: Data-parallel ranks.
        micro_batches: Micro-batches per step and rank.
        kind: A key of ``CLIP``.
    """

    ranks: int
    micro_batches: int
    kind: str


@dataclass(frozen=True)
class Difference:
    """Relative differences of two runs.

    Attributes:
        loss: Largest difference of an iteration's loss.
        grad_norm: Largest difference of an iteration's gradient norm.
        mean_loss: Mean difference of the iterations' losses.
        params_norm: Largest difference of an iteration's norm of weights.
        zeros: Largest difference of an iteration's number of zeros in gradients.
    """

    loss: float
    grad_norm: float
    mean_loss: float
    params_norm: float = 0.0
    zeros: float = 0.0

    @staticmethod
    def between(a: Run, b: Run) -> "Difference":
        """Compare two runs, iteration by iteration."""
        pairs = list(zip(a.iterations, b.iterations, strict=True))
        if not pairs:
            raise ValueError("nothing to compare: no iteration was trained")
        losses = [relative(x.loss, y.loss) for x, y in pairs]
        rest = [max(relative(getattr(x, n), getattr(y, n)) for x, y in pairs) for n in ("params_norm", "zeros")]
        norms = [relative(x.grad_norm, y.grad_norm) for x, y in pairs]
        return Difference(max(losses), max(norms), statistics.fmean(losses), *rest)


def write_corpus(folder: Path) -> Path:
    """Write part of Python's standard library as bytes in Megatron's indexed format; return the path's prefix."""
    from megatron.fsdp.mcore import cpu

    cpu.enable()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "bytes"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    for source in sources:
        builder.add_document(torch.tensor(list(source.read_bytes())), [source.stat().st_size])
    builder.finalize(f"{prefix}.idx")
    return prefix


def model_arguments(case: Case, corpus: Path, iterations: int) -> list[str]:
    """Return Megatron's arguments for a small GPT whose sizes are not multiples of the number of ranks."""
    batch = 1 * case.ranks * case.micro_batches
    text = f"""
        --num-layers 3 --hidden-size 60 --ffn-hidden-size 172 --num-attention-heads 4 --seq-length 48
        --max-position-embeddings 48 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size {batch}
        --train-iters {iterations} --lr 2e-3 --lr-warmup-iters 2 --lr-decay-style constant --clip-grad {CLIP[case.kind]}
        --weight-decay 0.1 --seed 1234 --log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,10,0
        --tokenizer-type NullTokenizer --vocab-size 256 --data-path {corpus} --no-save-optim
    """
    return [*text.split(), *(["--bf16"] if case.kind.startswith("bf16") else [])]


def fsdp_arguments(strategy: str) -> list[str]:
    """Return Megatron's arguments for our FSDP."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather"
    return [*flags.split(), "--data-parallel-sharding-strategy", strategy]


def original_arguments(strategy: str) -> list[str]:
    """Return Megatron's arguments for the FSDP inside Megatron-Core, which over gloo can only sum gradients."""
    return [*fsdp_arguments(strategy), "--fsdp-implementation", "megatron-core", "--calculate-per-token-loss"]


class Comparison:
    """Runs cases and collects the results in a table.

    Args:
        corpus: Prefix of the indexed dataset.
        iterations: Training steps of each run.
        report: Called with a line about what is running.
    """

    def __init__(self, corpus: Path, iterations: int, report: Callable[[str], None]) -> None:
        self._corpus = corpus
        self._iterations = iterations
        self._report = report
        self.failed = 0
        self.table = Table(
            "kind", "ranks", "micro-\nbatches", "run", "loss,\nmean", "loss,\nlargest", "norm,\nlargest", "result"
        )
        for column in self.table.columns[4:7]:
            column.justify = "right"

    def _run(self, case: Case, name: str, flags: list[str]) -> Run:
        self._report(f"{case.kind}, {case.ranks} ranks, {case.micro_batches} micro-batches: {name}")
        return run([*model_arguments(case, self._corpus, self._iterations), *flags], case.ranks)

    def compare(self, case: Case, strategies: tuple[str, ...], original: bool) -> None:
        """Compare every strategy with DDP. For bf16, first compare runs of DDP to find the allowed difference."""
        references = [self._run(case, "DDP", DDP)]
        allowed = SAME_DIGITS
        if case.kind != "fp32":
            references += [self._run(case, "DDP in another order", order) for order in DDP_ORDERS]
            own = [Difference.between(a, b) for a, b in itertools.combinations(references, 2)]
            allowed = max(difference.mean_loss for difference in own)
            worst = Difference(max(d.loss for d in own), max(d.grad_norm for d in own), allowed)
            self._row(case, "DDP in other orders", worst, "allowed")
        for strategy in strategies:
            ours = self._run(case, strategy, fsdp_arguments(strategy))
            nearest = min((Difference.between(reference, ours) for reference in references), key=lambda d: d.mean_loss)
            measured = max(nearest.loss, nearest.grad_norm) if case.kind == "fp32" else nearest.mean_loss
            self._judge(case, strategy, nearest, measured <= allowed)
        if original and case.kind == "fp32":
            per_token = self._run(case, "DDP per token", [*DDP, "--calculate-per-token-loss"])
            for strategy in strategies:
                self._compare_original(case, strategy, per_token)

    def _compare_original(self, case: Case, strategy: str, reference: Run) -> None:
        name = f"megatron-core's FSDP, {strategy}"
        try:
            difference = Difference.between(reference, self._run(case, name, original_arguments(strategy)))
        except RunFailure as failure:
            self._row(case, name, None, f"did not finish: {str(failure).splitlines()[0]}")
            return
        self._row(case, name, difference, "for comparison")

    def _judge(self, case: Case, name: str, difference: Difference, good: bool) -> None:
        self.failed += not good
        self._row(case, name, difference, "[green]equal[/]" if good else "[bold red]DIFFERS[/]")

    def _row(self, case: Case, name: str, difference: Difference | None, result: str) -> None:
        numbers = None if difference is None else (difference.mean_loss, difference.loss, difference.grad_norm)
        shown = ("-", "-", "-") if numbers is None else tuple(_show(number) for number in numbers)
        self.table.add_row(case.kind, str(case.ranks), str(case.micro_batches), name, *shown, result)


def _show(difference: float) -> str:
    return "0" if difference == 0.0 else f"{difference:.1e}"


def main() -> int:
    """Run all cases, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="per step and rank")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=tuple(CLIP), default=list(CLIP))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--original", action="store_true", help="also run the FSDP inside Megatron-Core, in fp32")
    options = parser.parse_args()
    console = Console(width=max(Console().width, 112))
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        comparison = Comparison(write_corpus(Path(folder)), options.iterations, status.update)
        for ranks in options.ranks:
            for micro_batches in options.micro_batches:
                for kind in options.kinds:
                    comparison.compare(Case(ranks, micro_batches, kind), tuple(options.strategies), options.original)
    console.print(
        f"Relative differences to Megatron's DDP over {options.iterations} iterations. fp32: {DIGITS} significant "
        f"digits are {SAME_DIGITS:.0e}, of every iteration.\nbf16: to the nearest of {len(DDP_ORDERS) + 1} orders of "
        "addition in DDP; the mean may be at most as large as among these orders (allowed)."
    )
    console.print(comparison.table)
    console.print("all equal" if not comparison.failed else f"{comparison.failed} runs differ")
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
