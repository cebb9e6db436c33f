"""Host time per unit and step: the CPU time of FSDP itself, which can leave a GPU idle.

One of 8 ranks on the fake process group trains a tiny model. The CPU time of the plain model is subtracted, and the
rest is divided by the number of units.
"""

from collections.abc import Sequence

from benchmarks.field import field_of
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.options import Options
from benchmarks.peers import PEERS
from benchmarks.results import Case
from benchmarks.rounds import Rounds, Sample
from benchmarks.training import PARTS
from benchmarks.workers import Ranks

RANKS = 8
TINY = Shape(width=32, depth=24, heads=4, vocabulary=64)
TOKENS = 4
STEPS = 25
ROUNDS = 11
# Mocks for kernels take host time that kernels do not.
NAMES = tuple(p for p in PEERS if PEERS[p].fake and not PEERS[p].cpu_only and not p.endswith(("-fused", "-hsdp")))
QUICK = ("fsdp2", "original-3", "ours-3")


class HostTurns:
    """Turns that measure CPU time; see ``benchmarks.probes.host``."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks = ranks
        self._steps = steps

    def turn(self) -> Sample:
        """Microseconds per step, by part."""
        sample: Sample = self._ranks.call("benchmarks.probes.host:turn", tokens=TOKENS, steps=self._steps)[0]
        return sample

    def restart(self) -> None:
        """Restart the process."""
        self._ranks.launch()


def run(options: Options) -> list[Case]:
    """Measure all peers that run on the fake process group."""
    names = options.peers(QUICK if options.quick else NAMES)
    return [case_of(names, RANKS, options, ROUNDS)]


def case_of(names: Sequence[str], ranks: int, options: Options, rounds: int) -> Case:
    """Measure the host time of these peers on one of ``ranks`` ranks."""
    jobs = [Job(name, ranks, shape=TINY, fake=True) for name in dict.fromkeys(["alone", *names])]
    case = Case({"ranks": ranks, "units": TINY.depth + 1})
    with field_of(jobs, options) as field:
        measured = field.measure(lambda r: HostTurns(r, STEPS), options.number_of_rounds(rounds))
    per_unit(measured, TINY.depth + 1)
    case.put_rounds(measured)
    return case


def per_unit(measured: Rounds, units: int) -> None:
    """Subtract the plain model's time, round by round, and divide by the number of units.

    ``host`` is forward plus backward, because another benchmark measures the optimizer's step.
    """
    for sample in [*measured.kept, *measured.thrown_away]:
        plain = sample.pop("alone", None)
        for own in sample.values():
            for part in PARTS:
                own[part] = (own[part] - (plain[part] if plain else 0.0)) / units
            own["host"] = own["forward"] + own["backward"]
