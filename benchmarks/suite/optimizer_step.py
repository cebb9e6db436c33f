"""Time of an optimizer step over 1,000 parameters: flat shards, one DTensor per parameter, full parameters."""

import math
from collections.abc import Mapping

from benchmarks.agreement import LossesDisagree
from benchmarks.field import Field, Training, field_of
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options, threads_for
from benchmarks.results import Case

RANKS = 2
# 83 blocks with 12 parameters each, and 4 other parameters.
SHAPE = Shape(width=32, depth=83, heads=4, vocabulary=64)
TOKENS = 8
STEPS = 10
ROUNDS = 9
NAMES = ("ddp", "fsdp2", "original-1", "original-3", "ours-1", "ours-3", "megatron-ddp")
QUICK = ("ddp", "fsdp2", "ours-3")
# The peers whose state dict contains full weights or DTensors.
COMPARED = ("ddp", "fsdp2", "ours-1", "ours-3")
TOLERANCE = 1e-5


def run(options: Options) -> list[Case]:
    """Check that all optimizers compute the same weights, and time their steps."""
    names = options.peers(QUICK if options.quick else NAMES)
    jobs = [Job(name, RANKS, shape=SHAPE, threads=threads_for(RANKS)) for name in names]
    case = Case({"ranks": RANKS, "parameters": 12 * SHAPE.depth + 4})
    with field_of(jobs, options) as field:
        difference = field.check_losses(TOKENS)
        case.notes.append(f"losses agree within {difference:.1e}")
        case.notes.append(f"weights agree within {_compare_weights(field):.1e}")
        rounds = field.measure(lambda ranks: Training(ranks, TOKENS, STEPS), options.number_of_rounds(ROUNDS))
    case.put_rounds(rounds)
    return [case]


def _compare_weights(field: Field) -> float:
    found = {
        peer: ranks.call("benchmarks.probes.weights:fingerprints")[0]
        for peer, ranks in field.running.items()
        if peer in COMPARED
    }
    return compare(found)


def compare(found: Mapping[str, Mapping[str, list[float]]]) -> float:
    """The largest relative difference between the norms of a parameter in the first peer and in another one.

    Raises:
        LossesDisagree: The difference exceeds ``TOLERANCE``, or a parameter is missing.
    """
    worst = 0.0
    if not found:
        return worst
    first, *others = found
    for peer in others:
        if set(found[peer]) != set(found[first]):
            raise LossesDisagree(f"{peer} has other parameters than {first}")
        for name, (_, norm) in found[first].items():
            other = found[peer][name][1]
            difference = abs(other - norm) / max(norm, 1e-6)
            if not (math.isfinite(difference) and difference <= TOLERANCE):
                raise LossesDisagree(f"after some steps, the norm of {name} is {other} in {peer}, {norm} in {first}")
            worst = max(worst, difference)
    return worst
