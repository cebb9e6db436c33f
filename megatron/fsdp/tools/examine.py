"""Runs a training script until it wraps its model, without memory for weights, and reports how it would be sharded.

Megatron parses the command line, and the script builds its model as one rank of a fake process group, which moves no
data. One process without a GPU is enough for any number of ranks.
"""

import argparse
import copy
import importlib
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron.fsdp.helpers.patches import around
from megatron.fsdp.helpers.spelling import did_you_mean
from megatron.fsdp.mcore import cpu
from megatron.fsdp.mcore.cpu import arguments as cpu_arguments
from megatron.fsdp.mcore.limits import MUON, Settings, broken
from megatron.fsdp.mcore.patches import install, uninstall
from megatron.fsdp.quantized.transformer_engine import MXFP8, NVFP4, Blockwise, Float8, TransformerEngineStorage
from megatron.fsdp.tools.devices import Capacity
from megatron.fsdp.tools.estimate import AxisSizes, estimate_outline, outline
from megatron.fsdp.tools.fit import Situation
from megatron.fsdp.tools.progress import Progress
from megatron.fsdp.tools.recipes import plan_model, recipe_of
from megatron.fsdp.tools.report import Report
from megatron.fsdp.tools.script import run

# What Megatron's layers log, and begin with: an earlier run's has its process groups.
LOGS: dict[str, Any] = {
    "multi_token_prediction.MTPLossLoggingHelper.tracker": {},
    "moe.moe_logging._MOE_METRICS_TRACKER": None,
}
# Tensors with at most this many elements are created on the requested device.
SMALL = 1 << 12
# Megatron's help texts of settings, by class.
_HELP: dict[type, Any] = {}


class _Examined(BaseException):
    """Ends the script once the model has been examined. Not an ``Exception``, which the script might catch."""


@dataclass
class _Examination:
    """One run of the script as one rank: its report, and what is known before the model is built.

    Attributes:
        report: What was found.
        capacity: Bytes of the device's memory; None if it was not given.
        progress: Where phases are shown.
        micro_batches: See ``Situation``.
    """

    report: Report
    capacity: int | None
    progress: Progress
    micro_batches: int = 0


