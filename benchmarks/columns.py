"""The columns of each benchmark's table, on the terminal and in the documentation."""

from dataclasses import dataclass

from benchmarks.figures import ratio
from benchmarks.results import Case

MIB = 1 << 20


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: Its heading, with the unit.
        quantity: The figure.
        scale: The figure is divided by it.
        digits: Digits after the point.
        reference: Divide by this peer's figure and show the ratio.
        spread: Also show quartiles.
    """

    title: str
    quantity: str
    scale: float = 1.0
    digits: int = 1
    reference: str | None = None
    spread: bool = False


def _mib(title: str, quantity: str) -> Column:
    return Column(f"{title}, MiB", quantity, MIB)


COLUMNS: dict[str, tuple[Column, ...]] = {
    "step": (
        Column("step, ms", "step", spread=True),
        Column("/ FSDP2", "step", digits=2, reference="fsdp2", spread=True),
        Column("/ NVIDIA's, ZeRO-3", "step", digits=2, reference="original-3", spread=True),
        Column("/ DDP", "step", digits=2, reference="ddp"),
        Column("forward", "forward"),
        Column("backward", "backward"),
        Column("optimizer", "optimizer"),
    ),
    "network": (
        Column("forward + backward, ms", "compute", spread=True),
        Column("communication alone, ms", "communication"),
        Column("exposed, ms", "exposed"),
        Column("hidden", "hidden", digits=2, spread=True),
        Column("could be hidden", "could_hide", digits=2),
        Column("step, ms", "step"),
    ),
    "memory": (
        _mib("built", "built"),
        _mib("between steps", "resting"),
        Column("/ floor", "resting_over_floor", digits=3),
        Column("/ FSDP2", "resting", digits=2, reference="fsdp2"),
        _mib("peak, forward", "peak_forward"),
        _mib("backward", "peak_backward"),
        _mib("optimizer", "peak_optimizer"),
        _mib("peak of a step", "peak"),
        Column("/ FSDP2", "peak", digits=2, reference="fsdp2"),
        Column("/ NVIDIA's, limited", "peak", digits=2, reference="original-3-limited"),
        _mib("bound", "bound"),
    ),
    "copies": (
        Column("all-gathers", "gathers", digits=0),
        _mib("all-gathered", "gathered_bytes"),
        Column("reductions", "reduces", digits=0),
        _mib("reduced", "reduced_bytes"),
        _mib("copied around all-gathers", "gather_copied_bytes"),
        _mib("copied before reductions", "reduce_copied_bytes"),
        _mib("zeroed before reductions", "reduce_zeroed_bytes"),
        _mib("copied elsewhere", "other_copied_bytes"),
        Column("torch ops beyond the model's", "extra_ops", digits=0),
    ),
    "optimizer": (
        Column("optimizer step, ms", "optimizer", digits=2, spread=True),
        Column("/ FSDP2", "optimizer", digits=2, reference="fsdp2"),
        Column("/ unsharded", "optimizer", digits=2, reference="alone"),
    ),
    "host": (
        Column("host time per unit, us", "host", spread=True),
        Column("/ FSDP2", "host", digits=2, reference="fsdp2"),
        Column("forward", "forward"),
        Column("backward", "backward"),
        Column("optimizer", "optimizer"),
    ),
    "startup": (
        Column("seconds", "seconds", digits=1),
        _mib("peak", "peak"),
        _mib("built", "built"),
        Column("peak / main weights", "peak_over_main", digits=2),
    ),
    "scale": (
        Column("host time per unit, us", "host"),
        _mib("between steps", "resting"),
        _mib("peak", "peak"),
        Column("padding of all-gathers, %", "gather_padding", 0.01, 2),
        Column("padding of reductions, %", "reduce_padding", 0.01, 2),
    ),
    "growth": (
        Column("steps", "steps", digits=0),
        _mib("heap", "heap"),
        Column("heap, bytes per step", "heap_slope", digits=2),
        Column("+-", "heap_error", digits=2),
        Column("resident, bytes per step", "resident_slope", digits=0),
        Column("step, ms", "step", digits=2),
        Column("step, ns per step", "step_slope", digits=1),
        Column("+-", "step_error", digits=1),
    ),
    "loop": (
        Column("tokens/s", "tokens_per_second", digits=0, spread=True),
        Column("/ DDP + distributed optimizer", "tokens_per_second", digits=2, reference="megatron-ddp", spread=True),
    ),
    "prediction": (
        Column("measured, ms", "measured", spread=True),
        Column("predicted, ms", "predicted"),
        Column("error, %", "error", 0.01, 1),
        Column("spread, %", "spread", 0.01, 1),
        Column("on the wire, ms", "wire"),
        Column("gloo's CPU time per core, ms", "cpu"),
        Column("cases", "cases", digits=0),
        Column("judged", "judged", digits=0),
        Column("left out, %", "left_out", 0.01, 0),
        Column("median error, %", "median_error", 0.01, 1),
        Column("worst error, %", "worst_error", 0.01, 1),
        Column("pairs that differ", "pairs", digits=0),
        Column("ranked wrongly", "wrong_pairs", digits=0),
        Column("lost by its choice, %", "lost_by_choice", 0.01, 1),
    ),
    "published": (
        Column("seconds", "seconds", digits=2),
        Column("MFU, %", "mfu", 0.01, 1),
        Column("activations, GiB", "gib"),
        Column("error, %", "error", 0.01, 1),
        Column("median error, %", "median_error", 0.01, 1),
        Column("worst error, %", "worst_error", 0.01, 1),
        Column("rank correlation", "correlation", digits=2),
    ),
    "predicted-memory": (
        _mib("measured peak", "most"),
        _mib("predicted peak", "predicted"),
        Column("difference, %", "error", 0.01, 1),
        _mib("weights", "most_shards"),
        _mib("predicted", "predicted_most_shards"),
        _mib("unsharded units", "most_unsharded_units"),
        _mib("predicted", "predicted_most_unsharded_units"),
        _mib("gradients", "most_gradients"),
        _mib("predicted", "predicted_most_gradients"),
        _mib("optimizer", "most_optimizer"),
        _mib("predicted", "predicted_most_optimizer"),
        _mib("activations", "most_activations"),
        _mib("predicted", "predicted_most_activations"),
        _mib("rest", "most_rest"),
        _mib("heap overhead", "overhead"),
        Column("cells", "cells", digits=0),
        Column("predicted", "predicted_cells", digits=0),
        Column("within 3 %, %", "within", 0.01, 0),
        Column("median error, %", "median_error", 0.01, 1),
        Column("worst error, %", "worst_error", 0.01, 1),
    ),
    "gpu": (
        Column("step, ms", "step", spread=True),
        Column("/ FSDP2", "step", digits=2, reference="fsdp2"),
        _mib("peak", "peak"),
        _mib("between steps", "resting"),
        Column("kernels", "kernels", digits=0),
        Column("idle, %", "idle", 0.01, 1),
    ),
}


def columns_of(benchmark: str, case: Case) -> list[Column]:
    """The columns for which at least one peer has a figure."""
    return [
        column
        for column in COLUMNS[benchmark]
        if any(column.quantity in own for own in case.figures.values())
        and (column.reference is None or column.quantity in case.figures.get(column.reference, {}))
    ]


def cell(column: Column, case: Case, peer: str) -> str:
    """One column's text for one peer."""
    figure = case.figures[peer].get(column.quantity)
    if figure is None:
        return ""
    if column.reference is not None:
        figure = ratio(figure, case.figures[column.reference][column.quantity])
    median, low, high = (f"{x / column.scale:.{column.digits}f}" for x in (figure.median, figure.low, figure.high))
    return f"{median} ({low}-{high})" if column.spread and len(figure.rounds) > 1 else median
