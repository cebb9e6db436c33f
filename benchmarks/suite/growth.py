"""Whether anything grows: 2,000 steps on 2 ranks, with the heap counted and steps timed along the way."""

from collections.abc import Sequence

from benchmarks.figures import Slope
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options, threads_for
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.workers import Ranks

RANKS = 2
SHAPE = Shape(width=64, depth=4, heads=4, vocabulary=64)
TOKENS = 16
STEPS = 2000
POINTS = 40
# What is built in the first steps and kept, such as plans and kernels' scratch memory, is not growth.
SETTLING = 100
NAMES = ("ours-1", "ours-2", "ours-3", "fsdp2", "original-3")
QUICK = ("ours-3",)
# torch keeps a record of the last 2,000 collectives, which few of them fill in the settling steps: a short one is full.
RECORD = {"TORCH_FR_BUFFER_SIZE": "16"}
# Over the whole run, as a part of what there is at its middle: less is noise, whatever the standard error says.
TOLERANCE = {"heap": 0.002, "objects": 0.002, "step": 0.05}


def run(options: Options) -> list[Case]:
    """Train every peer on its own."""
    steps = STEPS // 10 if options.quick else STEPS
    case = Case({"ranks": RANKS, "dtype": "fp32"})
    variables = {**heap.environment(), **RECORD}
    for peer in options.peers(QUICK if options.quick else NAMES):
        options.report(peer)
        ranks = Ranks(Job(peer, RANKS, shape=SHAPE, threads=threads_for(RANKS)), variables)
        try:
            ranks.launch()
            points = _train(ranks, steps)
        finally:
            ranks.close()
        case.put(peer, **judged(points, steps // POINTS))
        case.rounds[peer] = points
    return [case]


def _train(ranks: Ranks, steps: int) -> list[dict[str, float]]:
    """The figures of rank 0 after every part of the run."""
    ranks.call("benchmarks.probes.growth:run", tokens=TOKENS, steps=SETTLING)
    each = steps // POINTS
    points = []
    for _ in range(POINTS):
        points.append(ranks.call("benchmarks.probes.growth:run", tokens=TOKENS, steps=each)[0])
    return points


def judged(points: Sequence[dict[str, float]], each: int) -> dict[str, float]:
    """Means, slopes per step with their errors, and whether memory or time grow: 1 if so, else 0.

    Args:
        points: Figures after every ``each`` steps.
        each: Steps between two points.
    """
    at = [each * (number + 1) for number in range(len(points))]
    slopes = {name: Slope.of(at, [point[name] for point in points]) for name in points[0]}
    grows = {name: float(not slopes[name].is_flat(tolerance)) for name, tolerance in TOLERANCE.items()}
    return {
        "steps": float(at[-1]),
        "heap": slopes["heap"].mean,
        "heap_slope": slopes["heap"].per_step,
        "heap_error": slopes["heap"].error,
        "object_slope": slopes["objects"].per_step,
        "resident_slope": slopes["resident"].per_step,
        "step": 1e3 * slopes["step"].mean,
        "step_slope": 1e9 * slopes["step"].per_step,
        "step_error": 1e9 * slopes["step"].error,
        "memory_grows": max(grows["heap"], grows["objects"]),
        "time_grows": grows["step"],
    }
