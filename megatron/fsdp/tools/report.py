"""The doctor's report, for people and for programs."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.helpers.import_name import conflict
from megatron.fsdp.mcore.limits import Limit
from megatron.fsdp.tools.devices import GIB
from megatron.fsdp.tools.estimate import Estimate, Outline, usage
from megatron.fsdp.tools.fit import CONTEXT, FRAGMENTATION, NCCL, Situation, Verdict
from megatron.fsdp.tools.recipes import Recipe
from megatron.fsdp.tools.script import CommandStep

HOW_TO_ASK = "add --gpu h100 or --device-memory 80GB (before the script) to compare with a device"


@dataclass
class Report:
    """The result of an examination.

    Attributes:
        world_size: Number of ranks.
        limits: Unsupported settings.
        refusal: The error of Megatron or of the script, if one ended it.
        sizes: Number of ranks of each kind of parallelism.
        config: Settings of the engine.
        chunks: Model chunks of this pipeline stage.
        uses_fsdp: Whether the command line selects FSDP.
        recipe: How weights are quantized; None if they are not.
        muon: Whether the optimizer of matrices is Muon.
        stage: Number of the pipeline stage.
        args: Megatron's arguments, once they are valid.
        outlines: The units of the chunks.
        situation: What the memory of the stage depends on.
        stages: The reports of all pipeline stages that were examined, this one included.
        verdict: Whether it fits, if a device was given.
        step: The prediction of a step, if a device was given, or why there is none.
        timed: Whether the speed of the device is known, and the prediction has all that takes time.
    """

    world_size: int
    limits: list[Limit] = field(default_factory=list)
    refusal: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    config: FSDPConfig | None = None
    chunks: list[Estimate] = field(default_factory=list)
    uses_fsdp: bool = True
    recipe: Recipe | None = None
    muon: bool = False
    stage: int = 0
    args: Any = None
    outlines: list[Outline] = field(default_factory=list)
    situation: Situation | None = None
    stages: "list[Report]" = field(default_factory=list)
    verdict: Verdict | None = None
    step: CommandStep | str | None = None
    timed: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the command would start to train with our FSDP."""
        return bool(self.chunks) and not self.limits and not self.refusal

    @property
    def exit_code(self) -> int:
        """0 if the command would start to train, 1 if not, 3 if it would and does not fit into the device's memory."""
        if not self.accepted:
            return 1
        return 0 if self.verdict is None or self.verdict.fits else 3

    @property
    def peak(self) -> int:
        """Peak bytes on a rank during a step, without activations."""
        return usage(self.chunks, self.config).total if self.config is not None and self.chunks else 0

    def as_json(self) -> str:
        """The report for programs."""
        found: dict[str, Any] = {
            "accepted": self.accepted,
            "world_size": self.world_size,
            "limits": [{"setting": x.setting, "message": x.reason, "remedy": x.remedy} for x in self.limits],
            "refusal": self.refusal,
            "sizes": self.sizes,
            "import_name": conflict(),
        }
        if self.config is not None:
            found["strategy"] = [self.config.zero_dp_strategy, self.config.outer_dp_sharding_strategy]
            found["units"] = [{**chunk.kinds} for chunk in self.chunks]
            found["dtypes"] = sorted({text for chunk in self.chunks for text in chunk.dtypes})
            found["bytes"] = [asdict(chunk.total) for chunk in self.chunks]
            found["resting"] = sum(chunk.total.resting for chunk in self.chunks)
            found["peak_without_activations"] = self.peak
            found["stage"], found["stages"] = self.stage, [stage.peak for stage in self.stages]
        if self.verdict is not None:
            found["fit"] = self.verdict.as_dict()
        if self.step is not None:
            found["step"] = self.step if isinstance(self.step, str) else {**asdict(self.step), "timed": self.timed}
        return json.dumps(found, indent=2)

    def as_text(self) -> str:
        """The report for people."""
        if not self.uses_fsdp:
            return "The command line does not contain --use-megatron-fsdp, so there is nothing to examine."
        lines = [f"{self.world_size} ranks"]
        if (problem := conflict()) is not None:
            lines.append(f"WARNING  {problem}")
        for limit in self.limits:
            lines += [f"NOT POSSIBLE  {limit.setting}: {limit.reason}", f"              {limit.remedy}"]
        if self.refusal:
            lines.append("ERROR  " + self.refusal.replace("\n", "\n       "))
        if self.accepted and self.config is not None:
            rows = [*self._plan(self.config), *self._bytes(), *self._step(), *self._fit()]
            width = max(len(name) for name, _ in rows)
            lines += [f"{name:<{width}}  {text}".rstrip() for name, text in rows]
        return "\n".join(lines)

    def _plan(self, config: FSDPConfig) -> list[tuple[str, str]]:
        rows = [("parallelism", ", ".join(f"{name} {size}" for name, size in self.sizes.items()))]
        outer = f", outer axis: {config.outer_dp_sharding_strategy}" if self.sizes.get("outer data", 1) > 1 else ""
        rows.append(("strategy", f"{config.zero_dp_strategy}{outer}"))
        if len(self.stages) > 1:
            sizes = ", ".join(f"{stage.peak / GIB:.1f}" for stage in self.stages)
            rows.append(("pipeline stages", f"{sizes} GiB without activations; below is stage {self.stage}"))
        for number, chunk in enumerate(self.chunks):
            kinds = ", ".join(f"{count} x {kind}" for kind, count in chunk.kinds.items()) or "none"
            name = f"units, chunk {number}" if len(self.chunks) > 1 else "units"
            largest = max((unit.bytes.elements for unit in chunk.units[1:]), default=0)
            root = chunk.units[0].bytes.elements
            rows.append((name, f"{kinds}; the largest has {largest:,} parameters here; {root:,} are in no unit"))
        rows.append(("dtypes", "; ".join(sorted({text for chunk in self.chunks for text in chunk.dtypes}))))
        buffers = f"{config.max_unsharded_units} unsharded units, {config.max_reducing_units} reducing gradients"
        rows.append(("buffers", buffers + (", fixed (double buffer)" if config.fsdp_double_buffer else "")))
        gathers = sum(unit.groups for chunk in self.chunks for unit in chunk.units)
        passes = 2 if config.sharding.inner.shards_parameters else 1
        rows.append(("collectives", f"up to {passes * gathers} all-gathers and {gathers} reductions per micro-batch"))
        return rows

    def _bytes(self) -> list[tuple[str, str]]:
        totals = [chunk.total for chunk in self.chunks]
        elements, padding = sum(t.elements for t in totals), sum(t.padding for t in totals)
        rows = [
            ("parameters", f"{elements:,} on this pipeline and tensor-parallel rank, {padding:,} padding"),
            ("bytes per rank", ""),
        ]
        for title, name in (
            ("  compute weights", "compute"),
            ("  main weights", "main"),
            ("  optimizer's moments", "optimizer"),
            ("  in host memory", "host"),
        ):
            rows.append((title, _gib(sum(getattr(t, name) for t in totals))))
        rows.append(("  between steps", _gib(sum(t.resting for t in totals))))
        rows.append(("  peak of a step", f"{_gib(self.peak)}, plus activations"))
        gathered = sum(t.gathered for t in totals)
        rows.append(("  all-gathered", f"up to {_gib(gathered)} in a step with one micro-batch"))
        return rows

    def _fit(self) -> list[tuple[str, str]]:
        if self.verdict is None:
            return [("does it fit?", HOW_TO_ASK)]
        rows = [("does it fit?", self.verdict.text)]
        rows += [("  try", f"{s.change}: {s.total / GIB:.1f} GiB") for s in self.verdict.suggestions]
        if not self.verdict.fits and not self.verdict.suggestions:
            rows.append(("  try", "more tensor, pipeline or context parallelism: no other change suffices"))
        fewest = self.verdict.fewest_ranks
        if fewest is not None:
            rows.append(("  fewest ranks", f"{fewest}, with the same tensor, pipeline, context and expert parallelism"))
        return rows

    def _step(self) -> list[tuple[str, str]]:
        if (step := self.step) is None or isinstance(step, str):
            return [("a step", f"not predicted: {step}")] if step else []
        rows = []
        if self.timed:
            speed, dtype = f"{step.tokens_per_second:,.0f} tokens/s", str(self.args.params_dtype).removeprefix("torch.")
            waits = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in step.waits.items())
            rows = [
                ("a step, simulated", f"{step.seconds:.3f} s, {speed}, MFU {step.mfu:.1%} of {dtype}"),
                ("  waits", f"{waits}, pipeline bubble {step.bubble:.3f} s"),
                ("  optimizer", f"{step.optimizer:.3f} s"),
            ]
            rows += [("  unit", text) for text in step.unit_lines]
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in step.peak.items() if size)
        assumed = f"CUDA context {_gib(CONTEXT)}, NCCL {_gib(NCCL)}, {FRAGMENTATION:.0%} fragmentation"
        rows.append(("tensors at the peak", f"{_gib(sum(step.peak.values()))} in {step.module}: {parts}"))
        rows.append(("  overhead", f"assumed: {assumed}"))
        return rows


def _gib(count: int) -> str:
    return f"{count / GIB:.3f} GiB"
