"""The performance targets of this project's FSDP relative to its peers, and the verdicts on a run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.figures import Summary, ratio
from benchmarks.results import Case, Result


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        benchmark: Name of the benchmark.
        peer: Name of the peer.
        quantity: Name of the quantity.
        limit: Limit of the value or of the ratio.
        reference: Peer to divide by; None: the limit holds for the value itself.
        at_least: Whether it is a lower limit.
        where: Tags of the cases that it applies to, each with the allowed values.
        within_spread: Whether it is enough that the closer quartile meets the limit.
    """

    benchmark: str
    peer: str
    quantity: str
    limit: float
    reference: str | None = None
    at_least: bool = False
    where: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    within_spread: bool = False

    @property
    def text(self) -> str:
        """The target in words."""
        what = f"{self.quantity} of {self.peer}" + (f" / {self.reference}" if self.reference else "")
        sign = ">=" if self.at_least else "<="
        return f"{what} {sign} {self.limit:g}" + (" within the spread" if self.within_spread else "")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one target in one case.

    Attributes:
        target: The target in words.
        benchmark: Name of the benchmark.
        case: The case in words; empty if the target applies to no case of the run.
        value: The measured value; None if there is none.
        outcome: "met", "missed" or "not measured".
    """

    target: str
    benchmark: str
    case: str
    value: float | None
    outcome: str

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


# The tag of cases in which only some of the peers were measured.
PART = "part"
HEAVY = {"load": ("communication-heavy", "balanced")}
LIGHT = {"load": ("compute-heavy",)}
ALL_CASES = {"cases": ("all",)}
MIXED = {"dtype": ("bf16",)}

TARGETS: tuple[Target, ...] = (
    Target("step", "ours-3", "step", 0.80, "fsdp2", where=HEAVY),
    Target("step", "ours-3", "step", 0.92, "original-3", where=HEAVY),
    Target("step", "ours-3", "step", 1.0, "fsdp2", where=LIGHT, within_spread=True),
    Target("step", "ours-3", "step", 1.0, "original-3", where=LIGHT, within_spread=True),
    Target("step", "ours-1", "step", 0.90, "original-1", where=HEAVY),
    Target("step", "ours-2", "step", 0.90, "original-2", where=HEAVY),
    Target("step", "ours-0", "step", 1.0, "ddp"),
    Target("network", "ours-3", "hidden", 0.70, at_least=True),
    Target("network", "ours-1", "hidden", 0.80, at_least=True),
    Target("network", "ours-2", "hidden", 0.80, at_least=True),
    Target("memory", "ours-3", "resting_over_floor", 1.02, where={**MIXED, "ranks": (8,)}),
    Target("memory", "ours-3", "resting", 1.0, "fsdp2", where={**MIXED, "ranks": (64, 512)}),
    Target("memory", "ours-3", "peak", 0.95, "fsdp2", where={**MIXED, "ranks": (8,)}),
    Target("memory", "ours-3", "peak", 0.80, "fsdp2", where={**MIXED, "ranks": (64, 512)}),
    Target("memory", "ours-3", "peak", 0.70, "original-3-limited", where=MIXED),
    Target("copies", "ours-3", "gather_copies", 0.0),
    Target("copies", "ours-3", "gradient_writes", 1.0),
    # The layout's padding is zeroed, which is at most 1 %.
    Target("copies", "ours-3-fused", "fused_gradient_writes", 0.01),
    Target("copies", "ours-3", "gathers_per_unit_and_pass", 1.0),
    Target("copies", "ours-3", "reduces_per_unit", 1.0),
    Target("optimizer", "ours-3", "optimizer", 1 / 3, "fsdp2"),
    Target("host", "ours-3", "host", 0.5, "fsdp2"),
    Target("growth", "ours-3", "memory_grows", 0.0),
    Target("growth", "ours-3", "time_grows", 0.0),
    Target("loop", "ours-1", "tokens_per_second", 1.0, "megatron-ddp", at_least=True),
    Target("loop", "ours-2", "tokens_per_second", 1.0, "megatron-ddp", at_least=True),
    Target("prediction", "planner", "median_error", 0.06, where=ALL_CASES),
    Target("prediction", "planner", "worst_error", 0.15, where=ALL_CASES),
    Target("prediction", "planner", "wrong_pairs", 0.0, where=ALL_CASES),
    Target("prediction", "planner", "left_out", 0.30, where=ALL_CASES),
    Target("prediction", "planner", "lost_by_choice", 0.05, where=ALL_CASES),
    Target("predicted-memory", "planner", "worst_error", 0.03, where={"models": ("all",)}),
)


def judge(result: Result, table: tuple[Target, ...] = TARGETS) -> list[Verdict]:
    """The verdicts on every target of one benchmark, in every case that it applies to."""
    verdicts = []
    for target in table:
        if target.benchmark != result.benchmark:
            continue
        cases = [case for case in result.cases if _is_about(target, case)]
        found = [case for case in cases if measured(target, case) is not None]
        elsewhere = [_setting(case) for case in found]
        cases = [case for case in cases if case in found or (PART not in case.tags and _setting(case) not in elsewhere)]
        verdicts += [_judge(target, case) for case in cases]
        if not cases:
            verdicts.append(Verdict(target.text, target.benchmark, result.skipped, None, "not measured"))
    return verdicts


def _setting(case: Case) -> dict[str, Any]:
    """The load of a case, without the tag for the selection of peers."""
    return {tag: value for tag, value in case.tags.items() if tag != PART}


def judge_all(results: Mapping[str, Result], table: tuple[Target, ...] = TARGETS) -> list[Verdict]:
    """The verdicts on all targets, including those of benchmarks that did not run."""
    verdicts = []
    for name in dict.fromkeys(target.benchmark for target in table):
        verdicts += judge(results.get(name, Result(name)), table)
    return verdicts


def _is_about(target: Target, case: Case) -> bool:
    return all(case.tags.get(tag) in allowed for tag, allowed in target.where.items())


def _judge(target: Target, case: Case) -> Verdict:
    value = measured(target, case)
    words = ", ".join(f"{tag} {value}" for tag, value in case.tags.items())
    if value is None:
        return Verdict(target.text, target.benchmark, words, None, "not measured")
    near = value.median
    if target.within_spread:
        near = value.high if target.at_least else value.low
    keeps: Callable[[float], bool] = lambda x: x >= target.limit if target.at_least else x <= target.limit  # noqa: E731
    # Bytes and counts are exact, but their ratios are rounded.
    met = keeps(near) or abs(near - target.limit) <= 1e-9
    return Verdict(target.text, target.benchmark, words, value.median, "met" if met else "missed")


def measured(target: Target, case: Case) -> Summary | None:
    """The value or ratio of a target; None if it was not measured."""
    figure = case.figures.get(target.peer, {}).get(target.quantity)
    if figure is None or target.reference is None:
        return figure
    reference = case.figures.get(target.reference, {}).get(target.quantity)
    return None if reference is None else ratio(figure, reference)
