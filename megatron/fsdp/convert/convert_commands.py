"""The command that converts training checkpoints between torch_dist and fsdp_dtensor."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from megatron.fsdp.checkpoint.reader import checkpoint_folder
from megatron.fsdp.convert.canonical import TrainingState
from megatron.fsdp.convert.console import Result, command, directory, fields_of, progress_bar, read_options, worker
from megatron.fsdp.convert.groups import EXPERTS, OPTION
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST
from megatron.fsdp.convert.run import format_of, lay_out, read_state, tracked_as, write_state
from megatron.fsdp.naming.names import without_half

# Options that only one format of the output has.
_OF_FORMAT = {
    FSDP_DTENSOR: (
        *("optimizer_prefix", "weight_prefix", "group_map", "rename_mtp_keys"),
        *("transformer_impl", "moe_grouped_gemm"),
    ),
    TORCH_DIST: ("like",),
}


def _split(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(context: click.Context, option: click.Parameter, text: str) -> Path | None:
    return Path(text) if text else None


@command("convert", divided=True)
@directory("input_dir")
@directory("output_dir")
@click.option(
    "--to",
    "format",
    type=click.Choice([*_OF_FORMAT]),
    help="The format of the output. [default: the one that the input does not have]",
)
@click.option("--swiglu", is_flag=True, help="Require SwiGLU layers. They are detected in any case.")
@click.option(
    "--swiglu-modules",
    default="",
    callback=_split,
    help="Require SwiGLU layers in these modules, separated by commas, and in no others.",
)
@click.option("--no-optimizer", "optimizer", flag_value=False, default=True, help="Convert only the model.")
@click.option(
    "--output-optimizer-state-prefix",
    "optimizer_prefix",
    help="Prefix of optimizer state keys in fsdp_dtensor. [default: optimizer.state.module.module.module; for models "
    "that compute in float32, optimizer.state.module.module]",
)
@click.option(
    "--output-model-weight-prefix",
    "weight_prefix",
    default="model.module",
    show_default=True,
    help="Prefix of model keys in fsdp_dtensor.",
)
@click.option(
    OPTION,
    "group_map",
    default="",
    callback=_path,
    help="JSON file with the optimizer group of each parameter. Needed where Megatron's rules are ambiguous.",
)
@click.option(
    "--rename-mtp-keys",
    is_flag=True,
    help="Name the layer in mtp layers mtp_model_layer instead of transformer_layer in fsdp_dtensor.",
)
@read_options
@click.option(
    "--like",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A torch_dist checkpoint whose layout to copy. [default: the layout before an earlier conversion, else "
    "Megatron-Core's]",
)
@click.option("--oom-traceback", is_flag=True, help="Print a traceback if memory is exhausted.")
def convert(input_dir: Path, output_dir: Path, format: str | None, **options: Any) -> Result:
    """Convert a checkpoint between torch_dist and fsdp_dtensor, without a model or a GPU.

    Main weights become the model's weights. Adam's state and the optimizer settings of every parameter are kept.
    torch_dist stores optimizer state by parameter (fully_reshardable), so that it loads at any tensor, pipeline and
    expert parallel size. Run it with torchrun to divide the work among processes.
    """
    folder = checkpoint_folder(input_dir)
    found = format_of(folder)
    other = TORCH_DIST if found == FSDP_DTENSOR else FSDP_DTENSOR
    if format == found:
        raise ValueError(f"{folder}: expected a checkpoint to convert to {format}; it already has that format.")
    _reject_options_of(found, other)
    options["process"], options["processes"] = worker()
    options["like"] = options["like"] and checkpoint_folder(options["like"])
    writing = fields_of(WriteOptions, options)
    state = read_state(folder, fields_of(ReadOptions, options))
    with progress_bar(f"{found} to {other}", lay_out(state, other, writing).nbytes // writing.processes) as progress:
        written = write_state(state, output_dir, other, writing, progress)
    facts: dict[str, Any] = {
        "input": str(folder),
        "input_format": found,
        "output": str(output_dir),
        "output_format": other,
        "iteration": state.common.get("iteration"),
        "tensors": len(written.tensors),
        "objects": len(written.objects),
        "bytes": written.nbytes,
        **_contents(state),
    }
    shown = ("parameters", "step", "lr", "weight_decay", EXPERTS)
    groups = [", ".join(f"{name} {group.get(name)}" for name in shown) for group in facts["optimizer_groups"]]
    end = f"Converted checkpoint saved to {output_dir}. Train from it with FSDP and --load {output_dir}."
    if not state.optimizer_state:
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in written.tensors.values()})
        end += f" It has no optimizer state, and weights in {' and '.join(dtypes)}: add --no-load-optim or --finetune."
    if other == TORCH_DIST and not tracked_as(output_dir):
        end += " Megatron's DDP loads it only from a folder with a name such as iter_0000100: convert it into one."
    return Result(facts, facts | {"optimizer_groups": groups}, end)


def _reject_options_of(format: str, other: str) -> None:
    """Raise an error if an option was given that only the first of these formats has."""
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name in _OF_FORMAT[format]:
            raise ValueError(f"{option.opts[0]}: only for conversions to {format}; this one is to {other}.")


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


COMMANDS: tuple[click.Command, ...] = (convert,)
