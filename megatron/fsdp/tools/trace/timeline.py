"""The recordings of all ranks: a table, and the file format of trace viewers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.fsdp.tools.trace.spans import MILLISECOND, RankTrace, Row, Span, UnitTimes, mean_of


@dataclass
class Timeline:
    """The recordings of all ranks, collected on the first rank.

    Every rank may call :meth:`save` and :meth:`print`, which do nothing on ranks without a recording.

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
        return mean_of(self.ranks)

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