def examine(
    script: Path,
    arguments: Sequence[str],
    world_size: int,
    rank: int | None = None,
    capacity: int | None = None,
    progress: Progress | None = None,
    ends: bool = False,
) -> Report:
    """Examine a training command.

    Args:
        script: A training script for Megatron.
        arguments: Its command line.
        world_size: Number of ranks.
        rank: The rank to examine. None: a rank of every pipeline stage, of which the fullest is reported.
        capacity: Bytes of the device's memory, if it shall be compared.
        progress: Where phases are shown.
        ends: Of the pipeline's stages, examine only the first and the last one.
    """
    progress = progress or Progress()
    found = _Examination(Report(world_size), capacity, progress)
    progress.start("importing Megatron")
    _examine_rank(found, script, arguments, rank or 0)
    reports = [found.report]
    count = found.report.sizes.get("pipeline", 1)
    for stage in range(max(count - 1, 1) if ends else 1, count if rank is None else 0):
        if not reports[-1].accepted:
            break
        progress.start(f"examining pipeline stage {stage} of {count}")
        found = _Examination(Report(world_size, stage=stage), capacity, Progress())
        # Megatron numbers ranks stage by stage.
        _examine_rank(found, script, arguments, stage * (world_size // count))
        reports.append(found.report)
    progress.end()
    last = reports[-1]
    if not last.accepted:
        if last.stage and last.refusal:
            last.refusal = f"pipeline stage {last.stage}: {last.refusal}"
        return last
    best = max(reports, key=lambda report: report.peak)
    best.stages = reports
    return best


def _examine_rank(examination: _Examination, script: Path, arguments: Sequence[str], rank: int) -> None:
    """Run the script as one rank, and fill the report."""
    report = examination.report
    become_rank(rank, report.world_size)
    try:
        with _prepared(examination):
            examination.progress.start("running the script up to its arguments")
            run(script, arguments)
        report.refusal = "The script ended without wrapping a model."
    except _Examined:
        pass
    except SystemExit as end:
        report.refusal = end.code if isinstance(end.code, str) else f"The script ended with exit code {end.code or 0}."
    except Exception as error:  # noqa: BLE001 - any error of the script belongs in the report
        report.refusal = described(error, script)


def become_rank(rank: int, world_size: int) -> None:
    """Set the environment of a rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


@contextmanager
def _prepared(examination: _Examination) -> Iterator[None]:
    """Replace what a script must not do here, or what would take long, while it runs."""
    arguments: Any = importlib.import_module("megatron.training.arguments")
    training: Any = importlib.import_module("megatron.training.training")
    with dry_run(partial(_look_at, examination), lambda: 1 if examination.report.recipe is None else None) as replace:
        replace(argparse.ArgumentParser, "error", _exit_with_message)
        replace(os, "_exit", _exit_at_once)
        replace(arguments, "validate_args", partial(_validate, examination))
        replace(training, "setup_model_and_optimizer", partial(_set_up, examination))
        yield


@contextmanager
def dry_run(
    wrapper: Callable[..., Any], most: Callable[[], int | None]
) -> Iterator[Callable[[Any, str, Callable[..., Any]], None]]:
    """Wrap models with ``wrapper``, and afterwards undo Megatron's initialization: the script can run as another rank.

    Args:
        wrapper: Called instead of the wrapper's constructor.
        most: Of :func:`first_layers`.

    Yields:
        Replaces a function of an object, up to the end, by one that is called with it and its arguments.
    """
    training: Any = importlib.import_module("megatron.training.training")
    initialization: Any = importlib.import_module("megatron.fsdp.mcore.initialization")
    blocks: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    groups: Any = importlib.import_module("megatron.core.parallel_state")
    options: Any = importlib.import_module("megatron.training.argument_utils")
    with ExitStack() as stack:

        def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), by)))

        install(wrapper)
        stack.callback(uninstall)
        # Nothing is initialized, so nothing needs to be recorded for it.
        replace(initialization, "record", lambda record, build, _: build())
        replace(dist, "new_group", _own_group)
        replace(groups, "create_group", _own_group)
        replace(options.ArgumentGroupFactory, "_get_field_docstrings", _docstrings)
        replace(groups, "generate_masked_orthogonal_rank_groups", _rank_groups)
        replace(blocks, "build_module", first_layers(most))
        for name, value in LOGS.items():
            with suppress(ImportError, AttributeError):  # other versions of Megatron-Core
                stack.enter_context(mock.patch(f"megatron.core.transformer.{name}", copy.copy(value)))
        try:
            yield replace
        finally:
            training.destroy_global_state()
            if dist.is_initialized():
                dist.destroy_process_group()


def first_layers(most: Callable[[], int | None]) -> Callable[..., Any]:
    """Replaces Megatron's ``build_module`` for layers.

    Of equal layers in a row, it builds the first ``most()``, or all if that is None. The last one stands for the rest.
    """
    key: tuple[int, ...] = ()
    same: list[Any] = []

    def build_layer(build: Callable[..., Any], spec: Any, **kwargs: Any) -> Any:
        nonlocal key, same
        before, key = key, tuple(map(id, (spec, kwargs["config"], kwargs.get("vp_stage"))))
        if key != before:
            same = []
        if len(same) < (most() or len(same) + 1):
            same.append(build(spec, **kwargs))
        else:  # the block looks for the model's last layer
            same[-1].layer_number += 1
        return same[-1]

    return build_layer


def _own_group(new_group: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Create no groups of other ranks, of which there are thousands at scale."""
    if ranks is not None and int(os.environ["RANK"]) not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    return new_group(ranks, *args, **kwargs)


def _rank_groups(generate: Callable[..., Any], world_size: int, sizes: list[int], mask: list[bool]) -> list[list[int]]:
    """All groups of ranks along some axes. Most runs of the script ask for the same ones."""
    return [[*group] for group in _generated(generate, world_size, tuple(sizes), tuple(mask))]


def _docstrings(read: Callable[..., Any], factory: Any, of: type) -> Any:
    """Help texts, for which Megatron's parser reads the same source code in every run."""
    if of not in _HELP:
        _HELP[of] = read(factory, of)
    return _HELP[of]


@cache
def _generated(generate: Callable[..., Any], world_size: int, sizes: tuple[int, ...], mask: tuple[bool, ...]) -> Any:
    return generate(world_size, sizes, mask)


def described(error: Exception, script: Path) -> str:
    """An error of the script with its place: in the script, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(script)]
    lines = [f"{type(error).__name__}: {error}"]
    lines += [f"at {frame.filename}:{frame.lineno}: {frame.line}" for frame in (*own[-1:], *frames[-1:]) if frame.line]
    return "\n".join(dict.fromkeys(lines))


def _exit_at_once(exit_: Callable[..., Any], code: int) -> None:
    """Replaces ``os._exit``, which would end the examination without a report."""
    raise SystemExit(f"The script called os._exit({code}).")


def _exit_with_message(error: Callable[..., Any], parser: argparse.ArgumentParser, message: str) -> None:
    """Replaces ``ArgumentParser.error``, which prints to stderr and exits with a number. Adds hints."""
    flags = parser._option_string_actions
    lines = [message]
    if message.startswith("unrecognized arguments:"):
        for word in message.split():
            if word.startswith("--") and (hint := did_you_mean(word.partition("=")[0], flags, 0.7)):
                lines.append(f"{word}:{hint}")
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice is not None:
        lines.append(did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2])).strip())
    for flag in re.findall(r"--[\w-]+", message):
        if flag in flags:
            lines.append(f"usage: {_usage(flags[flag])}")
            break
    raise SystemExit("\n".join(line for line in lines if line))


def _usage(action: argparse.Action) -> str:
    """The option with its values and help. argparse's own formatter fails on a stray % in a help text."""
    values = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.metavar or action.dest.upper()
    return " ".join(f"{action.option_strings[-1]} {values}  {action.help or ''}".split())


def _validate(
    examination: _Examination, validate_args: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Check limits first, and then select the fake process group and the meta device."""
    report = examination.report
    report.uses_fsdp = bool(getattr(args, "use_megatron_fsdp", False))
    report.limits = broken(Settings(args)) if report.uses_fsdp else []
    if report.limits or not report.uses_fsdp:
        raise _Examined
    report.recipe = recipe_of(args)  # before it is switched off, since the model is built without a GPU
    report.muon = args.optimizer in MUON
    keep_to_itself(args)
    if isinstance(examination.capacity, Capacity):
        _require_formats(args, examination.capacity)
    if examination.capacity is not None and cpu.is_enabled():
        _validate_as_on_gpu(validate_args, copy.deepcopy(args), *rest, **kwargs)
    args.fake_process_group = 1  # a dry run: True is refused
    examination.micro_batches = (args.global_batch_size or 0) // max(args.micro_batch_size or 1, 1)
    result = validate_args(args, *rest, **kwargs)
    args.init_model_with_meta_device = True
    args.perform_initialization = False  # only shapes are read
    report.args = args
    examination.progress.start("reading the tokenizer, creating process groups")
    return result


# The formats of recipes.
_FORMATS: dict[str, type[TransformerEngineStorage]] = {
    **{"delayed": Float8, "tensorwise": Float8, "blockwise": Blockwise, "mxfp8": MXFP8}
}


def _require_formats(args: Any, capacity: Capacity) -> None:
    """Raise ValueError if a GPU lacks the format of FP8 or FP4 that a command line asks for."""
    recipe = str(getattr(args.fp8_recipe, "value", args.fp8_recipe))
    asked = {f"--fp8-recipe {recipe}": _FORMATS.get(recipe) if args.fp8 else None}
    asked["--fp4-format"] = NVFP4 if args.fp4 else None
    for flag, storage in asked.items():
        if storage is not None and capacity.capability < storage.capability:
            needed, present = (".".join(map(str, each)) for each in (storage.capability, capacity.capability))
            raise ValueError(
                f"{flag}: needs a GPU with compute capability {needed} or higher; {capacity.gpu} has {present}. Use "
                "bf16, or a recipe that docs/guide/fp8.md lists for this GPU."
            )


def keep_to_itself(args: Any) -> None:
    """Change arguments so that one process can take the place of a rank."""
    args.async_save = False  # nothing is saved, and its library may be missing on this machine
    args.use_gloo_process_groups = args.enable_gloo_process_groups = False


def has_fused_attention(args: Any) -> bool:
    """Whether a command line that is not validated yet has attention that keeps no scores."""
    backend = getattr(args.attention_backend, "name", str(args.attention_backend))
    return args.transformer_impl != "local" and backend not in ("unfused", "local")


def _validate_as_on_gpu(validate_args: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> None:
    """Raise what Megatron would raise on a GPU, before the arguments are changed for a CPU.

    Transformer Engine counts as installed there if it is to provide the layers.
    """
    arguments: Any = importlib.import_module("megatron.training.arguments")
    core: Any = importlib.import_module("megatron.core.utils")
    installed = find_spec("transformer_engine") is not None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cpu_arguments, "adjust", lambda args: []))
        if not installed and args.transformer_impl == "transformer_engine":
            stack.enter_context(mock.patch.object(core, "_te_version", core.PkgVersion("99")))
        elif not installed:
            rows = cpu_arguments.TRANSFORMER_ENGINE
            given = [row.argument for row in rows if getattr(args, row.argument) not in (None, row.value)]
            if given:
                raise ValueError(
                    f"{', '.join(given)}: needs Transformer Engine. Leave it off, or give --transformer-impl "
                    f"transformer_engine; got {args.transformer_impl}."
                )
        result = validate_args(args, *rest, **kwargs)
        for row in cpu_arguments.LIBRARIES:
            setattr(result, row.argument, row.value)  # Megatron would look for their kernels on this machine
        arguments.core_transformer_config_from_args(result)


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


def _set_up(examination: _Examination, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    examination.progress.start("building the model on the meta device")
    with _LargeOnMeta():
        return setup(*args, **kwargs)


def _look_at(
    examination: _Examination, config: Any, ddp_config: Any, module: nn.Module, *rest: Any, **kwargs: Any
) -> None:
    """Replaces the wrapper's constructor: adds the model chunk to the report."""
    from megatron.core import parallel_state as groups
    from megatron.fsdp.mcore.adapter import fsdp_config, largest_unit, units_of
    from megatron.fsdp.mcore.options import EXPERT_INSTANCES
    from megatron.fsdp.runtime.partition import resolve_unit_classes

    _check_experts(config)
    examination.progress.start("planning units and layouts")
    report = examination.report
    config.init_model_with_meta_device = False  # set by _validate and not by the user
    report.limits = broken(Settings(ddp_config, config))
    outer = ddp_config.num_distributed_optimizer_instances or 1
    dense = groups.get_data_parallel_world_size(with_context_parallel=True)
    experts = groups.get_expert_data_parallel_world_size()
    # These two need CUDA. The report has named them, and goes on without them.
    usable = copy.copy(ddp_config)
    usable.nccl_ub = usable.megatron_fsdp_cuda_graph_mode = False
    units = kwargs.get("fsdp_unit_modules") or units_of(module, ddp_config)
    times = _without_repeats(module)
    report.config = fsdp_config(config, usable, largest_unit(module, units))
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
    classes = resolve_unit_classes(module, units)
    if report.recipe is not None:
        plan_model(module, report.recipe, config)
    of_experts = getattr(ddp_config, EXPERT_INSTANCES, None) or outer
    axes = AxisSizes(dense // outer, outer), AxisSizes(max(experts // of_experts, 1), of_experts)
    report.outlines.append(outline(module, classes, report.config, times))
    report.chunks.append(estimate_outline(report.outlines[-1], report.config, *axes, report.muon))
    if len(report.chunks) == (config.virtual_pipeline_model_parallel_size or 1):
        report.stage = groups.get_pipeline_model_parallel_rank()
        context, batches = report.sizes["context"], examination.micro_batches
        report.situation = Situation(report.outlines, report.config, *axes, report.muon, context, batches)
        raise _Examined


def _check_experts(config: Any) -> None:
    """Raise ValueError if experts have an activation that Megatron would refuse in the first forward."""
    if not (config.num_moe_experts and config.bias_activation_fusion):
        return
    swiglu = config.activation_func is nn.functional.silu
    if not config.gated_linear_unit or (swiglu and config.add_bias_linear):
        raise ValueError(
            "num_experts: Megatron fuses the activation of experts only with a gate, and SwiGLU without biases. Add "
            "--swiglu --disable-bias-linear, or turn fusion off: "
            f"--no-bias-{'swiglu' if swiglu else 'gelu'}-fusion."
        )


def _without_repeats(module: nn.Module) -> Counter[nn.Module]:
    """Take layers out of their lists that stand for others there. Returns how many each one stands for."""
    times: Counter[nn.Module] = Counter()
    for layers in [each for each in module.modules() if isinstance(each, nn.ModuleList)]:
        times.update(layers)
        layers._modules = dict(layers.named_children())  # each once
    return times
