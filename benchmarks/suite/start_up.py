"""Memory and time of one of 64 ranks for building a model with 2 billion parameters from the meta device."""

from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import CORES, Options
from benchmarks.original_package import NotInstalled
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.workers import Ranks, WorkerFailure

RANKS = 64
LARGE = Shape(width=2560, depth=25, heads=20, vocabulary=4096)
NAMES = ("fsdp2", "original-3", "ours-3", "ours-3 per shard", "deferred", "deferred per shard")


def run(options: Options) -> list[Case]:
    """Build the model with each peer."""
    shape = Shape(width=512, depth=4) if options.quick else LARGE
    case = Case({"ranks": RANKS, "dtype": "fp32"})
    variables = heap.environment()
    for peer in options.peers(NAMES):
        options.report(peer)
        job = Job(peer, RANKS, shape=shape, fake=True, threads=CORES)
        ranks = Ranks(job, variables, start="benchmarks.probes.memory:start")
        try:
            ranks.launch()
            found = ranks.call("benchmarks.probes.start_up:build", job=job.as_json(), how=peer)[0]
        except (WorkerFailure, NotInstalled) as failure:
            case.notes.append(f"{peer} failed: {str(failure).splitlines()[0]}")
            continue
        finally:
            ranks.close()
        case.tags["parameters"] = f"{found.pop('parameters') / 1e9:.2f} billion"
        case.put(peer, **found)
    return [case]
