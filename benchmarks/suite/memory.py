"""Bytes of tensors per rank: after building, between steps, and at the peak of each part of a step.

Measured with real ranks and on the fake process group.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options
from benchmarks.original_package import NotInstalled
from benchmarks.peers import PEERS
from benchmarks.probes import heap
from benchmarks.results import Case
from benchmarks.workers import Ranks, WorkerFailure

# Few tokens, so that weights, gradients and optimizer state dominate.
TOKENS = 16

_OPTIONS = ("ours-3-double",)
_ELSEWHERE = ("alone", "ours-3-fused", "ours-hsdp", *_OPTIONS)
EVERY_PEER = tuple(peer for peer in PEERS if not peer.endswith("-streams") and peer not in _ELSEWHERE)
_DEEPSPEED = ("deepspeed-3", "deepspeed-3-limited")
_ORIGINAL = ("original-3", "original-3-limited", "original-3-double")
SHARDED = ("fsdp2", "fsdp2-keep", *_ORIGINAL, *_DEEPSPEED, "ours-3", *_OPTIONS)


@dataclass(frozen=True)
class Setting:
    """The ranks, process group and peers of some cases."""

    ranks: int
    fake: bool
    peers: tuple[str, ...]


SETTINGS = (
    Setting(2, False, EVERY_PEER),
    Setting(4, False, ("fsdp2", "original-3-limited", "ours-3")),
    Setting(8, True, EVERY_PEER),
    Setting(64, True, SHARDED),
    Setting(512, True, SHARDED),
)
QUICK = (Setting(8, True, ("fsdp2", "original-3-limited", "ours-3")),)


def run(options: Options) -> list[Case]:
    """Measure every peer in every setting, in both dtypes."""
    cases = []
    shape = Shape(width=128, depth=4, heads=4) if options.quick else Shape()
    variables = heap.environment()
    for setting in QUICK if options.quick else SETTINGS:
        for dtype in ("bf16",) if options.quick else ("fp32", "bf16"):
            names = [name for name in options.peers(setting.peers) if PEERS[name].fake or not setting.fake]
            jobs = [Job(name, setting.ranks, dtype, shape, fake=setting.fake) for name in names]
            group = "fake" if setting.fake else "gloo"
            case = Case({"ranks": setting.ranks, "dtype": dtype, "group": group, "tokens": TOKENS})
            options.report(f"{setting.ranks} ranks, {dtype}")
            count(case, jobs, variables, 1 if not setting.fake else 2)
            cases.append(case)
    return cases


def count(case: Case, jobs: Sequence[Job], variables: dict[str, str], at_once: int) -> None:
    """Add the bytes of each job's peer to ``case``. Jobs may run at the same time, since bytes do not depend on it."""
    with ThreadPoolExecutor(at_once) as pool:
        for job, found in zip(jobs, pool.map(lambda job: _count(job, variables), jobs), strict=True):
            if isinstance(found, str):
                case.notes.append(f"{job.peer} failed: {found.splitlines()[0]}")
            else:
                case.put(job.peer, **found)


def _count(job: Job, variables: dict[str, str]) -> dict[str, float] | str:
    """The maximum over all ranks, or the reason of a failure."""
    ranks = Ranks(job, variables, start="benchmarks.probes.memory:start")
    try:
        ranks.launch()
        each = [{"job": job.as_json(), "rank": rank, "tokens": TOKENS} for rank in range(1 if job.fake else job.ranks)]
        answers = ranks.call_each("benchmarks.probes.memory:measure", each)
    except (WorkerFailure, NotInstalled) as failure:
        return str(failure)
    finally:
        ranks.close()
    return {name: max(answer[name] for answer in answers) for name in answers[0]}
