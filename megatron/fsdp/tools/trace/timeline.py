"""A recording: spans of time per rank, their sums per unit, and the file format of trace viewers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

MILLISECOND = 1e6  # in nanoseconds


class _Text(str, Enum):
    """What ``StrEnum`` is, which Python 3.10 lacks: a member's text is its value."""

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
        size: Bytes of the whole buffer that is communicated; 0 without communication.
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


@dataclass
class Timeline:
    """The recordings of all ranks, collected on the first rank.

    Every rank may call :meth:`save`, :meth:`plot` and :meth:`print`, which do nothing on ranks without a recording.

    Attributes:
        ranks: One recording per rank, in rank order. Empty during the recording, and on ranks whose recording was sent
            to the first rank.
    """

    ranks: list[RankTrace] = field(default_factory=list)

    def exposed(self) -> dict[int, dict[str, float]]:
        """Milliseconds that the computation waited for each unit's communication, by rank and unit."""
        return {trace.rank: {unit: t.exposed for unit, t in trace.per_unit().items()} for trace in self.ranks}

    def mean(self) -> dict[str, UnitTimes]:
        """Times per unit, averaged over the ranks."""
        per_rank = [trace.per_unit() for trace in self.ranks]
        units = self.ranks[0].units if self.ranks else ()
        return {
            unit: UnitTimes(*(sum(values) / len(per_rank) for values in zip(*(r[unit] for r in per_rank), strict=True)))
            for unit in units
        }

    def table(self) -> str:
        """A table of the means per unit, followed by one line per rank with times per kind of activity."""
        if not self.ranks:
            return ""
        mean = self.mean()
        width = max(len("milliseconds"), *(len(unit) for unit in mean))
        titles = ("forward", "backward", "gather", "reduction", "exposed gather", "exposed reduction", "ranks late")
        lines = ["  ".join([f"{'milliseconds':{width}}", *(f"{title:>9}" for title in titles)])]
        totals = UnitTimes(*(sum(values) for values in zip(*mean.values(), strict=True)))
        for unit, times in [*mean.items(), ("sum", totals)]:
            cells = (f"{value:{max(len(title), 9)}.2f}" for value, title in zip(times, titles, strict=True))
            lines.append("  ".join([f"{unit:{width}}", *cells]))
        for trace in self.ranks:
            parts = ", ".join(f"{name} {value:.2f}" for name, value in trace.of_computation().items())
            length = (trace.end - trace.start) / MILLISECOND
            lines.append(f"rank {trace.rank} ({trace.device}): {length:.2f} = {parts}")
        error = max(trace.clock_error for trace in self.ranks) / MILLISECOND
        lines.append("all ranks use the same clock" if error == 0 else f"clocks of ranks agree to {error:.3f} ms")
        return "\n".join(lines)

    def print(self) -> None:
        """Print :meth:`table`."""
        if self.ranks:
            print(self.table(), flush=True)

    def save(self, path: str | Path) -> None:
        """Write the file that https://ui.perfetto.dev and chrome://tracing open."""
        if self.ranks:
            Path(path).write_text(json.dumps(self.as_chrome_trace()) + "\n")

    def plot(self, path: str | Path) -> None:
        """Draw the timeline with matplotlib. The extension of ``path`` determines the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if self.ranks:
            from megatron.fsdp.tools.trace.plot import draw

            draw(self, path)

    def as_chrome_trace(self) -> dict[str, Any]:
        """The recording in the Trace Event Format: a process per rank, a thread per row, times in microseconds."""
        first = min((trace.start for trace in self.ranks), default=0)
        return {
            "traceEvents": [event for trace in self.ranks for event in _events(trace, first)],
            "displayTimeUnit": "ms",
            "otherData": {
                "clock_error_ms": {str(trace.rank): trace.clock_error / MILLISECOND for trace in self.ranks},
                "exposed_ms": {
                    str(rank): {unit: round(exposed, 6) for unit, exposed in units.items()}
                    for rank, units in self.exposed().items()
                },
            },
        }


def _events(trace: RankTrace, first: int) -> Iterator[dict[str, Any]]:
    def metadata(what: str, tid: int, name: str, position: int) -> Iterator[dict[str, Any]]:
        place = {"ph": "M", "pid": trace.rank, "tid": tid}
        yield {**place, "name": f"{what}_name", "args": {"name": name}}
        yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": position}}

    rows = list(Row)
    yield from metadata("process", 0, f"rank {trace.rank} ({trace.device})", trace.rank)
    for tid, row in enumerate(rows):
        yield from metadata("thread", tid, str(row), tid)
    for span in trace.spans:
        arguments: dict[str, Any] = {"unit": span.unit, "pass": "backward" if span.backward else "forward"}
        if span.late:
            arguments["ms until the last rank arrived"] = span.late / MILLISECOND
        if span.size:
            arguments |= {"bytes": span.size, "GB/s": round(span.size / max(span.end - span.start - span.late, 1), 3)}
        yield {
            "ph": "X",
            "name": span.title,
            "cat": str(span.kind),
            "pid": trace.rank,
            "tid": rows.index(span.row),
            "ts": (span.start - first) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": arguments,
        }
        if span.work:
            yield _end_of_arrow(span, trace.rank, rows.index(span.row), first)


def _end_of_arrow(span: Span, pid: int, tid: int, first: int) -> dict[str, Any]:
    """One of the two ends of an arrow from a communication to the computation that waits for it."""
    end = {"name": "awaited", "cat": "awaited", "id": f"{pid}.{span.work}", "pid": pid, "tid": tid}
    if span.row is Row.WAITS:
        # End at the end of the wait, because a wait may start before its communication.
        return {**end, "ph": "f", "bp": "e", "ts": (max(span.end - 1, span.start) - first) / 1e3}
    return {**end, "ph": "s", "ts": (span.start - first) / 1e3}


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
