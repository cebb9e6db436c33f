"""``python -m tests.fuzz``: make programs, run them, reduce what is wrong, print a table."""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from . import remedies
from .program import Program, programs
from .runner import Result, Runner, prepare, results_here
from .settings import values_of
from .steps import KINDS
from .table import defect, frequencies, source, table


def main() -> int:
    arguments = _arguments()
    only = dict(map(values_of, arguments.settings.split()))
    kinds = arguments.only.split(",") if arguments.only else list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"--only: expected {', '.join(KINDS)}; got {', '.join(unknown)}.")
    made = programs(arguments.programs, arguments.seed, only, kinds)
    if arguments.dry or arguments.remedies is not None:
        dry = frequencies(made) if arguments.dry else ""
        print(dry or remedies.table(arguments.remedies, arguments.programs, arguments.seed, only, kinds))
        return 0
    start = time.time()
    results = _run(made, start + arguments.seconds)
    seconds = time.time() - start
    control: list[Result] = []
    if arguments.control:
        control = _run((r.made for r in results if r.made.setting.in_torch), float("inf"), torchs=True)
    defects = _by_signature(results)
    text = table(results, control, seconds)
    runner = Runner()
    for found in defects:
        text += defect(found, runner.reduce(_shortest(found), arguments.reduce))
    runner.pool.close()
    text += "\n# With torch's FSDP2\n" if control else ""
    text += "".join(defect(found, _shortest(found)) for found in _by_signature(control))
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / "table.md").write_text(text)
    print(text)
    return 1 if defects else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3000, help="start no more programs after this time")
    parser.add_argument("--settings", default="", help='only these, such as "strategy=3,2 ranks=2 units=block"')
    parser.add_argument("--only", default="", help="only these kinds of steps, separated by commas")
    parser.add_argument("--control", choices=["fsdp2"], help="run the programs with torch's FSDP2, too")
    parser.add_argument("--reduce", type=float, default=20, help="seconds to reduce a defect; 0: do not")
    parser.add_argument("--dry", action="store_true", help="only make the programs, and print how often steps occur")
    parser.add_argument("--remedies", nargs="?", const="", help="take these out in turn (see remedies.py); empty: all")
    parser.add_argument("--out", type=Path, default=Path("fuzz_output"))
    return parser.parse_args()


def _by_signature(results: list[Result]) -> list[list[Result]]:
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.verdict.kind != "right":
            found.setdefault(result.signature, []).append(result)
    return sorted(found.values(), key=len, reverse=True)


def _shortest(found: list[Result]) -> Result:
    return min(found, key=lambda result: len(result.program.steps))


def _run(made: Iterator[Program], end: float, torchs: bool = False) -> list[Result]:
    results: list[Result] = []
    seen: set[tuple[str, str]] = {("right", "")}
    # Ranks wait for each other half of their time: two groups of them use two cores.
    with ProcessPoolExecutor(2, get_context("spawn"), prepare, (torchs,)) as pool:
        running: set[Future[list[Result]]] = set()
        while True:
            while len(running) < 2 and time.time() < end and (chunk := list(itertools.islice(made, 100))):
                running.add(pool.submit(results_here, chunk))
            if not running:
                return results
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for result in (result for future in done for result in future.result()):
                results.append(result)
                if result.signature not in seen:
                    print(source(result), file=sys.stderr)
                seen.add(result.signature)
            right = sum(result.verdict.kind == "right" for result in results)
            print(f"{len(results)} programs, {right} right", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
