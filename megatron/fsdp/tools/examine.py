"""Runs a training script until it wraps its model, without memory for weights, and reports how it would be sharded.

Megatron parses the command line, and the script builds its model as one rank of a fake process group, which moves no
data. One process without a GPU is enough for any number of ranks.
"""

import argparse
import copy
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron.fsdp.config import FSDPConfig
from megatron.fsdp.helpers.import_name import conflict
from megatron.fsdp.mcore.limits import MUON, Limit, Settings, broken
from megatron.fsdp.mcore.patches import install, uninstall
from megatron.fsdp.tools.estimate import AxisSizes, Estimate, estimate
from megatron.fsdp.tools.recipes import Recipe, plan_model, recipe_of
from megatron.fsdp.tools.script import run

GIB = 1 << 30
# Tensors with at most this many elements are created on the requested device.
SMALL = 1 << 12


class _Examined(BaseException):
    """Ends the script once the model has been examined. Not an ``Exception``, which the script might catch."""


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

    @property
    def accepted(self) -> bool:
        """Whether the command would start to train with our FSDP."""
        return bool(self.chunks) and not self.limits and not self.refusal

    def as_json(self) -> str:
        """The report for programs."""
        found: dict[str, Any] = {
            "accepted": self.accepted,
            "world_size": self.world_size,
            "limits": [{"setting": x.setting, "message": x.message, "remedy": x.remedy} for x in self.limits],
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
        return json.dumps(found, indent=2)

    @property
    def peak(self) -> int:
        """Peak bytes on a rank during a step, without activations. Only one chunk is active at a time."""
        if self.config is None or not self.chunks:
            return 0
        resting = sum(chunk.total.resting + chunk.total.gradients for chunk in self.chunks)
        return resting + max(c.peak(self.config) - c.total.resting - c.total.gradients for c in self.chunks)

    def as_text(self) -> str:
        """The report for people."""
        if not self.uses_fsdp:
            return "The command line does not contain --use-megatron-fsdp, so there is nothing to examine."
        lines = [f"{self.world_size} ranks"]
        if (problem := conflict()) is not None:
            lines.append(f"WARNING  {problem}")
        for limit in self.limits:
            lines += [f"NOT POSSIBLE  {limit.setting}: {limit.message}", f"              {limit.remedy}"]
        if self.refusal:
            lines.append(f"ERROR  {self.refusal}")
        if self.accepted and self.config is not None:
            lines += self._plan(self.config)
        return "\n".join(lines)

    def _plan(self, config: FSDPConfig) -> list[str]:
        totals = [chunk.total for chunk in self.chunks]
        rows = [("parallelism", ", ".join(f"{name} {size}" for name, size in self.sizes.items()))]
        outer = f", outer axis: {config.outer_dp_sharding_strategy}" if self.sizes.get("outer data", 1) > 1 else ""
        rows.append(("strategy", f"{config.zero_dp_strategy}{outer}"))
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
        elements, padding = sum(t.elements for t in totals), sum(t.padding for t in totals)
        rows.append(("parameters", f"{elements:,} on this pipeline and tensor-parallel rank, {padding:,} padding"))
        rows.append(("bytes per rank", ""))
        for title, name in (
            ("  compute weights", "compute"),
            ("  main weights", "main"),
            ("  optimizer's moments", "optimizer"),
            ("  in host memory", "host"),
        ):
            rows.append((title, _gib(sum(getattr(t, name) for t in totals))))
        rows.append(("  between steps", _gib(sum(t.resting for t in totals))))
        rows.append(("  peak of a step", f"{_gib(self.peak)}, plus activations"))
        rows.append(("  all-gathered", f"up to {_gib(sum(t.gathered for t in totals))} in a step with one micro-batch"))
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {text}".rstrip() for name, text in rows]


def _gib(count: int) -> str:
    return f"{count / GIB:.3f} GiB"


def examine(script: Path, arguments: Sequence[str], world_size: int, rank: int = 0) -> Report:
    """Examine a training command.

    Args:
        script: A training script for Megatron.
        arguments: Its command line.
        world_size: Number of ranks.
        rank: The rank to examine, because pipeline stages differ.
    """
    report = Report(world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    training_arguments: Any = importlib.import_module("megatron.training.arguments")
    training: Any = importlib.import_module("megatron.training.training")
    original, setup = training_arguments.validate_args, training.setup_model_and_optimizer
    usage_error = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = _exit_with_message  # type: ignore[assignment, method-assign]
    install(functools.partial(_look_at, report))
    training_arguments.validate_args = _examining(training_arguments.validate_args, original, report)
    training.setup_model_and_optimizer = _without_memory(setup)
    try:
        run(script, arguments)
        report.refusal = "The script ended without wrapping a model."
    except _Examined:
        pass
    except SystemExit as end:
        report.refusal = end.code if isinstance(end.code, str) else f"The script ended with exit code {end.code}."
    except Exception as error:  # noqa: BLE001 - any error of the script belongs in the report
        report.refusal = f"{type(error).__name__}: {error}"
    finally:
        uninstall()
        argparse.ArgumentParser.error = usage_error  # type: ignore[method-assign]
        training_arguments.validate_args, training.setup_model_and_optimizer = original, setup
    return report


def _exit_with_message(parser: argparse.ArgumentParser, message: str) -> None:
    """Replaces ``ArgumentParser.error``, which prints the message and exits with a number."""
    raise SystemExit(message)


def _examining(validate_args: Callable[..., Any], original: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """A ``validate_args`` that checks limits first, and then selects the fake process group and the meta device."""

    @functools.wraps(original)
    def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
        report.uses_fsdp = bool(getattr(args, "use_megatron_fsdp", False))
        report.limits = broken(Settings(args)) if report.uses_fsdp else []
        if report.limits or not report.uses_fsdp:
            raise _Examined
        report.recipe = recipe_of(args)  # before it is switched off, since the model is built without a GPU
        report.muon = args.optimizer in MUON
        args.fake_process_group = True
        args.use_gloo_process_groups = args.enable_gloo_process_groups = False
        result = validate_args(args, *rest, **kwargs)
        args.init_model_with_meta_device = True
        args.perform_initialization = False  # only shapes are read
        return result

    return validate


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device, even if a device is given, as Megatron's layers do."""

    _CREATE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._CREATE:
            without = func(*args, **{**kwargs, "device": "meta"})
            if without.numel() > SMALL:
                return without
        return func(*args, **kwargs)


def _without_memory(setup: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup)
    def setup_without_memory(*args: Any, **kwargs: Any) -> Any:
        with _LargeOnMeta():
            return setup(*args, **kwargs)

    return setup_without_memory


def _look_at(report: Report, config: Any, ddp_config: Any, module: nn.Module, *rest: Any, **kwargs: Any) -> None:
    """Replaces the wrapper's constructor: adds the model chunk to the report."""
    from megatron.core import parallel_state as groups
    from megatron.fsdp.mcore.adapter import fsdp_config, largest_unit, units_of
    from megatron.fsdp.runtime.partition import resolve_unit_classes

    config.init_model_with_meta_device = False  # set by _examining and not by the user
    report.limits = broken(Settings(ddp_config, config))
    outer = ddp_config.num_distributed_optimizer_instances or 1
    dense = groups.get_data_parallel_world_size(with_context_parallel=True)
    experts = groups.get_expert_data_parallel_world_size()
    # These two need CUDA. The report has named them, and goes on without them.
    usable = copy.copy(ddp_config)
    usable.nccl_ub = usable.megatron_fsdp_cuda_graph_mode = False
    classes = kwargs.get("fsdp_unit_modules") or units_of(module)
    report.config = fsdp_config(config, usable, largest_unit(module, classes))
    report.sizes = {
        "tensor": groups.get_tensor_model_parallel_world_size(),
        "pipeline": groups.get_pipeline_model_parallel_world_size(),
        "context": groups.get_context_parallel_world_size(),
        "expert": groups.get_expert_model_parallel_world_size(),
        "expert tensor": groups.get_expert_tensor_parallel_world_size(),
        "data (with context)": dense,
        "expert data": experts,
        "outer data": outer,
    }
    if report.recipe is not None:
        plan_model(module, report.recipe, config)
    report.chunks.append(
        estimate(
            module,
            resolve_unit_classes(module, classes),
            report.config,
            AxisSizes(dense // outer, outer),
            AxisSizes(max(experts // outer, 1), outer),
            report.muon,
        )
    )
    if len(report.chunks) == (config.virtual_pipeline_model_parallel_size or 1):
        raise _Examined
