"""The peak of live tensor bytes that the planner predicts, against the counted one: ten models, five strategies."""

from collections.abc import Iterator

from benchmarks import planner
from benchmarks.job import Job
from benchmarks.options import Options
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.workers import Ranks, WorkerFailure
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
    ranks = Ranks(Job("alone", RANKS), heap.environment(), start="benchmarks.probes.live_bytes:start")
    errors: list[float] = []
    try:
        ranks.launch()
        for model in ("gpt",) if options.quick else MODELS:
            if options.wants(model=model):
                case = Case({"model": model, "ranks": RANKS})
                for peer in STRATEGIES:
                    options.report(f"{model}, {peer}")
                    errors += _measure(case, model, peer, ranks)
                yield case
    finally:
        ranks.close()
    if errors:
        case = Case({"models": "all"})
        within = sum(abs(error) <= TOLERANCE for error in errors)
        case.put(planner.NAME, cases=len(errors), within=within / len(errors), **planner.accuracy(errors))
        yield case


def _measure(case: Case, model: str, peer: str, ranks: Ranks) -> list[float]:
    """Add one cell. Returns its relative error, if there is a prediction."""
    zero, outer = STRATEGIES[peer]
    try:
        found = ranks.call("benchmarks.probes.live_bytes:measure", model=model, zero=zero, outer=outer)[0]
    except WorkerFailure as failure:
        case.notes.append(f"{peer}: {str(failure).splitlines()[0]}")
        ranks.launch()
        return []
    measured = found["peak"]
    case.put(peer, **{name.replace(" ", "_"): value for name, value in found.items()})
    answer = planner.ask(lambda: planner.memory(model, zero, outer, RANKS, CPU).peak.total)
    if isinstance(answer, str):
        case.notes.append(f"{peer}: {answer}")
        return []
    largest = planner.largest_by_category(planner.memory(model, zero, outer, RANKS, CPU))
    case.put(peer, predicted=answer, error=answer / measured - 1)
    case.put(peer, **{f"predicted_most_{name.replace(' ', '_')}": value for name, value in largest.items()})
    return [answer / measured - 1]
