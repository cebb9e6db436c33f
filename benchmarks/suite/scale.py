"""Host time, memory and padding of one rank of 8 to 4,096, on the fake process group."""

from benchmarks.field import field_of
from benchmarks.job import Job
from benchmarks.model import Shape, Transformer
from benchmarks.options import Options
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.suite import host_time, memory
from benchmarks.workers import WorkerFailure

NUMBERS = (8, 64, 512, 4096)
NAMES = ("fsdp2", "original-3-limited", "ours-3")
# Not timed: it loops over all ranks for every gradient, which takes minutes per turn with 4,096.
UNTIMED = ("deepspeed-3",)
ROUNDS = 5


def run(options: Options) -> list[Case]:
    """Measure every number of ranks."""
    cases = []
    shape = Shape(width=128, depth=4, heads=4) if options.quick else Shape()
    names = options.peers(NAMES)
    variables = heap.environment()
    for ranks in (8, 512) if options.quick else NUMBERS:
        options.report(f"{ranks} ranks")
        case = host_time.case_of(names, ranks, options, ROUNDS)
        case.tags = {"ranks": ranks, "dtype": "fp32"}
        jobs = [Job(name, ranks, shape=shape, fake=True) for name in [*names, *options.peers(UNTIMED)]]
        memory.count(case, jobs, variables, at_once=2)
        _padding(case, jobs, shape, options)
        cases.append(case)
    return cases


def _padding(case: Case, jobs: list[Job], shape: Shape, options: Options) -> None:
    """Measure the padding in all-gathers and reductions, relative to the weights."""
    weights = 4 * sum(p.numel() for p in Transformer(shape).parameters())
    block = 4 * sum(p.numel() for p in Transformer(shape).blocks[0].parameters())
    with field_of(jobs, options) as field:
        for peer, ranks in field.running.items():
            try:
                found = ranks.call("benchmarks.probes.traffic:measure", tokens=memory.TOKENS)[0]
            except WorkerFailure as failure:
                case.notes.append(f"{peer}: padding: {str(failure).splitlines()[0]}")
                continue
            case.put(peer, reduce_padding=found["reduced_bytes"] / weights - 1)
            # Peers keep different units between forward and backward, such as the root or the last block. Compare with
            # the closest smaller sum of whole units.
            kept = round((2 * weights - found["gathered_bytes"]) / block)
            root = weights - shape.depth * block
            nearest = min(
                (2 * weights - n * block - r * root for n in range(max(kept, 0) + 2) for r in (0, 1)),
                key=lambda least: found["gathered_bytes"] - least if found["gathered_bytes"] >= least else float("inf"),
            )
            case.put(peer, gather_padding=found["gathered_bytes"] / nearest - 1)
