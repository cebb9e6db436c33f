"""Step time, memory, kernels and idle time of Llama-like models in bf16 on a GPU.

With world size 1, collectives run over NCCL. On the fake process group, one process represents one of 8 or 64 ranks,
and communication takes no time. Only one peer uses the device at a time, because of its memory; turns are interleaved
nevertheless.

By default a run compares ZeRO-3 with FSDP2 and NVIDIA's engine in 8 minutes. With --full, all peers are measured in all
settings: each run measures one case, in 8 minutes as well, and the next run with --add measures the next one.

--quick without a CUDA device is a dry run of a tiny model on the CPU.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.field import slowest
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options, Skipped
from benchmarks.original_package import NotInstalled
from benchmarks.results import Case
from benchmarks.rounds import Rounds
from benchmarks.workers import Ranks, WorkerFailure

# A model with 1 billion parameters, and some layers of a model with 8 billion.
MODELS = {
    "1 B": Shape(width=2048, depth=16, heads=32, vocabulary=32_000, llama_hidden=8192),
    "8 B, 4 layers": Shape(width=4096, depth=4, heads=32, vocabulary=32_000, llama_hidden=14_336),
}
TINY = {"tiny": Shape(width=256, depth=2, heads=8, vocabulary=512, llama_hidden=512)}
TOKENS = 4096
STEPS = 5
ROUNDS = 5
SECONDS = 8 * 60.0
COMPARED = ("fsdp2", "original-3", "ours-3")
NAMES = (
    "alone",
    "ddp",
    "fsdp2",
    "fsdp2-keep",
    "original-1",
    "original-2",
    "original-3",
    *(f"ours-{z}" for z in range(4)),
)


@dataclass(frozen=True)
class Setting:
    """A number of ranks, on the fake process group or over NCCL."""

    ranks: int
    fake: bool


SETTINGS = (Setting(1, False), Setting(8, True), Setting(64, True))


def run(options: Options) -> Iterator[Case]:
    """Measure models for up to :data:`SECONDS`.

    Raises:
        Skipped: There is no CUDA device, and this is no dry run.
    """
    if not torch.cuda.is_available() and not options.quick:
        raise Skipped("needs a CUDA device: there is none")
    wanted = list(_cases(options))
    if options.full:
        left = [each for each in wanted if each[0].tags not in options.earlier]
        print(f"{len(left)} of {len(wanted)} cases are left; this run measures one", flush=True)
        wanted = left[:1]
    end = time.monotonic() + SECONDS
    for number, (case, jobs) in enumerate(wanted):
        now = time.monotonic()
        _measure(case, jobs, options, now + (end - now) / (len(wanted) - number))
        yield case


def _cases(options: Options) -> Iterator[tuple[Case, list[Job]]]:
    models, tokens = (TINY, 64) if options.quick else (MODELS, TOKENS)
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    # In short, one rank over NCCL, and one of 8 of the larger model.
    brief = dict(zip(models, SETTINGS, strict=False))
    for title, shape in models.items():
        for setting in SETTINGS if options.full else (brief[title],):
            names = options.peers(NAMES if options.full or options.only_peers else COMPARED)
            group = "fake" if setting.fake else backend
            case = Case({"model": title, "ranks": setting.ranks, "group": group, "dtype": "bf16", "tokens": tokens})
            jobs = [
                Job(name, setting.ranks, "bf16", shape, fake=setting.fake, device=device)
                for name in names
                if not (setting.fake and name == "ddp")
            ]
            yield case, jobs


def _measure(case: Case, jobs: list[Job], options: Options, end: float) -> None:
    """Measure a case in rounds, and begin none that might end too late."""
    rounds, longest, tokens = Rounds(), 0.0, case.tags["tokens"]
    for number in range(options.number_of_rounds(ROUNDS)):
        start = time.monotonic()
        if start + longest > end:
            break
        samples = {}
        for job in jobs if number % 2 == 0 else jobs[::-1]:
            if job.peer in rounds.crashed:
                continue
            options.report(f"{case.tags['model']}, {job.ranks} ranks, round {number + 1}: {job.peer}")
            ranks = Ranks(job)
            try:
                ranks.launch()
                turns = ranks.call("benchmarks.training:turn", tokens=tokens, steps=STEPS, warm_up=3)
                samples[job.peer] = slowest(turns) | ranks.call("benchmarks.probes.gpu:measure", tokens=tokens)[0]
            except (WorkerFailure, NotInstalled) as failure:
                rounds.crashed[job.peer] = str(failure)
            finally:
                ranks.close()
        rounds.kept.append(samples)
        longest = max(longest, time.monotonic() - start)
    rounds.kept = [{p: s for p, s in sample.items() if p not in rounds.crashed} for sample in rounds.kept]
    case.put_rounds(rounds)
