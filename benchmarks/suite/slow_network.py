"""Step time on a network of 1 Gbit/s, and the fraction of communication that each peer hides behind compute.

hidden = 1 - exposed / communication alone; exposed = forward and backward with communication - without. Communication
alone is measured with gloo's collectives over the same units, as often as the strategy needs them. For our peers, it is
measured with the sends and receives that this project uses over gloo, which take less time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.field import Field, Training, field_of
from benchmarks.figures import Summary
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.network import INTERFACE, Network, network
from benchmarks.options import Options, threads_for
from benchmarks.probes.communication import PATTERNS
from benchmarks.results import Case
from benchmarks.rounds import Rounds, Sample
from benchmarks.workers import Ranks

RANKS = 2
RATE = "1gbit"
ROUNDS = 7
STEPS = 3
SHAPE = Shape(width=256)
# With the first load, compute takes about as long as the communication of ZeRO-1; with the second, as that of ZeRO-3.
TOKENS = (512, 2048)

# The collectives of each peer during forward and backward.
PATTERN = {
    "ddp": "all-reduce",
    "ours-0": "all-reduce",
    "original-0": "all-reduce",
    **{f"original-{zero}": "gather once" for zero in (1, 2)},
    **{f"ours-{zero}": "gather once, pairwise" for zero in (1, 2)},
    **{name: "gather twice" for name in ("fsdp2", "fsdp2-streams", "original-3", "original-3-streams")},
    "ours-3": "gather twice, pairwise",
    "megatron-ddp": "gather once",
}
NAMES = ("alone", *PATTERN)
QUICK = ("alone", "ddp", "fsdp2", "fsdp2-streams", "original-3", "ours-3")


class Collectives:
    """Turns that measure collectives alone."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def turn(self) -> Sample:
        """Milliseconds per step of the slowest rank, by pattern."""
        sample = {}
        for pattern in PATTERNS:
            answers = self._ranks.call("benchmarks.probes.communication:turn", pattern=pattern, steps=STEPS)
            sample[pattern] = 1e3 * sum(max(times) for times in zip(*answers, strict=True)) / STEPS
        return sample

    def restart(self) -> None:
        """Restart the processes."""
        self._ranks.launch()


@dataclass(frozen=True)
class _Maker:
    """Creates the processes of a job inside the network."""

    inside: Network

    def __call__(self, job: Job) -> Ranks:
        start = "benchmarks.probes.communication:start" if job.peer == "collectives" else "benchmarks.training:start"
        return Ranks(job, {"GLOO_SOCKET_IFNAME": INTERFACE}, self.inside.prefix, start)


def run(options: Options) -> Iterator[Case]:
    """Measure all peers on the slow network.

    Raises:
        Skipped: Network namespaces cannot be created here.
    """
    names = [*options.peers(QUICK if options.quick else NAMES), "collectives"]
    if "alone" not in names:
        names.insert(0, "alone")
    with network(RANKS, RATE) as inside:
        jobs = [Job(name, RANKS, shape=SHAPE, threads=threads_for(RANKS)) for name in names]
        with field_of(jobs, options, make=_Maker(inside)) as field:
            loads = [tokens for tokens in (TOKENS[:1] if options.quick else TOKENS) if options.wants(tokens=tokens)]
            difference = field.check_losses(*loads)
            for tokens in loads:
                case = _case(field, tokens, options)
                case.notes.append(f"losses agree within {difference:.1e}")
                yield case


def _case(field: Field, tokens: int, options: Options) -> Case:
    case = Case({"ranks": RANKS, "dtype": "fp32", "tokens": tokens, "network": RATE})
    rounds = field.measure(
        lambda ranks: Collectives(ranks) if ranks.job.peer == "collectives" else Training(ranks, tokens, STEPS),
        options.number_of_rounds(ROUNDS),
    )
    hide(rounds)
    case.put_rounds(rounds)
    alone = case.figures.get("alone", {}).get("compute")
    collectives = case.figures.pop("collectives", {})
    if alone is not None and collectives:
        case.notes += [f"{pattern}: {_text(figure)} ms alone" for pattern, figure in collectives.items()]
        case.notes.append(f"compute of forward and backward alone: {_text(alone)} ms")
    return case


def _text(figure: Summary) -> str:
    return f"{figure.median:.0f}"


def hide(measured: Rounds) -> None:
    """Add communication alone, exposed time, and the hidden fraction to every peer's samples."""
    for sample in [*measured.kept, *measured.thrown_away]:
        if "alone" not in sample or "collectives" not in sample:
            continue
        for peer, own in sample.items():
            if peer in PATTERN:
                own["communication"] = sample["collectives"][PATTERN[peer]]
                own["exposed"] = own["compute"] - sample["alone"]["compute"]
                own["hidden"] = 1 - own["exposed"] / own["communication"]
                # A schedule cannot hide more communication than there is compute.
                own["could_hide"] = min(1.0, sample["alone"]["compute"] / own["communication"])
