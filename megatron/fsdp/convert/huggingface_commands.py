"""The commands export-safetensors and import-safetensors, which exchange models with Hugging Face."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import torch

from megatron.fsdp.checkpoint.reader import RELEASE
from megatron.fsdp.convert.console import (
    console,
    directory,
    folder_of,
    gib,
    handled,
    is_first,
    json_option,
    layer_options,
    line,
    print_json,
    progress_bar,
    table,
    worker,
)
from megatron.fsdp.convert.huggingface.arguments import flags
from megatron.fsdp.convert.huggingface.folder import divide
from megatron.fsdp.convert.huggingface.transfer import (
    ARGUMENTS,
    Export,
    Import,
    ImportOptions,
    export,
    import_,
    prepare_export,
    prepare_import,
)
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.run import read_state

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "keep": None}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class Size(click.ParamType):
    """A number of bytes: ``5GiB``, ``500MB``, ``1073741824``."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the size, or report it as a usage error."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).upper())
        if match is None or match[2] not in _UNITS or not float(match[1]):
            self.fail(f"expected a size such as 5GiB or 500MB; got {value!r}", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


@click.command("export-safetensors")
@directory("checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--config",
    "original",
    type=click.Path(path_type=Path),
    help="Folder of the original Hugging Face model, whose config.json and tokenizer files are copied.",
)
@click.option("--dtype", type=click.Choice([*_DTYPES]), default="bfloat16", show_default=True, help="Of the weights.")
@click.option("--max-shard-size", type=Size(), default="5GiB", show_default=True, help="Largest size of a file.")
@click.option(
    "--vocab-size",
    type=int,
    help="Number of tokens without padding, if neither --config nor the checkpoint contains it.",
)
@layer_options
@click.option("--no-verify", is_flag=True, help="Do not verify the checksums of the checkpoint's files.")
@json_option
@handled
def export_safetensors(
    checkpoint: Path,
    out: Path,
    original: Path | None,
    dtype: str,
    max_shard_size: int,
    vocab_size: int | None,
    transformer_impl: str | None,
    moe_grouped_gemm: bool | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Export a checkpoint's weights to a Hugging Face model: Llama, Qwen3, Qwen3-MoE or DeepSeek-V3."""
    process, processes = worker()
    reading = ReadOptions(transformer_impl=transformer_impl, moe_grouped_gemm=moe_grouped_gemm, verify=not no_verify)
    state = read_state(folder_of(checkpoint), reading)
    plan = prepare_export(state, _DTYPES[dtype], original, vocab_size)
    with progress_bar("Writing", plan.nbytes // processes) as progress:
        export(plan, out, max_shard_size, WriteOptions(process=process, processes=processes), progress)
    files = list(divide(plan.tensors, max_shard_size))
    facts = {"out": str(out), "files": files}
    _report(as_json, plan, out, len(plan.tensors), facts, (">files", str(len(files))))


@click.command("import-safetensors")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", "format_", type=click.Choice(["fsdp_dtensor", "torch_dist"]), default="fsdp_dtensor", show_default=True
)
@click.option(
    "--layer-spec",
    type=click.Choice(["transformer_engine", "local"]),
    default="transformer_engine",
    show_default=True,
    help="The layers that will load the checkpoint: --transformer-impl in training.",
)
@click.option(
    "--make-vocab-size-divisible-by",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Pad the embedding to a multiple of this: training's value times its tensor parallelism.",
)
@click.option("--dtype", type=click.Choice([*_DTYPES]), default="float32", show_default=True, help="Of the weights.")
@json_option
@handled
def import_safetensors(
    folder: Path,
    out: Path,
    format_: str,
    layer_spec: str,
    make_vocab_size_divisible_by: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Import a Hugging Face model into a checkpoint for training: give OUT to --load, and the flags in OUT/args.sh."""
    process, processes = worker()
    options = ImportOptions(
        format_,
        layer_spec,
        make_vocab_size_divisible_by,
        _DTYPES[dtype],
        WriteOptions(process=process, processes=processes),
    )
    plan = prepare_import(folder, options)
    with progress_bar("Writing", plan.nbytes // processes) as progress:
        import_(plan, out, options, progress)
    words, checkpoint = flags(plan.args), out / RELEASE
    facts = {"out": str(out), "checkpoint": str(checkpoint), "format": format_, "flags": words}
    _report(as_json, plan, checkpoint, len(plan.state.weights) + len(plan.state.buffers), facts, ("format", format_))
    if is_first() and not as_json:
        line(console(), f"Flags for training, also in {out / ARGUMENTS}; add --load {out} --finetune:")
        line(console(), shlex.join(words))


def _report(
    as_json: bool, plan: Export | Import, path: Path, tensors: int, facts: dict[str, Any], column: tuple[str, str]
) -> None:
    """Print the result of a conversion, on the first process.

    Args:
        as_json: Print JSON instead of a table.
        plan: The conversion.
        path: Its output.
        tensors: Number of tensors.
        facts: Further entries of the JSON output.
        column: Name and value of a further column of the table.
    """
    if not is_first():
        return
    architecture = plan.model.architecture
    if as_json:
        common = {"architecture": architecture, "tensors": tensors, "bytes": plan.nbytes, "notes": plan.notes}
        print_json(facts | common)
        return
    out, shown = console(), table(str(path), "architecture", ">tensors", ">size", column[0])
    shown.add_row(architecture, str(tensors), gib(plan.nbytes), column[1])
    out.print(shown)
    for note in plan.notes:
        line(out, f"Note: {note}", "yellow")


COMMANDS: tuple[click.Command, ...] = (export_safetensors, import_safetensors)
