"""The peak of live tensor bytes that the planner predicts, against the counted one: ten models, five strategies."""

import json
from collections.abc import Iterator

from benchmarks import planner
from benchmarks.job import Job
from benchmarks.options import Options
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.workers import Ranks
from benchmarks.zoo import MODELS
from megatron.fsdp.tools.predict import Device

RANKS = 4
# The ZeRO stage and the ranks of the outer axis.
STRATEGIES = {**{f"ours-{zero}": (zero, 1) for zero in range(4)}, "ours-hsdp": (3, 2)}
# Bytes depend on no speed, so the prediction needs no calibration.
CPU = Device("CPU", None, {"float32": 1e11, "bfloat16": 1e11}, 1e10, runs_ahead=False, cores=2)
TOLERANCE = 0.03


def run(options: Options) -> Iterator[Case]:
    """Count and predict the bytes of every model with every strategy."""
    path = options.folder / "predicted-memory" / "measured.json"
    kept: dict[str, dict[str, dict[str, float]]] = {}
    if options.add and path.exists():
        kept = json.loads(path.read_text())
    models = [model for model in (("gpt",) if options.quick else MODELS) if options.wants(model=model)]
    cases = []
    for model in models:
        if model not in kept:
            kept[model] = measure(model, options)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept, indent=1) + "\n")
        case = Case({"model": model, "ranks": RANKS})
        for peer, found in kept[model].items():
            options.report(f"predicting {model}, {peer}")
            case.put(peer, **found)
            predict(case, model, peer)
        cases.append(case)
        yield case
    yield summary(cases)


def measure(model: str, options: Options) -> dict[str, dict[str, float]]:
    """The bytes of a model on rank 0 with every strategy."""
    ranks = Ranks(Job("alone", RANKS), heap.environment(), start="benchmarks.probes.live_bytes:start")
    found = {}
    try:
        ranks.launch()
        for peer, (zero, outer) in STRATEGIES.items():
            options.report(f"{model}, {peer}")
            found[peer] = ranks.call("benchmarks.probes.live_bytes:measure", model=model, zero=zero, outer=outer)[0]
    finally:
        ranks.close()
    return found


def predict(case: Case, model: str, peer: str) -> None:
    """Add the planner's answer for one cell, and its error relative to the most bytes of any step."""
    zero, outer = STRATEGIES[peer]
    answer = planner.ask(lambda: planner.memory(model, zero, outer, RANKS, CPU))
    if isinstance(answer, str):
        case.notes.append(f"{peer}: {answer}")
        return
    total = answer.peak.total
    case.put(peer, predicted=total, error=total / case.figures[peer]["most"].median - 1)
    largest = planner.largest_by_category(answer)
    case.put(peer, **{f"predicted_most_{name.replace(' ', '_')}": value for name, value in largest.items()})


def summary(cases: list[Case]) -> Case:
    """How well the planner did in all cells."""
    errors = [own["error"].median for case in cases for own in case.figures.values() if "error" in own]
    result = Case({"models": "all"})
    result.put(planner.NAME, cells=sum(len(case.figures) for case in cases), predicted_cells=len(errors))
    if errors:
        within = sum(abs(error) <= TOLERANCE for error in errors) / len(errors)
        result.put(planner.NAME, within=within, **planner.accuracy(errors))
    return result
