"""Copied bytes, collectives and torch operations per step, on the fake process group."""

from benchmarks.field import Field, field_of
from benchmarks.job import Job
from benchmarks.model import Shape, Transformer
from benchmarks.options import Options
from benchmarks.peers import PEERS
from benchmarks.peers.fused import fused_numel
from benchmarks.results import Case
from benchmarks.workers import WorkerFailure

RANKS = 8
TOKENS = 16
NAMES = tuple(p for p in PEERS if PEERS[p].fake and not PEERS[p].cpu_only and not p.endswith("-hsdp"))
QUICK = ("fsdp2", "original-3", "ours-3", "ours-3-fused")


def run(options: Options) -> list[Case]:
    """Measure one step of every peer, in both dtypes."""
    shape = Shape(width=128, depth=4, heads=4) if options.quick else Shape()
    cases = []
    for dtype in ("bf16",) if options.quick else ("fp32", "bf16"):
        names = dict.fromkeys(["alone", *options.peers(QUICK if options.quick else NAMES)])
        with field_of([Job(name, RANKS, dtype, shape, fake=True) for name in names], options) as field:
            case = Case({"ranks": RANKS, "dtype": dtype, "tokens": TOKENS})
            _look(case, field, shape, dtype)
            cases.append(case)
    return cases


def _look(case: Case, field: Field, shape: Shape, dtype: str) -> None:
    model = Transformer(shape)
    parameters, weights = sum(p.numel() for p in model.parameters()), fused_numel(model)
    found: dict[str, dict[str, float]] = {}
    for peer, ranks in field.running.items():
        try:
            found[peer] = ranks.call("benchmarks.probes.traffic:measure", tokens=TOKENS)[0]
        except WorkerFailure as failure:
            case.notes.append(f"{peer} failed: {str(failure).splitlines()[0]}")
    for peer, reason in field.missing.items():
        case.notes.append(f"{peer} failed: {reason.splitlines()[0]}")
    plain = found.get("alone", {})
    for peer, own in found.items():
        kinds = ("gather_copied", "reduce_copied", "reduce_zeroed", "other_copied")
        own = {**{f"{kind}_bytes": 0.0 for kind in kinds}, **own}
        # Subtract the copies of the plain model, which are not caused by the peer.
        own["other_copied_bytes"] -= plain.get("other_copied_bytes", 0.0) if peer != "alone" else 0.0
        own["extra_ops"] = own["operations"] - plain.get("operations", 0.0)
        if own.get("gathered_bytes"):
            own["gather_copies"] = own["gather_copied_bytes"] / own["gathered_bytes"]
            # The units are the blocks and the root. With ZeRO-3, they are gathered in forward and in backward.
            passes = 2 if peer.split("-")[1:2] == ["3"] or peer == "fsdp2" else 1
            own["gathers_per_unit_and_pass"] = own["gathers"] / (shape.depth + 1) / passes
        if own.get("reduces"):
            own["gradient_writes"] = own["reduce_copied_bytes"] / (4 * parameters)
            if peer.endswith("-fused"):
                # Autograd's gradients, of all but the weights, are copied once in any case.
                copied = own["reduce_copied_bytes"] - 4 * (parameters - weights)
                own["fused_gradient_writes"] = (copied + own["reduce_zeroed_bytes"]) / (4 * weights)
            own["reduces_per_unit"] = own["reduces"] / (shape.depth + 1)
        case.put(peer, **own)
