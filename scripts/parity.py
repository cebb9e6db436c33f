"""Trains with Megatron's DDP and with our FSDP in the same topology in Megatron's training loop, and compares them.

    python scripts/parity.py [--only TEXT ...] [--strategies ...] [--iterations 10] [--markdown FILE]

The cases (scripts/parity_cases.py) cover data, tensor, pipeline, context and expert parallelism, hybrid sharding, kinds
of models, and options of the loop. The loss and gradient norm of every iteration must agree to six significant digits.
This holds for bf16 as well if gradients are not clipped and a sum over two ranks does not depend on the order. Where it
does, DDP is run with several orders of addition: on average, our losses must be as close to one of these runs as the
runs are to each other. If DDP's runs are bit-identical, ours must be, too. Exits with 1 if a run does not agree.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.fsdp.tools.compare_runs import relative  # noqa: E402
from scripts.parity_cases import CASES, STRATEGIES, Case  # noqa: E402
from scripts.real_loop import Run, RunFailure, reason, run  # noqa: E402

DDP = ["--use-distributed-optimizer"]
# Megatron requires it for tensor and context parallelism with DDP, and forbids it with FSDP.
DDP_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# The largest difference of numbers that agree to six significant digits.
SIX_DIGITS = 1e-6
# For counts of thousands of zeros: an almost-zero sum may be exactly zero in one order of addition and not in another.
FEW = 1e-3


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


def fsdp_arguments(strategy: str) -> list[str]:
    """Return Megatron's arguments for our FSDP."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather"
    return [*flags.split(), "--data-parallel-sharding-strategy", strategy]


def original_arguments(strategy: str) -> list[str]:
    """Return Megatron's arguments for the FSDP inside Megatron-Core, which over gloo can only sum gradients."""
    return [*fsdp_arguments(strategy), "--fsdp-implementation", "megatron-core", "--calculate-per-token-loss"]


@dataclass
class Result:
    """The result of one strategy of a case.

    Attributes:
        case: The case.
        strategy: Sharding strategy of FSDP.
        difference: Difference to DDP, or to the nearest of its runs; None if a run failed.
        allowed: Mean difference of losses that DDP's own runs have; None if there is only one.
        failure: The error of the run that failed.
    """

    case: Case
    strategy: str
    difference: Difference | None = None
    allowed: float | None = None
    failure: str = ""

    @property
    def good(self) -> bool:
        """Whether loss, gradient norm, and the other numbers that the case logs agree."""
        found = self.difference
        if found is None:
            return False
        if self.allowed is not None:
            return found.mean_loss <= self.allowed
        norm = found.grad_norm if self.case.has_norm else 0.0
        return max(found.loss, norm, found.params_norm) <= SIX_DIGITS and found.zeros <= FEW

    @property
    def text(self) -> str:
        """The result in one line."""
        if self.difference is None:
            return f"failed: {self.failure}"
        logged = {"norm of weights": self.difference.params_norm, "zeros": self.difference.zeros}
        rest = "".join(f", {name} {value:.0e}" for name, value in logged.items() if value)
        if self.allowed is not None:
            rest += f", mean loss {self.difference.mean_loss:.1e} (DDP's own: {self.allowed:.1e})"
        return f"loss {self.difference.loss:.1e}, norm {self.norm}{rest}"

    @property
    def norm(self) -> str:
        """The difference of the gradient norm; a dash if there is none."""
        return f"{self.difference.grad_norm:.0e}" if self.difference is not None and self.case.has_norm else "-"


def model_arguments(case: Case, corpus: Path, iterations: int) -> list[str]:
    """Return Megatron's arguments for the case's model and data."""
    text = f"""
        --num-layers {case.layers} --hidden-size 60 --ffn-hidden-size 172 --num-attention-heads 4 --seq-length 48
        --max-position-embeddings 48 --make-vocab-size-divisible-by 1 --micro-batch-size 1
        --global-batch-size {case.batch} --train-iters {iterations} --lr 2e-3 --lr-warmup-iters 2
        --lr-decay-style constant --clip-grad 1.0
        --weight-decay 0.1 --seed 1234 --log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,10,0
        --tokenizer-type NullTokenizer --vocab-size 256 --data-path {corpus} --no-save-optim
        --attention-dropout 0 --hidden-dropout 0
    """
    return [*text.split(), *case.arguments.split(), *(["--bf16"] if case.bf16 else [])]


