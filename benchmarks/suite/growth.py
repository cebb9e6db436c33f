"""Growth of memory and step time over 2,000 steps on 2 ranks."""

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
# The first steps allocate memory that is kept, such as plans and scratch memory of kernels, which is not growth.
WARM_UP = 100
NAMES = ("ours-1", "ours-2", "ours-3", "fsdp2", "original-3")
QUICK = ("ours-3",)
# torch's flight recorder keeps the last 2,000 collectives and would still grow after the warm-up, so make it shorter.
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "16"}
# Growth over the whole run, relative to the mean, that counts as noise whatever the standard error is.
TOLERANCE = {"heap": 0.002, "objects": 0.002, "step": 0.05}


def run(options: Options) -> list[Case]:
    """Train every peer, one after another."""
    steps = STEPS // 10 if options.quick else STEPS
    case = Case({"ranks": RANKS, "dtype": "fp32"})
    variables = {**heap.environment(), **FLIGHT_RECORDER}
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
    """The measurements of rank 0 at every point of the run."""
    ranks.call("benchmarks.probes.growth:run", tokens=TOKENS, steps=WARM_UP)
    each = steps // POINTS
    points = []
    for _ in range(POINTS):
        points.append(ranks.call("benchmarks.probes.growth:run", tokens=TOKENS, steps=each)[0])
    return points


def judged(points: Sequence[dict[str, float]], each: int) -> dict[str, float]:
    """Means, slopes per step with their errors, and flags for growth of memory and time (1.0 or 0.0).

    Args:
        points: Measurements after every ``each`` steps.
        each: Number of steps between two points.
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
