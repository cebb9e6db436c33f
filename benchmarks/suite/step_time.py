"""Step time with 2 and 4 ranks, few to many tokens per step, fp32 and bf16 compute with fp32 main weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.field import Training, field_of
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options, threads_for
from benchmarks.results import Case, machine

# Tokens per rank and step. For this model, communication takes longer than compute, as long, or less.
LOADS = {32: "communication-heavy", 256: "balanced", 1024: "compute-heavy"}
ROUNDS = 9

ALL = (
    *("ddp", "alone", "fsdp2", "fsdp2-keep", "megatron-ddp"),
    *("original-0", "original-1", "original-2", "original-3", "original-3-limited"),
    *("ours-0", "ours-1", "ours-2", "ours-3"),
)
# Four ranks of all peers would not fit into the memory of a small machine.
SOME = ("ddp", "alone", "fsdp2", "original-1", "original-2", "original-3", "ours-0", "ours-1", "ours-2", "ours-3")


@dataclass(frozen=True)
class Setting:
    """The cases that one set of processes measures."""

    ranks: int
    dtype: str
    peers: tuple[str, ...]
    tokens: tuple[int, ...] = tuple(LOADS)


SETTINGS = (
    Setting(2, "fp32", ALL),
    Setting(2, "bf16", ALL),
    Setting(4, "fp32", SOME),
    Setting(4, "bf16", SOME),
)
QUICK = (Setting(2, "fp32", ALL, (32,)),)


def run(options: Options) -> Iterator[Case]:
    """Measure every setting under its loads."""
    for setting in QUICK if options.quick else SETTINGS:
        loads = [t for t in setting.tokens if options.wants(ranks=setting.ranks, dtype=setting.dtype, tokens=t)]
        if not loads:
            continue
        shape = Shape(width=128, depth=4, heads=4) if options.quick else Shape()
        threads = threads_for(setting.ranks)
        jobs = [
            Job(peer, setting.ranks, setting.dtype, shape, threads=threads) for peer in options.peers(setting.peers)
        ]
        with field_of(jobs, options) as field:
            difference = field.check_losses(*loads)
            for tokens in loads:
                # A turn should be long compared to the resolution of CPU times, which is 10 ms.
                steps = 3 if tokens > 256 else 6
                rounds = field.measure(
                    lambda ranks, t=tokens, s=steps: Training(ranks, t, s),  # type: ignore[misc]
                    options.number_of_rounds(ROUNDS),
                )
                tags = {"ranks": setting.ranks, "dtype": setting.dtype, "tokens": tokens, "load": LOADS[tokens]}
                case = Case(tags)
                case.put_rounds(rounds)
                case.notes.append(f"losses agree within {difference:.1e}")
                if setting.dtype == "bf16" and not machine()["native_bf16"]:
                    case.notes.append("this processor has no native bf16, so times in bf16 are not representative")
                yield case
