"""Finds the fastest settings of a Megatron command line, or strategy of your model, by predictions without GPUs.

    megatron-fsdp-plan --gpus 1024 --gpu h100 [--explain] [-m] pretrain_gpt.py ARGS...
    megatron-fsdp-plan --model file.py:build --units Block --ranks 8 64 --gpu h100
    megatron-fsdp-plan --model path/of/a/config.json --ranks 64 --gpu h100 --json
    megatron-fsdp-plan --calibrate machine.json
    megatron-fsdp-plan --model file.py:build --ranks 2 --machine machine.json --strategy 3 --audit trace.json

Of a command line, parallelism, micro-batch, recomputation, strategy and HSDP are varied, as Megatron and this engine
accept them. The engine runs on tensors without memory, so one process stands for any number of ranks. Ctrl-C prints
what has been found so far. Speeds of GPUs and links are assumptions that docs/guide/doctor.md names, and times are
simulated. If shapes in the model depend on values, only the memory without activations is printed.
The exit code is 0, 1 if the command line is refused, 2 for wrong arguments, or 3 if nothing fits.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.sharding.precision import MixedPrecisionPolicy
from megatron.fsdp.sharding.strategy import INNER
from megatron.fsdp.tools import program, script
from megatron.fsdp.tools.devices import GIB, parse_memory, positive, reported
from megatron.fsdp.tools.estimate import AxisSizes, estimate_outline, outline, usage
from megatron.fsdp.tools.fit import comparison, with_overhead
from megatron.fsdp.tools.predict import Calibration, Link, Prediction, Topology, calibrate, predict, search
from megatron.fsdp.tools.predict.machine import SPEEDS, Cluster, cluster_of
from megatron.fsdp.tools.predict.space import SETTINGS
from megatron.fsdp.tools.progress import Progress
from megatron.fsdp.tools.trace.spans import Kind, Row, UnitTimes
from megatron.fsdp.tools.trace.timeline import Timeline


@dataclass(frozen=True)
class Choice:
    """One way to shard a model, and its prediction.

    Attributes:
        name: Of the strategy.
        arguments: Those of ``fully_shard`` that choose it.
        ranks: The data-parallel ranks.
        prediction: One step.
        memory: Bytes of the device that it takes, with what the driver, NCCL and fragmentation add.
        capacity: Bytes of the device; None if that does not matter.
    """

    name: str
    arguments: str
    ranks: Topology
    prediction: Prediction
    memory: int
    capacity: int | None

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.capacity is None or self.memory <= self.capacity

    @property
    def verdict(self) -> str:
        """Whether it fits, and the bytes that are left or missing."""
        if self.capacity is None:
            return ""
        return comparison(self.memory, self.capacity)

    @property
    def bound(self) -> str:
        """The activity that the computation spends most of its time on."""
        times = {"compute": 0.0, "optimizer": 0.0, "unshard": 0.0, "reduce": 0.0, "other communication": 0.0}
        for span in self.prediction.trace.spans:
            if span.row is Row.COMPUTE:
                times["optimizer" if span.kind is Kind.OPTIMIZER else "compute"] += span.milliseconds
            elif span.row is Row.WAITS:
                of = {"all-gather": "unshard", "gather": "unshard", "reduction": "reduce"}
                times[of.get(str(span.kind), "other communication")] += span.milliseconds
        return max(times, key=lambda name: times[name])


def without_activations(
    model: nn.Module, units: Sequence[type[nn.Module]], ranks: int, policy: MixedPrecisionPolicy, per_host: int
) -> dict[str, int]:
    """Bytes at the peak of a step without activations, by strategy. The model may be on the meta device."""
    found, shapes = {}, outline(model, tuple(units), FSDPConfig())
    for name, settings, axes in candidates(ranks, per_host):
        config, sizes = FSDPConfig(mixed_precision_policy=policy, **settings), AxisSizes(axes.inner, axes.outer)
        found[name] = usage([estimate_outline(shapes, config, sizes, sizes)], config).total
    return found


def candidates(ranks: int, per_host: int) -> Iterator[tuple[str, dict[str, Any], Topology]]:
    """Name, arguments of ``fully_shard`` and axes of every way to shard over a number of ranks."""
    for name in INNER:
        yield name, {"zero_dp_strategy": name}, Topology(ranks)
    yield "offloaded", {"zero_dp_strategy": 3, "offload_optimizer": True}, Topology(ranks)
    inner = per_host
    while inner < ranks and ranks % inner == 0:
        for title, outer in (("HSDP", "no_shard"), ("hybrid FSDP", "optim")):
            settings = {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": outer}
            yield f"{title} {ranks // inner} x {inner}", settings, Topology(inner, ranks // inner)
        inner *= 2


def plan(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    units: Sequence[type[nn.Module] | str],
    ranks: int,
    cluster: Cluster,
    policy: MixedPrecisionPolicy | None = None,
    on_choice: Callable[[Choice], None] | None = None,
    **more: Any,
) -> list[Choice]:
    """Predict every way to shard a model, the fastest that fits first.

    Args:
        model_fn: See :func:`megatron.fsdp.tools.predict.predict`.
        batch_fn: See there.
        units: See there.
        ranks: Number of data-parallel ranks.
        cluster: GPUs and their links.
        policy: Dtypes.
        on_choice: Called with each result when it is found.
        more: ``optimizer`` (or AdamW), ``loss`` and ``micro_batches`` of ``predict``.
    """
    found = []
    more.setdefault("optimizer", torch.optim.AdamW)
    on_device = cluster.device.runs_ahead
    for name, settings, axes in candidates(ranks, cluster.per_host):
        if "offload_optimizer" in settings and not cluster.device.offload:
            continue
        config = FSDPConfig(mixed_precision_policy=policy or MixedPrecisionPolicy(), **settings)
        of_step: dict[str, Any] = {"config": config, "units": units, "ranks": axes, "device": cluster.device}
        predicted = predict(model_fn, batch_fn, link=cluster.link_of, **of_step, **more)
        arguments = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        arguments += f", mesh ({axes.outer}, {axes.inner})" if axes.outer > 1 else ""
        taken = with_overhead(predicted.peak.total) if on_device else predicted.peak.total
        found.append(Choice(name, arguments, axes, predicted, taken, cluster.device.memory))
        if on_choice is not None:
            on_choice(found[-1])
    return ordered(found)


def ordered(choices: list[Choice]) -> list[Choice]:
    """The fastest that fits first; then those that do not fit, the closest first."""
    return sorted(choices, key=lambda c: (not c.fits, c.prediction.step_seconds if c.fits else c.memory))


def table(choices: Sequence[Choice]) -> str:
    """The choices as text."""
    speed = "step, ms", "tokens/s per GPU", "MFU"
    rows: list[Sequence[str]] = [("strategy", *speed, "GiB", *script.MEMORY, "waits, ms", "bound by", "")]
    for c in choices:
        found = c.prediction
        tokens = f"{found.tokens / found.step_seconds:,.0f}" if found.tokens else "-"
        waits = sum(span.milliseconds for span in c.prediction.trace.spans if span.row is Row.WAITS)
        cells = (f"{found.step_seconds * 1e3:.2f}", tokens, f"{found.mfu:.1%}", f"{c.memory / GIB:.2f}")
        peak = script.memory_columns(found.peak.bytes)
        rows.append((c.name, *cells, *peak, f"{waits:.2f}", c.bound, c.verdict))
    return search.aligned(rows)


def per_unit(choice: Choice) -> str:
    """Seconds of every unit by what takes them, as text."""
    rows: list[Sequence[str]] = [("unit", "compute, s", "unshard, s", "reduce, s", "bound by")]
    for unit, times in choice.prediction.trace.per_unit().items():
        parts = times.parts
        rows.append((unit, *(f"{part:.5f}" for part in parts.values()), max(parts, key=parts.__getitem__)))
    rest = choice.prediction.trace.of_computation()
    rows += [(name, f"{rest[name] / 1e3:.5f}", "", "", "") for name in ("outside", "engine", "optimizer")]
    return search.aligned(rows)


def audit(choice: Choice, path: Path) -> str:
    """A table of milliseconds per unit, predicted and measured, from a file that ``trace`` has written.

    Raises:
        ValueError: The file has other units.
    """
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    ranks = len({e["pid"] for e in events})
    measured: dict[str, dict[str, float]] = {}
    columns = {"forward": "forward", "backward": "backward", "recomputation": "backward"}
    for event in (e for e in events if e["ph"] == "X"):
        row, kind = rows[event["tid"]], event["cat"]
        of_row = {str(Row.COMPUTE): columns.get(kind), str(Row.GATHERS): "gather", str(Row.REDUCTIONS): "reduction"}
        of_row[str(Row.WAITS)] = "exposed_reduction" if kind == "reduction" else "exposed_gather"
        if (column := of_row[row]) is not None and event["args"]["unit"]:
            of_unit = measured.setdefault(event["args"]["unit"], {})
            of_unit[column] = of_unit.get(column, 0.0) + event["dur"] / 1e3 / ranks
    predicted = choice.prediction.trace.per_unit()
    if not measured.keys() <= predicted.keys():
        raise ValueError(f"{path} has units {sorted(measured)}; the model has {sorted(predicted)}.")
    names = UnitTimes._fields[:-1]
    lines = ["predicted / measured, ms  " + "  ".join(names)]
    for unit, times in predicted.items():
        cells = (f"{getattr(times, name):.2f} / {measured.get(unit, {}).get(name, 0.0):.2f}" for name in names)
        lines.append(f"{unit}  " + "  ".join(cells))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = script.parser("megatron-fsdp-plan", __doc__)
    number = reported(positive)
    parser.add_argument("--gpus", type=number, default=8, help="number of GPUs of a Megatron command line (or 8)")
    goals = ("tokens_per_second", "memory")
    parser.add_argument("--goal", choices=goals, default=goals[0], help="of a command line (or tokens_per_second)")
    parser.add_argument("--seconds", type=float, default=600, help="most time to search a command line (or 600)")
    parser.add_argument(
        "--keep", default="", metavar="FLAGS", help="do not change these, as in fp8-format,micro-batch-size"
    )
    parser.add_argument("--explain", action="store_true", help="say where the time of your command line or units goes")
    parser.add_argument("--model", help="file.py:function or module:function, or a Hugging Face config.json")
    parser.add_argument("--units", nargs="+", default=[], metavar="CLASS", help="classes of units (or the layers')")
    parser.add_argument("--ranks", type=number, nargs="+", default=[8], help="numbers of data-parallel ranks (or 8)")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--gpu", default="h100", help=f"one of {', '.join(SPEEDS)} (or h100)")
    size = reported(parse_memory)
    parser.add_argument("--device-memory", type=size, metavar="SIZE", help="instead of the GPU's, as in 64GiB")
    parser.add_argument("--network", type=size, metavar="SIZE", help="bytes per second of a GPU's own card, as in 50GB")
    parser.add_argument("--per-host", type=number, metavar="N", help="GPUs that NVLink connects")
    of_sites = ("N", "SIZE", "SECONDS")
    sites = "data centers, bytes per second of the line that joins two, and its latency, as in 2 12.5GB 0.02"
    parser.add_argument("--sites", nargs=3, metavar=of_sites, help=sites)
    machine.add_argument("--machine", type=Path, metavar="FILE", help="a file that --calibrate has written")
    parser.add_argument("--dtype", choices=program.DTYPES, default="bf16", help="of the compute weights (or bf16)")
    parser.add_argument("--main-dtype", choices=program.DTYPES, default="fp32", help="of the main weights (or fp32)")
    parser.add_argument("--grad-dtype", choices=program.DTYPES, help="of summed and reduced gradients")
    shape = ("SEQUENCES", "LENGTH")
    parser.add_argument("--tokens", type=number, nargs=2, default=[2, 16], metavar=shape, help="of a batch (or 2 16)")
    parser.add_argument("--micro-batches", type=number, default=1, help="per step (or 1)")
    chosen = [*INNER, "0", "1", "2", "3"]
    parser.add_argument("--strategy", choices=chosen, help="the one of --audit and --trace (or the best)")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine, and write the result")
    parser.add_argument("--audit", type=Path, metavar="TRACE", help="compare with a trace.json of a real step")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="save the predicted step of a model, as trace does")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _cluster(options: argparse.Namespace, ranks: int) -> Cluster:
    if options.machine is None:
        found = cluster_of(options.gpu)
        device = dataclasses.replace(found.device, memory=options.device_memory or found.device.memory)
        per_host, between = options.per_host or found.per_host, float(options.network or found.between)
        if options.sites is None:
            return Cluster(device, per_host, found.inside, between)
        try:
            sites, rate, latency = int(options.sites[0]), parse_memory(options.sites[1]), float(options.sites[2])
        except ValueError as error:
            expected = "a number, bytes per second and seconds, as in 2 12.5GB 0.02"
            raise ValueError(f"--sites: expected {expected}; got {' '.join(options.sites)}.") from error
        if sites < 2 or ranks % (sites * per_host):
            raise ValueError(f"--sites {sites}: expected at least 2, with the same number of hosts; got {ranks} GPUs.")
        return Cluster(device, per_host, found.inside, between, ranks // sites, (float(rate), latency))
    if options.device_memory or options.network or options.per_host or options.sites:
        raise ValueError("--device-memory, --network, --per-host, --sites: a --machine has its own.")
    measured = Calibration.load(options.machine)
    link = measured.link or Link("not measured", measured.device.bandwidth / 2, 1e-5)
    return Cluster(measured.device, ranks, link.bandwidth, link.bandwidth)


def main() -> int:
    """Search, and print the choices. Returns the exit code."""
    parser = _parser()
    options = script.parse(parser, "model", "calibrate")
    if options.calibrate is not None:
        calibrate().save(options.calibrate)
        return 0
    try:
        if options.script is not None:
            return _search_command(options)
        strategies = _Search(options)
        try:
            choices = strategies.choices()
        except NotImplementedError as error:
            print(f"Without times and activations: {error}\n{strategies.table_without_activations()}")
            return 0
        _print(options, choices)
    except (ValueError, OSError, KeyError) as error:
        parser.error(str(error))
    return 0 if any(choice.fits for of_ranks in choices for choice in of_ranks) else 3


def _kept(names: str) -> list[str]:
    """The flags that --keep names."""
    keep = [f"--{flag.strip().lstrip('-')}" for flag in names.split(",") if flag.strip()]
    varied = {flag: None for values in SETTINGS.values() for value in values for flag in value}
    if not varied.keys() >= {*keep}:
        raise ValueError(f"--keep {names}: expected some of {', '.join(varied).replace('--', '')}.")
    return keep


def _search_command(options: argparse.Namespace) -> int:
    """Search the settings of a command line, and print the best. Returns the exit code."""
    if options.machine is not None:
        raise ValueError("--machine: a command line is predicted for GPUs. Give --gpu.")
    if options.trace is not None:
        raise ValueError("--trace: only the step of a --model can be saved.")
    progress = Progress(sys.stderr)

    def show(_: search.Candidate) -> None:
        best = next((each for each in found.ordered() if each.step and each.fits), None)
        text = (
            f"{best.step.tokens_per_second:,.0f} tokens/s ({best.text})" if best and best.step else "nothing fits yet"
        )
        progress.start(f"{len(found.found)} command lines, the best: {text}")

    cluster = _cluster(options, options.gpus)
    script_and_ranks = options.script, options.arguments, options.gpus
    found = search.Search(*script_and_ranks, cluster, options.goal, options.seconds, show, _kept(options.keep))
    progress.start("predicting your command line")
    try:
        found.run()
    except KeyboardInterrupt:
        print("interrupted: the best so far", file=sys.stderr)
    progress.end()
    best, own = found.ordered(), found.own
    if not best or (own and own.refusal):
        print(f"ERROR  {own.refusal if own else 'interrupted before anything was predicted'}")
        return 1
    shown = best[: search.SHOWN]
    shown += [own] if own and own not in shown else []
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in shown], indent=2))
    else:
        predicted = f"{len(found.found)} command lines, by estimates of {found.combinations:,} from these"
        print(f"{options.gpus} {options.gpu}: simulated, the best of {predicted}")
        print(search.table(shown, options.gpus))
        if options.explain and own:
            print(search.explained(own, best[0]))
        print(
            f"The best: {shlex.join([*(['-m'] if options.is_module else []), str(options.script), *best[0].arguments])}"
        )
    return 0 if best[0].fits else 3


def _print(options: argparse.Namespace, choices: list[list[Choice]]) -> None:
    names = [options.strategy, list(INNER)[int(options.strategy)] if str(options.strategy).isdigit() else ""]
    first = choices[0] if choices else []
    chosen = [*(c for c in first if c.name in names), *first][:1]
    if options.trace is not None:
        Timeline([c.prediction.trace for c in chosen]).save(options.trace)
    if options.audit is not None and chosen:
        print(audit(chosen[0], options.audit))
    elif options.json:
        print(json.dumps([_as_dict(choice) for of_ranks in choices for choice in of_ranks], indent=2))
    else:
        for best, *others in choices:
            print(f"{best.ranks.size} ranks\n{table([best, *others])}")
            if options.explain:
                print(per_unit(best))
            closest = "The best" if best.fits else "Nothing fits. The closest"
            print(f"Simulated. {closest}: fully_shard(..., {best.arguments})")


class _Search:
    """The program that ``--model`` names, and the predictions of it.

    Raises:
        ValueError: It names none.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._progress = options, Progress(sys.stderr)
        self._program = self._load("meta")
        self._units = program.unit_classes(self._program.model, options.units)
        dtypes = {"main_params_dtype": program.DTYPES[options.main_dtype]}
        if options.grad_dtype is not None:
            dtypes["main_grads_dtype"] = program.DTYPES[options.grad_dtype]
        self._policy = MixedPrecisionPolicy(**dtypes)

    def _load(self, device: str) -> program.Program:
        with torch.device(device):
            found = program.load(self._options.model)
        found.model.to(program.DTYPES[self._options.dtype])
        return found

    def _model(self) -> nn.Module:
        self._program = self._load("cpu")
        return self._program.model

    def choices(self) -> list[list[Choice]]:
        """The best for each number of ranks (all for JSON), or of those that were found before Ctrl-C."""
        found: list[list[Choice]] = []
        try:
            for ranks in self._options.ranks:
                found.append([])
                self._run(ranks, found[-1])
        except KeyboardInterrupt:
            print("interrupted: the best so far", file=sys.stderr)
        finally:
            self._progress.end()
        shown = None if self._options.json else search.SHOWN
        return [ordered(of_ranks)[:shown] for of_ranks in found if of_ranks]

    def _run(self, ranks: int, found: list[Choice]) -> None:
        """Predict every strategy, and append the choices."""

        def show(choice: Choice) -> None:
            found.append(choice)
            self._progress.start(f"{choice.name}: {choice.prediction.step_seconds * 1e3:.2f} ms; predicting the next")

        self._progress.start(f"{ranks} ranks: predicting the first strategy")
        plan(
            self._model,
            lambda: self._program.first_batches(1, tuple(self._options.tokens))[0],
            units=self._units,
            ranks=ranks,
            cluster=_cluster(self._options, ranks),
            policy=self._policy,
            on_choice=show,
            loss=lambda module, batch: self._program.loss(module, batch),
            micro_batches=self._options.micro_batches,
        )

    def table_without_activations(self) -> str:
        """GiB of every strategy."""
        model = self._load("meta").model
        rows = []
        for ranks in self._options.ranks:
            per_host = _cluster(self._options, ranks).per_host
            found = without_activations(model, self._units, ranks, self._policy, per_host)
            rows += [f"{ranks:>6} ranks  {name:<20}{size / GIB:>8.2f} GiB" for name, size in found.items()]
        return "\n".join(rows)


def _as_dict(choice: Choice) -> dict[str, Any]:
    predicted = choice.prediction
    return {
        "strategy": choice.name,
        "arguments": choice.arguments,
        "ranks": choice.ranks.size,
        "axes": dataclasses.asdict(choice.ranks),
        "step_seconds": predicted.step_seconds,
        "tokens": predicted.tokens,
        "mfu": predicted.mfu,
        "units": {unit: times.parts for unit, times in predicted.trace.per_unit().items()},
        "memory": choice.memory,
        "peak": predicted.peak.bytes,
        "module_of_peak": predicted.peak.module,
        "bound": choice.bound,
        "fits": choice.fits,
        "verdict": choice.verdict,
    }


if __name__ == "__main__":
    sys.exit(main())
