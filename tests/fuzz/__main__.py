"""``python -m tests.fuzz``: generate programs, run them, reduce defects, print a table."""

import argparse
import ast
import time

from .program import programs
from .runner import Runner, tally
from .steps import KINDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--settings", default="", help='such as "strategy=3,2 ranks=2 units=block"')
    parser.add_argument("--only", default="", help="kinds of steps, separated by commas")
    parser.add_argument("--control", choices=["fsdp2"])
    parser.add_argument("--out", default="fuzz_output")
    arguments = parser.parse_args()
    only = {}
    for word in arguments.settings.split():
        name, _, values = word.partition("=")
        only[name] = tuple(_value(value) for value in values.split(","))
    kinds = arguments.only.split(",") if arguments.only else list(KINDS)
    start = time.time()
    made = programs(arguments.programs, arguments.seed, only, kinds)
    print(len(made), "programs", time.time() - start)
    runner = Runner()
    seen = {}
    done = []
    while made and time.time() - start < arguments.seconds:
        chunk, made = made[:100], made[100:]
        results = runner.results(chunk)
        done += results
        for result in results:
            if result.verdict.kind != "right":
                seen.setdefault(result.signature, []).append(result)
        print(len(done), f"{time.time() - start:.0f} s", dict(tally(done)["verdicts"]), flush=True)
    print(tally(done))
    for signature, found in seen.items():
        print(len(found), signature, flush=True)
        best = runner.reduce(min(found, key=lambda r: len(r.program.steps)), 20)
        print(
            best.program.source(), best.verdict.at, best.verdict.what[:300], "\n", best.verdict.trace[-600:], flush=True
        )
    runner.pool.close()


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
