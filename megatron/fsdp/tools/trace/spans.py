"""A recording: spans of time per rank, and their sums per unit."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

MILLISECOND = 1e6  # in nanoseconds


class _Text(str, Enum):
    """A ``StrEnum``, which Python 3.10 lacks: a member's text is its value."""

    __str__ = str.__str__


class Row(_Text):
    """The row in which a span is drawn. Spans of one row do not overlap."""

    COMPUTE = "compute"
    WAITS = "waits"
    GATHERS = "gathers"
    REDUCTIONS = "reductions"


class Kind(_Text):
    """The kind of a span. In the row of waits, it is the kind of communication that is waited for."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"
    ENGINE = "engine"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside"
    GATHER = "gather"
    REDUCTION = "reduction"
    OTHER = "other communication"


class Span(NamedTuple):
    """A period of computation, communication or waiting.

    Attributes:
        row: Row that it is drawn in.
        kind: Its kind.
        unit: Label of its unit; empty if it belongs to none.
        backward: Whether it was issued during a backward pass.
        start: Start in nanoseconds on the first rank's clock.
        end: End in nanoseconds on the first rank's clock.
        size: Bytes of the full buffer that is communicated; 0 without communication.
        work: Number of the communication on this rank; 0 without communication.
        late: Nanoseconds from the start until the last rank has arrived at the communication.
    """

    row: Row
    kind: Kind
    unit: str
    backward: bool
    start: int
    end: int
    size: int = 0
    work: int = 0
    late: int = 0

    @property
    def milliseconds(self) -> float:
        """Duration in milliseconds."""
        return (self.end - self.start) / MILLISECOND

    @property
    def title(self) -> str:
        """The label in a trace viewer."""
        return " ".join(filter(None, ["wait:" if self.row is Row.WAITS else "", self.kind, self.unit]))


class UnitTimes(NamedTuple):
    """Milliseconds of one unit on one rank.

    Attributes:
        forward: Computing its forward, without units inside it.
        backward: Computing its backward, including recomputation.
        gather: All-gathers of its weights, including the wait for other ranks.
        reduction: Reductions of its gradients, including the wait for other ranks.
        exposed_gather: Computation waiting for an all-gather of its weights.
        exposed_reduction: Computation waiting for a reduction of its gradients.
        late: The part of the exposed times in which another rank had not arrived at the collective.
    """

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    reduction: float = 0.0
    exposed_gather: float = 0.0
    exposed_reduction: float = 0.0
    late: float = 0.0

    @property
    def exposed(self) -> float:
        """Computation waiting for any communication of the unit."""
        return self.exposed_gather + self.exposed_reduction

    @property
    def parts(self) -> dict[str, float]:
        """The computation's seconds by what takes them."""
        times = {"compute": self.forward + self.backward, "unshard": self.exposed_gather}
        return {name: time / 1e3 for name, time in {**times, "reduce": self.exposed_reduction}.items()}


_COLUMN = {
    (Row.COMPUTE, Kind.FORWARD): "forward",
    (Row.COMPUTE, Kind.BACKWARD): "backward",
    (Row.COMPUTE, Kind.RECOMPUTATION): "backward",
    (Row.GATHERS, Kind.GATHER): "gather",
    (Row.REDUCTIONS, Kind.REDUCTION): "reduction",
    (Row.WAITS, Kind.GATHER): "exposed_gather",
    (Row.WAITS, Kind.REDUCTION): "exposed_reduction",
}


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank.

    Attributes:
        rank: Global rank.
        device: Name of its device.
        units: Labels of the model's units, in the order of registration.
        start: Start of the recording, in nanoseconds.
        end: End of the recording, in nanoseconds.
        spans: All spans, ordered by start.
        clock_error: Upper bound of the error of times against the first rank's clock, in nanoseconds.
        all_meet: Whether all recorded ranks take part in every all-gather and reduction.
    """

    rank: int
    device: str
    units: tuple[str, ...]
    start: int
    end: int
    spans: tuple[Span, ...]
    clock_error: int
    all_meet: bool

    def shifted(self, nanoseconds: int, error: int) -> "RankTrace":
        """The recording on a clock that is ahead by ``nanoseconds``, with an error of up to ``error`` nanoseconds."""
        spans = tuple(span._replace(start=span.start + nanoseconds, end=span.end + nanoseconds) for span in self.spans)
        start, end = self.start + nanoseconds, self.end + nanoseconds
        return replace(self, start=start, end=end, spans=spans, clock_error=self.clock_error + error)

    def per_unit(self) -> dict[str, UnitTimes]:
        """Sums per unit, in the order of registration."""
        sums: dict[str, dict[str, float]] = {unit: {} for unit in self.units}
        for span in self.spans:
            column = _COLUMN.get((span.row, span.kind))
            if column is not None and span.unit in sums:
                of_unit = sums[span.unit]
                of_unit[column] = of_unit.get(column, 0.0) + span.milliseconds
                if span.row is Row.WAITS:
                    of_unit["late"] = of_unit.get("late", 0.0) + span.late / MILLISECOND
        return {unit: UnitTimes(**columns) for unit, columns in sums.items()}

    def of_computation(self) -> dict[str, float]:
        """Milliseconds per kind of activity of the computation. They add up to the length of the recording."""
        sums = dict.fromkeys(["computing", "engine", "optimizer", "outside", "waiting"], 0.0)
        for span in self.spans:
            if span.row is Row.WAITS:
                sums["waiting"] += span.milliseconds
            elif span.row is Row.COMPUTE:
                sums[str(span.kind) if str(span.kind) in sums else "computing"] += span.milliseconds
        return sums


def mean_of(traces: list[RankTrace]) -> dict[str, UnitTimes]:
    """Times per unit, averaged over the ranks."""
    per_rank = [trace.per_unit() for trace in traces]
    units = traces[0].units if traces else ()
    return {
        unit: UnitTimes(*(sum(values) / len(per_rank) for values in zip(*(r[unit] for r in per_rank), strict=True)))
        for unit in units
    }


def mark_late_ranks(traces: list[RankTrace]) -> list[RankTrace]:
    """Set ``late`` in every span of communication and of waiting for it.

    All ranks issue communication in the same order, so the n-th all-gather of a unit is the same one on every rank.
    """
    if len(traces) < 2 or not all(trace.all_meet for trace in traces):
        return traces
    arrivals: dict[tuple[Kind, str, int, int], list[int]] = {}
    keys: list[dict[int, tuple[Kind, str, int, int]]] = []
    for trace in traces:
        counts: dict[tuple[Kind, str, int], int] = {}
        keys.append({})
        for span in sorted(trace.spans, key=lambda s: s.work):
            if span.row in (Row.GATHERS, Row.REDUCTIONS) and span.kind is not Kind.OTHER:
                what = (span.kind, span.unit, span.size)
                counts[what] = counts.get(what, 0) + 1
                key = keys[-1][span.work] = (*what, counts[what])
                arrivals.setdefault(key, []).append(span.start)
    last = {key: max(times) for key, times in arrivals.items() if len(times) == len(traces)}

    def with_late(span: Span, key: tuple[Kind, str, int, int] | None) -> Span:
        if key is None or key not in last:
            return span
        return span._replace(late=max(0, min(span.end, last[key]) - span.start))

    return [
        replace(trace, spans=tuple(with_late(span, of_work.get(span.work)) for span in trace.spans))
        for trace, of_work in zip(traces, keys, strict=True)
    ]
