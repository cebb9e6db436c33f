"""The commands export-safetensors and import-safetensors, which exchange models with Hugging Face."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from megatron.fsdp.checkpoint.reader import RELEASE, checkpoint_folder
from megatron.fsdp.convert.console import Result, command, directory, fields_of, progress_bar, read_options, worker
from megatron.fsdp.convert.huggingface.arguments import flags
from megatron.fsdp.convert.huggingface.folder import Export, divide, export
from megatron.fsdp.convert.huggingface.transfer import (
    ARGUMENTS,
    Import,
    ImportOptions,
    import_,
    prepare_export,
    prepare_import,
)
from megatron.fsdp.convert.options import ReadOptions, WriteOptions
from megatron.fsdp.convert.rewrites import FSDP_DTENSOR, TORCH_DIST
from megatron.fsdp.convert.run import read_state

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "keep": None}
_Command = TypeVar("_Command", bound=Callable[..., Any])
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


def _dtype_option(default: str) -> Callable[[_Command], _Command]:
    return click.option(
        "--dtype",
        type=click.Choice([*_DTYPES]),
        callback=lambda context, option, name: _DTYPES[name],
        default=default,
        show_default=True,
        help="Of the weights.",
    )


@command("export-safetensors", divided=True, local=True)
@directory("checkpoint")
@directory("out")
@click.option(
    "--config",
    "original",
    type=click.Path(path_type=Path),
    help="Folder of the original Hugging Face model, whose config.json and tokenizer files are copied.",
)
@_dtype_option("bfloat16")
@click.option("--max-shard-size", type=Size(), default="5GiB", show_default=True, help="Largest size of a file.")
@click.option(
    "--vocab-size",
    type=int,
    help="Number of tokens without padding, if neither --config nor the checkpoint contains it.",
)
@read_options
def export_safetensors(
    checkpoint: Path,
    out: Path,
    original: Path | None,
    dtype: torch.dtype | None,
    max_shard_size: int,
    vocab_size: int | None,
    **options: Any,
) -> Result:
    """Export a checkpoint's weights to a Hugging Face model: Llama, Qwen3, Qwen3-MoE or DeepSeek-V3."""
    process, processes = worker()
    state = read_state(checkpoint_folder(checkpoint), fields_of(ReadOptions, options))
    plan = prepare_export(state, dtype, original, vocab_size)
    with progress_bar("Writing", plan.nbytes // processes) as progress:
        export(plan, out, max_shard_size, WriteOptions(process=process, processes=processes), progress)
    files = list(divide(plan.tensors, max_shard_size))
    facts = {"out": str(out), "files": files, "tensors": len(plan.tensors), **_facts(plan)}
    return Result(facts, facts | {"files": len(files)})


@command("import-safetensors", divided=True, local=True)
@directory("folder")
@directory("out")
@click.option("--format", type=click.Choice([FSDP_DTENSOR, TORCH_DIST]), default=FSDP_DTENSOR, show_default=True)
@click.option(
    "--layer-spec",
    type=click.Choice(["transformer_engine", "local"]),
    default="transformer_engine",
    show_default=True,
    help="The layers that will load the checkpoint: --transformer-impl in training.",
)
@click.option(
    "--make-vocab-size-divisible-by",
    "vocabulary_multiple",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Pad the embedding to a multiple of this: training's value times its tensor parallelism.",
)
@_dtype_option("float32")
def import_safetensors(folder: Path, out: Path, **settings: Any) -> Result:
    """Import a Hugging Face model into a checkpoint for training: give OUT to --load, and the flags in OUT/args.sh."""
    process, processes = worker()
    options = ImportOptions(**settings, write=WriteOptions(process=process, processes=processes))
    plan = prepare_import(folder, options)
    with progress_bar("Writing", plan.nbytes // processes) as progress:
        import_(plan, out, options, progress)
    words, tensors = flags(plan.args), len(plan.state.weights) + len(plan.state.buffers)
    facts = {"out": str(out), "checkpoint": str(out / RELEASE), "format": options.format, "tensors": tensors}
    facts |= _facts(plan)
    end = f"Flags for training, also in {out / ARGUMENTS}; add --load {out} --finetune:\n{shlex.join(words)}"
    return Result(facts | {"flags": words}, facts, end)


def _facts(plan: Export | Import) -> dict[str, Any]:
    return {"architecture": plan.model.architecture, "bytes": plan.nbytes, "notes": plan.notes}


COMMANDS: tuple[click.Command, ...] = (export_safetensors, import_safetensors)
