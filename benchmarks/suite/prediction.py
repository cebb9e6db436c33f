"""Step times that the planner predicts, against step times in network namespaces.

Every setting of ``SETTINGS`` trains with every strategy, in turns. The speed of a CPU in a shared machine changes in
between: the same work takes up to a quarter more CPU time. So there are more turns than are needed until some agree,
and of each strategy, those count in which the CPU was fastest: they took least CPU time. A case is judged if its turns
agree and if the link bounds its communication, not the CPU time that gloo takes. Measurements are kept in
``prediction/measured.json`` of the folder for results; with ``--add``, only the missing ones are made, and all are
compared with what the planner predicts now.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import planner, quiet
from benchmarks.field import slowest
from benchmarks.figures import Summary
from benchmarks.job import Job
from benchmarks.model import Shape
from benchmarks.network import INTERFACE, Network, network
from benchmarks.options import CORES, Options
from benchmarks.quiet import Quiet
from benchmarks.results import Case
from benchmarks.rounds import Contestant, Sample, measure
from benchmarks.workers import Ranks, WorkerFailure
from megatron.fsdp.tools.predict import Device

# Turns that count, and the most rounds to find them in.
ROUNDS, MOST_ROUNDS = 5, 15
TOKENS = 1024
# A round lasts at least this long, in seconds.
ROUND = 1.2
# Quartiles may differ by this much from each other, relative to the median.
SPREAD = 0.03
# Ranks, rate and latency of the network in which the planner calibrates itself. No setting has this rate or latency.
CALIBRATION = (2, "750mbit", 0.3e-3)
FASTEST = 10_000  # Mbit/s; two cores bound it, so it is listed and not judged

SHAPES = {
    "small": Shape(width=128, depth=4, heads=4),
    "medium": Shape(width=256, depth=6),
    "large": Shape(width=384, depth=6),
}


@dataclass(frozen=True)
class Setting:
    """The common part of the cases of all strategies: ranks, Mbit/s, one-way milliseconds, model and dtype."""

    ranks: int
    rate: int
    latency: float
    size: str
    dtype: str

    @property
    def strategies(self) -> tuple[str, ...]:
        """The peers that train in this setting."""
        return tuple(f"ours-{zero}" for zero in range(4)) + (("ours-hsdp",) if self.ranks > 2 else ())

    def job(self, peer: str) -> Job:
        """The training job of a peer."""
        return Job(peer, self.ranks, self.dtype, SHAPES[self.size])


# All pairs of values occur, apart from those with 10 Gbit/s, and every strategy occurs with each of them. At high rates
# there are mostly two ranks: with four, the CPU time of gloo bounds more cases.
SETTINGS = (
    Setting(4, 100, 0.1, "small", "fp32"),
    Setting(4, 100, 1.0, "medium", "bf16"),
    Setting(2, 100, 1.0, "large", "bf16"),
    Setting(4, 500, 1.0, "small", "bf16"),
    Setting(2, 500, 0.1, "medium", "fp32"),
    Setting(4, 500, 0.1, "large", "fp32"),
    Setting(2, 1000, 1.0, "small", "fp32"),
    Setting(4, 1000, 0.1, "medium", "bf16"),
    Setting(4, 1000, 1.0, "large", "fp32"),
    Setting(4, 2500, 1.0, "small", "bf16"),
    Setting(2, 2500, 1.0, "medium", "fp32"),
    Setting(2, 2500, 0.1, "large", "bf16"),
    Setting(4, FASTEST, 0.1, "medium", "fp32"),
)
QUICK = (Setting(2, 1000, 0.1, "small", "fp32"),)


@dataclass
class Measured:
    """The measurements of one setting: of each strategy, the figures of all rounds."""

    setting: Setting
    rounds: dict[str, list[dict[str, float]]]
    noisy: bool

    def turns(self, peer: str) -> list[dict[str, float]]:
        """The turns that count: those that took least CPU time."""
        return sorted(self.rounds[peer], key=lambda turn: turn["cpu"])[:ROUNDS]

    def of(self, peer: str, quantity: str) -> Summary:
        """One quantity of these turns."""
        return Summary.of([turn[quantity] for turn in self.turns(peer)])

    def spread(self, peer: str) -> float:
        """The distance of the quartiles of the step times, relative to their median."""
        step = self.of(peer, "step")
        return (step.high - step.low) / step.median

    @property
    def is_complete(self) -> bool:
        """Whether no more rounds are needed."""
        peers = [peer for peer in self.setting.strategies if self.rounds.get(peer)]
        count = max((len(self.rounds[peer]) for peer in peers), default=MOST_ROUNDS)
        enough = count >= MOST_ROUNDS or self.setting.rate == FASTEST
        return enough or (count >= ROUNDS and all(self.spread(peer) <= SPREAD for peer in peers))


class Turns:
    """Turns of one strategy."""

    def __init__(self, pool: "_Pool", peer: str, steps: int) -> None:
        self._pool = pool
        self._peer = peer
        self._steps = steps

    def turn(self) -> Sample:
        """Milliseconds per step, CPU milliseconds of all ranks, and bytes that a rank sends."""
        before = self._pool.inside.sent_bytes(0)
        answers = self._pool.ranks.call(
            "benchmarks.probes.strategies:turn", peer=self._peer, tokens=TOKENS, steps=self._steps
        )
        sent = (self._pool.inside.sent_bytes(0) - before) / self._steps
        return {**slowest(answers), "cpu": 1e3 * sum(answer["cpu"] for answer in answers), "sent": sent}

    def restart(self) -> None:
        """Start the ranks again, and build all strategies in them."""
        self._pool.launch()


class _Pool:
    """The rank processes of a setting, in which all strategies are built."""

    def __init__(self, setting: Setting, inside: Network) -> None:
        self.inside = inside
        self._setting = setting
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE}
        self.ranks = Ranks(setting.job("alone"), environment, inside.prefix, "benchmarks.probes.strategies:start")

    def launch(self) -> dict[str, float]:
        """Start the processes. Returns the seconds of a step of each strategy, and of compute alone."""
        self.ranks.launch()
        last = {}
        for peer in ("alone", *self._setting.strategies):
            job = self._setting.job(peer).as_json()
            each = [{"job": job, "rank": rank, "tokens": TOKENS} for rank in range(self._setting.ranks)]
            last[peer] = max(self.ranks.call_each("benchmarks.probes.strategies:build", each))
        return last


def run(options: Options) -> Iterator[Case]:
    """Measure what has not been measured, and predict all of it.

    Raises:
        Skipped: Network namespaces cannot be created here.
    """
    settings = [setting for setting in (QUICK if options.quick else SETTINGS) if options.wants(**asdict(setting))]
    path = options.folder / "prediction" / "measured.json"
    kept = load(path) if options.add else []
    for setting in settings:
        before = next((measured for measured in kept if measured.setting == setting), None)
        if before is not None and before.is_complete:
            continue
        options.report(" ".join(map(str, asdict(setting).values())))
        found = measure_setting(setting, options, before)
        kept = [*(measured for measured in kept if measured is not before), found]
        save(kept, path)
    measured = [one for one in kept if one.setting in settings]
    cases = [case_of(one) for one in measured]
    device = _device(path.with_name("calibration.json"), options)
    for one, case in zip(measured, cases, strict=True):
        options.report(f"predicting {' '.join(map(str, case.tags.values()))}")
        predict(one.setting, case, device)
        yield case
    yield summary(cases)


def _device(path: Path, options: Options) -> Device | str:
    """The calibrated CPU, or why there is none."""
    if not path.exists() or not options.add:
        path.parent.mkdir(parents=True, exist_ok=True)
        options.report("calibrating")
        with network(*CALIBRATION) as inside:
            start = "benchmarks.probes.strategies:start"
            ranks = Ranks(Job("alone", CALIBRATION[0]), {"GLOO_SOCKET_IFNAME": INTERFACE}, inside.prefix, start)
            try:
                ranks.launch()
                ranks.call("benchmarks.probes.strategies:calibrate", path=str(path))
            except WorkerFailure as failure:
                return f"no calibration: {str(failure).splitlines()[0]}"
            finally:
                ranks.close()
    return planner.calibration(path)


def predict(setting: Setting, case: Case, device: Device | str) -> None:
    """Add what the planner predicts, and its error relative to the measured median."""
    for peer, figures in case.figures.items():
        job = setting.job(peer)
        answer: Device | float | str = device
        if not isinstance(device, str):
            question = partial(planner.step_milliseconds, job, TOKENS, setting.rate, setting.latency, device)
            answer = planner.ask(question)
        if isinstance(answer, float):
            case.put(peer, predicted=answer, error=answer / figures["measured"].median - 1)
        elif answer not in case.notes:
            case.notes.append(str(answer))


def summary(cases: list[Case]) -> Case:
    """How well the planner did in all cases that count."""
    listed = [figures for case in cases for figures in case.figures.values() if case.tags["rate"] < FASTEST]
    judged = [figures for figures in listed if figures["judged"].median]
    result = Case({"cases": "all"})
    left_out = 1 - len(judged) / max(1, len(listed))
    result.put(planner.NAME, cases=sum(len(case.figures) for case in cases), judged=len(judged), left_out=left_out)
    result.put(planner.NAME, **planner.accuracy([own["error"].median for own in judged if "error" in own]))
    pairs = wrong = 0
    lost = []
    for case in cases:
        count = {peer: own for peer, own in case.figures.items() if own["judged"].median and "predicted" in own}
        times = {name: {peer: own[name].median for peer, own in count.items()} for name in ("measured", "predicted")}
        if count:
            differ, swapped = planner.ranking(times["measured"], times["predicted"])
            pairs, wrong = pairs + differ, wrong + swapped
            lost.append(planner.lost_by_choice(times["measured"], times["predicted"]))
    if lost:
        result.put(planner.NAME, pairs=pairs, wrong_pairs=wrong, lost_by_choice=max(lost))
    return result


def measure_setting(setting: Setting, options: Options, before: Measured | None = None) -> Measured:
    """Train all strategies of a setting in turns, until those agree, or in addition to those before."""
    rounds = options.number_of_rounds(ROUNDS)
    found = before or Measured(setting, {}, False)
    with network(setting.ranks, f"{setting.rate}mbit", setting.latency / 1e3) as inside:
        pool = _Pool(setting, inside)
        try:
            steps = {peer: max(1, math.ceil(ROUND / seconds)) for peer, seconds in pool.launch().items()}
            turns: dict[str, Contestant] = {peer: Turns(pool, peer, number) for peer, number in steps.items()}
            watch = Quiet(lambda: pool.ranks.cpu_seconds + inside.cpu_seconds)
            limit = math.inf if options.quick else quiet.LIMIT
            while True:
                result = measure(turns, rounds, watch, options.report, limit)
                for peer in turns:
                    found.rounds.setdefault(peer, []).extend(one[peer] for one in result.kept if peer in one)
                found.noisy |= result.noisy
                if options.quick or found.is_complete:
                    return found
        finally:
            pool.ranks.close()


def case_of(measured: Measured) -> Case:
    """The figures of one setting: measured, how far the rounds differ, and whether a strategy counts."""
    case = Case(asdict(measured.setting))
    compute = measured.of("alone", "cpu").median
    for peer in measured.setting.strategies:
        if not measured.rounds[peer]:
            case.notes.append(f"{peer} crashed")
            continue
        step, sent, spread = measured.of(peer, "step"), measured.of(peer, "sent").median, measured.spread(peer)
        communication = (measured.of(peer, "cpu").median - compute) / CORES
        wire = 8e-3 * sent / measured.setting.rate  # bits / (Mbit/s) in milliseconds
        judged = measured.setting.rate < FASTEST and spread <= SPREAD and communication <= wire and not measured.noisy
        case.figures[peer] = {"measured": step}
        case.put(peer, spread=spread, sent=sent, wire=wire, cpu=communication, judged=float(judged))
    if measured.noisy:
        case.notes.append("noisy: other processes were computing during some of these rounds")
    return case


def load(path: Path) -> list[Measured]:
    """Read the measurements that :func:`save` wrote; none if there is no such file."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return [Measured(**{**values, "setting": Setting(**values["setting"])}) for values in found]


def save(measured: list[Measured], path: Path) -> None:
    """Write all measurements."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")
