"""Runs the benchmarks, prints ratios and targets, and saves the results.

python -m benchmarks [--only step,memory] [--quick] [--peers ours-3,fsdp2]
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import results, tables, targets
from benchmarks.agreement import LossesDisagree
from benchmarks.options import Options, Skipped
from benchmarks.results import Case, Result

# By name on the command line, which is also the name of the result file: the module in ``benchmarks.suite``.
BENCHMARKS = {
    "step": "step_time",
    "network": "slow_network",
    "memory": "memory",
    "copies": "copies",
    "optimizer": "optimizer_step",
    "host": "host_time",
    "startup": "start_up",
    "scale": "scale",
    "growth": "growth",
    "loop": "real_loop",
    "prediction": "prediction",
    "predicted-memory": "predicted_memory",
    "published": "published",
    "gpu": "gpu",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(BENCHMARKS)
    parser.add_argument("--only", default=",".join(BENCHMARKS), help=f"benchmarks, separated by commas: {names}")
    parser.add_argument("--quick", action="store_true", help="small loads and few rounds, only to test the suite")
    parser.add_argument("--rounds", type=int, help="number of timed rounds")
    parser.add_argument("--peers", default="", help="measure only these peers, separated by commas")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder for the results")
    parser.add_argument("--add", action="store_true", help="keep earlier cases that this run does not measure")
    parser.add_argument("--full", action="store_true", help="gpu: all peers in all settings, one case after another")
    parser.add_argument("--where", default="", help="measure only these cases of step and network: ranks=2,tokens=256")
    options = parser.parse_args(arguments)
    options.where = dict(tag.split("=", 1) for tag in filter(None, options.where.split(",")))
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in BENCHMARKS]
    if unknown:
        parser.error(f"--only: expected some of {names}; got {', '.join(unknown)}")
    return options


def run_one(name: str, options: Options, folder: Path, add: bool = False) -> Result:
    """Run one benchmark. Each case is printed and saved as soon as it has been measured.

    Args:
        name: Name of the benchmark.
        options: Options of the run.
        folder: Folder for the results.
        add: Whether to keep cases of an earlier result that this run does not measure.

    Raises:
        LossesDisagree: The losses of a peer differ from those of the others.
    """
    result = Result(name, quick=options.quick, about=results.about())
    path = folder / f"{name}.json"
    earlier = Result.load(path) if add and path.exists() else None
    entry: Callable[[Options], Iterable[Case]] = importlib.import_module(f"benchmarks.suite.{BENCHMARKS[name]}").run
    try:
        for case in entry(options):
            result.cases.append(case)
            tables.show(name, case)
            result.save(folder)
    except Skipped as reason:
        result.skipped = str(reason)
        print(f"{name}: skipped: {result.skipped}")
    if earlier is not None and earlier.quick == options.quick:
        result.add_earlier(earlier)
    result.targets = [verdict.as_json() for verdict in targets.judge(result)]
    tables.show_progress("")
    print(f"saved to {result.save(folder)}\n")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks. Returns 1 if losses disagree, else 0."""
    command = parse(arguments)
    only = tuple(filter(None, command.peers.split(",")))
    failed = 0
    measured: dict[str, Result] = {}
    for name in command.only:
        report = lambda text, name=name: tables.show_progress(f"{name}: {text}")  # noqa: E731 - closes over the name
        try:
            found = command.results / f"{name}.json"
            saved = Result.load(found).cases if command.add and found.exists() else []
            earlier = tuple(case.tags for case in saved)
            chosen = command.quick, command.rounds, only, report, command.where, command.full
            options = Options(*chosen, earlier, command.results, command.add)
            measured[name] = run_one(name, options, command.results, command.add)
        except LossesDisagree as disagreement:
            print(f"{name}: losses disagree: {disagreement}")
            failed = 1
    tables.show_targets([verdict for verdict in targets.judge_all(measured) if verdict.benchmark in command.only])
    return failed


if __name__ == "__main__":
    # Exit through an exception, so that cleanup, for example of network namespaces, also runs after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
