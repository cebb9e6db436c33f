"""Commands that convert training checkpoints between torch_dist and fsdp_dtensor."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from megatron.fsdp.convert.canonical import TrainingState
from megatron.fsdp.convert.console import (
    console,
    directory,
    folder_of,
    gib,
    handled,
    is_first,
    json_option,
    layer_options,
    msc_option,
    print_json,
    progress_bar,
    table,
    worker,
)
from megatron.fsdp.convert.groups import EXPERTS, OPTION
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST
from megatron.fsdp.convert.run import format_of, lay_out, read_state, write_state
from megatron.fsdp.naming.names import without_half

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# Arguments and options of both directions, in the order of the help.
_SHARED: tuple[_Decorator, ...] = (
    directory("input_dir"),
    click.argument("output_dir", type=click.Path(path_type=Path)),
    click.option("--swiglu", is_flag=True, help="Require SwiGLU layers. They are detected in any case."),
    click.option(
        "--swiglu-modules",
        default="",
        help="Require SwiGLU layers in these modules, separated by commas, and in no others.",
    ),
    click.option("--no-optimizer", is_flag=True, help="Convert only the model, for finetuning."),
    click.option("--no-verify", is_flag=True, help="Skip the comparison of files with the checkpoint's checksums."),
    click.option("--oom-traceback", is_flag=True, help="Print a traceback if memory is exhausted."),
    msc_option,
    json_option,
)


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(_SHARED):
        command = decorate(command)
    return command


@click.command("convert-torch-dist-to-fsdp-dtensor")
@_shared
@click.option(
    "--output-optimizer-state-prefix",
    default=None,
    help="Prefix of optimizer state keys. [default: optimizer.state.module.module.module; for models that compute in "
    "float32, optimizer.state.module.module]",
)
@click.option("--output-model-weight-prefix", default="model.module", show_default=True, help="Prefix of model keys.")
@click.option(
    OPTION,
    "group_map",
    default="",
    help="JSON file with the optimizer group of each parameter. Needed where Megatron's rules are ambiguous.",
)
@click.option(
    "--rename-mtp-keys", is_flag=True, help="Name the layer in mtp layers mtp_model_layer instead of transformer_layer."
)
@layer_options
@handled
def torch_dist_to_fsdp_dtensor(
    input_dir: Path,
    output_dir: Path,
    swiglu: bool,
    swiglu_modules: str,
    no_optimizer: bool,
    no_verify: bool,
    oom_traceback: bool,
    as_json: bool,
    output_optimizer_state_prefix: str | None,
    output_model_weight_prefix: str,
    group_map: str,
    rename_mtp_keys: bool,
    transformer_impl: str | None,
    moe_grouped_gemm: bool | None,
) -> None:
    """Convert a torch_dist checkpoint to fsdp_dtensor, without a model or a GPU.

    Main weights become the model's weights. Adam's state and the optimizer settings of every parameter are kept. Run it
    with torchrun to divide the work among processes.
    """
    reading = ReadOptions(
        swiglu=swiglu,
        swiglu_modules=_names(swiglu_modules),
        group_map=Path(group_map) if group_map else None,
        transformer_impl=transformer_impl,
        moe_grouped_gemm=moe_grouped_gemm,
        optimizer=not no_optimizer,
        verify=not no_verify,
    )
    process, processes = worker()
    writing = WriteOptions(
        weight_prefix=output_model_weight_prefix,
        optimizer_prefix=output_optimizer_state_prefix,
        rename_mtp_keys=rename_mtp_keys,
        process=process,
        processes=processes,
    )
    with _memory_errors(oom_traceback):
        _convert(input_dir, output_dir, FSDP_DTENSOR, reading, writing, as_json)


@click.command("convert-fsdp-dtensor-to-torch-dist")
@_shared
@click.option(
    "--like",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A torch_dist checkpoint whose layout to copy. [default: the layout before an earlier conversion, else "
    "Megatron-Core's]",
)
@handled
def fsdp_dtensor_to_torch_dist(
    input_dir: Path,
    output_dir: Path,
    swiglu: bool,
    swiglu_modules: str,
    no_optimizer: bool,
    no_verify: bool,
    oom_traceback: bool,
    as_json: bool,
    like: Path | None,
) -> None:
    """Convert an fsdp_dtensor checkpoint to torch_dist, without a model or a GPU.

    Optimizer state is stored by parameter (fully_reshardable), so that it loads at any tensor, pipeline and expert
    parallel size.
    """
    reading = ReadOptions(
        swiglu=swiglu, swiglu_modules=_names(swiglu_modules), optimizer=not no_optimizer, verify=not no_verify
    )
    process, processes = worker()
    writing = WriteOptions(like=folder_of(like) if like else None, process=process, processes=processes)
    with _memory_errors(oom_traceback):
        _convert(input_dir, output_dir, TORCH_DIST, reading, writing, as_json)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def _memory_errors(shown: bool) -> Iterator[None]:
    """Report exhausted memory like any other error, with its traceback if requested."""
    try:
        yield
    except MemoryError as error:
        if shown:
            click.echo(traceback.format_exc(), err=True)
        raise RuntimeError(
            f"memory is exhausted: {error}. {'' if shown else '--oom-traceback prints the traceback.'}"
        ) from error


def _convert(
    source: Path, target: Path, format: str, reading: ReadOptions, writing: WriteOptions, as_json: bool
) -> None:
    folder = folder_of(source)
    found = format_of(folder)
    if found == format:
        raise ValueError(f"{folder}: expected a checkpoint to convert to {format}; it already has that format.")
    state = read_state(folder, reading)
    output = lay_out(state, format, writing)
    total = sum(tensor.nbytes for tensor in output.tensors.values())
    with progress_bar(f"{found} to {format}", total // writing.processes) as progress:
        written = write_state(state, target, format, writing, progress)
    if not is_first():
        return
    report = {
        "input": str(folder),
        "input_format": found,
        "output": str(target),
        "output_format": format,
        "iteration": state.common.get("iteration"),
        "tensors": written.tensors,
        "objects": written.objects,
        "bytes": written.nbytes,
        **_contents(state),
    }
    if as_json:
        print_json(report)
    else:
        _print(report)


def _contents(state: TrainingState) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    for group in state.group_of.values():
        if group not in groups:
            groups.append(group)
    return {
        "parameters": len({without_half(name) for name in state.weights}),
        "swiglu_parameters": len({without_half(name) for name in state.weights if without_half(name) != name}),
        "optimizer_state": sorted({kind for states in state.optimizer_state.values() for kind in states}),
        "optimizer_groups": [
            {"parameters": sum(other == group for other in state.group_of.values()), **group} for group in groups
        ],
    }


def _print(report: dict[str, Any]) -> None:
    out = console()
    summary = table(f"{report['input_format']} to {report['output_format']}", "", "value")
    summary.add_row("input", report["input"])
    summary.add_row("output", report["output"])
    summary.add_row("iteration", str(report["iteration"]))
    summary.add_row("size", gib(report["bytes"]))
    summary.add_row("tensors", f"{report['tensors']:,}")
    summary.add_row("objects", f"{report['objects']:,}")
    summary.add_row("parameters", f"{report['parameters']:,}, of these SwiGLU {report['swiglu_parameters']:,}")
    summary.add_row("optimizer state", ", ".join(report["optimizer_state"]) or "none")
    out.print(summary)
    if report["optimizer_groups"]:
        listed = table("optimizer groups", ">parameters", ">step", ">lr", ">weight decay", "experts")
        for group in report["optimizer_groups"]:
            listed.add_row(
                f"{group['parameters']:,}",
                str(group.get("step")),
                str(group.get("lr")),
                str(group.get("weight_decay")),
                "yes" if group.get(EXPERTS) else "no",
            )
        out.print(listed)
    out.print(f"Converted checkpoint saved to {report['output']}.", soft_wrap=True)


COMMANDS: tuple[click.Command, ...] = (torch_dist_to_fsdp_dtensor, fsdp_dtensor_to_torch_dist)