def train(case: Case, corpus: Path, iterations: int, flags: list[str]) -> Run:
    """Train with our FSDP if the flags select it, else with DDP."""
    environment = {} if "--use-megatron-fsdp" in flags else DDP_ENVIRONMENT
    return run([*model_arguments(case, corpus, iterations), *flags], case.ranks, environment=environment)


def compare(case: Case, corpus: Path, iterations: int, strategies: tuple[str, ...]) -> Iterator[Result]:
    """Train a case with DDP and with each strategy."""
    orders = [DDP, *(order.split() for order in case.orders)]
    try:
        references = [train(case, corpus, iterations, order) for order in orders]
    except RunFailure as failure:
        yield from (Result(case, s, failure=f"DDP: {reason(str(failure))}") for s in strategies)
        return
    own = [Difference.between(a, b).mean_loss for a, b in itertools.combinations(references, 2)]
    for strategy in strategies:
        flags = [word for word in fsdp_arguments(strategy) if case.overlaps or not word.startswith("--overlap")]
        try:
            ours = train(case, corpus, iterations, [*flags, *case.only_fsdp.split()])
        except RunFailure as failure:
            yield Result(case, strategy, failure=reason(str(failure)))
            continue
        differences = [Difference.between(reference, ours) for reference in references]
        nearest = min(differences, key=lambda difference: difference.mean_loss)
        yield Result(case, strategy, nearest, max(own, default=None))


def as_markdown(results: list[Result], iterations: int) -> str:
    """Return the results as a page's tables."""
    lines = [f"Over {iterations} iterations.", ""]
    for kind in dict.fromkeys(result.case.kind for result in results):
        lines += [
            f"### {kind.capitalize()}",
            "",
            "| | ranks | arguments | strategy | loss | gradient norm | |",
            "|---|---:|---|---|---:|---:|---|",
        ]
        for result in (r for r in results if r.case.kind == kind):
            case, found = result.case, result.difference
            numbers = ("-", "-") if found is None else (f"{found.loss:.0e}", result.norm)
            arguments = " ".join(filter(None, [case.arguments, case.only_fsdp])).replace("|", "\\|")
            verdict = "equal" if result.good else "**differs**" if found else f"**failed**: {result.failure}"
            cells = (case.name, case.ranks, f"`{arguments or '-'}`", f"`{result.strategy}`", *numbers, verdict)
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run the cases, print a table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose kind or name contains one of these texts")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--markdown", type=Path, help="replace the table between the markers of this page")
    options = parser.parse_args()
    console = Console(width=max(Console().width, 130))
    chosen = [c for c in CASES if not options.only or any(text in f"{c.kind}: {c.name}" for text in options.only)]
    results: list[Result] = []
    table = Table("kind", "case", "ranks", "strategy", "largest relative difference", "result")
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        corpus = write_corpus(Path(folder))
        for case in chosen:
            status.update(f"{case.kind}: {case.name}")
            strategies = tuple(s for s in case.strategies if s in options.strategies)
            for result in compare(case, corpus, options.iterations, strategies):
                results.append(result)
                verdict = "[green]equal[/]" if result.good else "[bold red]DIFFERS[/]"
                table.add_row(case.kind, case.name, str(case.ranks), result.strategy, escape(result.text), verdict)
                console.log(f"{case.name}, {result.strategy}: {result.text}", markup=False)
    console.print(table)
    failed = sum(not result.good for result in results)
    console.print("all equal" if not failed else f"{failed} of {len(results)} differ")
    if options.markdown:
        before, _, rest = options.markdown.read_text().partition("<!-- results -->\n")
        _, _, after = rest.partition("<!-- end -->")
        page = f"{before}<!-- results -->\n\n{as_markdown(results, options.iterations)}\n<!-- end -->{after}"
        options.markdown.write_text(page)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
